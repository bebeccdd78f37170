"""This node's devices and links, measured once."""

from __future__ import annotations

import asyncio
import logging

from ..problem import Problem
from ..settings import Settings
from ..workers.measuring import measure_devices
from ..workers.worker import Crashed, Killed, MissingPackage, Refused, Task, Worker

log = logging.getLogger("placer_server")


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
