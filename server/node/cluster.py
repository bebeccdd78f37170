"""Devices and links: measured once on this node, registered elsewhere, joined for several nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import placer
from placer.schema import Cluster, Device, Link

from ..problem import Problem, clip
from ..settings import Settings
from ..workers.measuring import measure_devices
from ..workers.worker import Crashed, Killed, MissingPackage, Refused, Task, Worker

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("placer_server")

REGISTER_EVERY_S = 60.0
RETRY_S = 10.0


class NodeCluster:
    """Cache of this node's measured cluster.

    A worker process measures it, so that the service itself never imports torch.

    Args:
        settings: Limits on the time of a measurement.
        task: Function that measures, see ``placer_server.workers.worker.Task``.
    """

    def __init__(self, settings: Settings, task: Task[bytes] = measure_devices) -> None:
        self._settings = settings
        self._task = task
        self._lock = asyncio.Lock()
        self._measured: bytes | None = None
        self._worker: Worker[bytes] | None = None

    async def get(self) -> bytes:
        """Return the Cluster as JSON; measure it the first time.

        Raises:
            Problem: This node cannot measure (501), or the measurement failed (503).
        """
        async with self._lock:
            if self._measured is None:
                self._measured = await self._measure()
            return self._measured

    async def measure_again(self) -> bytes:
        """Measure the cluster again, and return it as JSON.

        Raises:
            Problem: As for ``get``; the earlier measurement stays.
        """
        async with self._lock:
            self._measured = await self._measure()
            return self._measured

    async def _measure(self) -> bytes:
        settings = self._settings
        self._worker = Worker(
            self._task, b"", limit_s=settings.measure_timeout_s, grace_s=settings.stop_grace_s
        )
        try:
            return await asyncio.to_thread(self._worker.run)
        except MissingPackage as error:
            title = "This node's devices cannot be measured"
            raise Problem(501, "cannot-measure", title, str(error)) from error
        except (Crashed, Killed, Refused) as error:
            log.error("this node's devices could not be measured: %s", error)
            detail = f"this node's devices could not be measured: {error}. Ask again to try again"
            raise Problem(503, "not-measured", "Measuring failed", detail, retry_s=10) from error
        finally:
            self._worker = None

    def stop(self) -> None:
        """End a running measurement."""
        if self._worker is not None:
            self._worker.stop()


async def register_forever(settings: Settings, node: NodeCluster) -> None:
    """Register this node's devices at ``settings.register_url``, now and every minute."""
    # The import takes 0.1 s, which only services that register should spend.
    import httpx

    where = f"{settings.register_url.rstrip('/')}/v1/nodes/{settings.node_name}"
    headers = {"Content-Type": "application/json", "User-Agent": f"placer/{placer.__version__}"}
    if settings.register_key.get_secret_value():
        headers["Authorization"] = f"Bearer {settings.register_key.get_secret_value()}"
    failed = ""
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:
        while True:
            problem = await _register(client, where, node)
            if problem and problem != failed:
                log.error(
                    "this node could not be registered at %s: %s", settings.register_url, problem
                )
            elif not problem and failed:
                log.info("this node is registered at %s", settings.register_url)
            failed = problem
            await asyncio.sleep(RETRY_S if problem else REGISTER_EVERY_S)


async def _register(client: httpx.AsyncClient, where: str, node: NodeCluster) -> str:
    """Register once, and return the error message, or an empty string."""
    import httpx

    try:
        reply = await client.put(where, content=await node.get())
    except Problem as problem:
        return problem.detail
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if reply.is_success else f"{reply.status_code}: {clip(reply.text, 300)}"


def join(clusters: Mapping[str, Cluster], network_bytes_per_s: float, latency_s: float) -> Cluster:
    """Join the devices of several nodes into one cluster.

    A transfer between nodes passes both hosts' memories and the network, one after the other.

    Args:
        clusters: Clusters by the name of the node.
        network_bytes_per_s: Bandwidth between any two nodes, in each direction.
        latency_s: Latency of a transfer over the network in seconds.
    """
    devices: list[Device] = []
    links: list[Link] = []
    for node, cluster in clusters.items():
        devices += [
            one.model_copy(update={"name": f"{node}/{one.name}", "host": node})
            for one in cluster.devices
        ]
        links += [
            one.model_copy(
                update={"source": f"{node}/{one.source}", "target": f"{node}/{one.target}"}
            )
            for one in cluster.links
        ]
    links += [
        _over_network(source, target, network_bytes_per_s, latency_s)
        for source in devices
        for target in devices
        if source.host != target.host
    ]
    return Cluster(devices=tuple(devices), links=tuple(links))


def _over_network(source: Device, target: Device, bytes_per_s: float, latency_s: float) -> Link:
    # Host to host over the network, plus device to host and host to device where measured.
    seconds_per_byte = 1 / bytes_per_s
    for rate in (source.to_host, target.from_host):
        if rate is not None:
            seconds_per_byte += 1 / rate.bandwidth_bytes_per_s
            latency_s += rate.latency_s
    return Link(
        source=source.name,
        target=target.name,
        bandwidth_bytes_per_s=1 / seconds_per_byte,
        latency_s=latency_s,
        route="host",
    )
