"""This node's own devices and links, measured once."""

from __future__ import annotations

import asyncio
import logging

from ..problem import Problem
from ..settings import Settings
from ..workers.measuring import measure_devices
from ..workers.worker import Crashed, Killed, Missing, Refused, Task, Worker

log = logging.getLogger("placer_server")


class NodeCluster:
    """Measures in a process of its own, so that torch never enters the service's, and keeps the
    result.

    Args:
        settings: for the time that measuring may take.
        task: what measures, see ``placer_server.workers.worker.Task``.
    """

    def __init__(self, settings: Settings, task: Task[bytes] = measure_devices) -> None:
        self._settings = settings
        self._task = task
        self._lock = asyncio.Lock()
        self._measured: bytes | None = None
        self._worker: Worker[bytes] | None = None

    async def get(self) -> bytes:
        """The Cluster as JSON.

        Raises:
            Problem: it cannot be measured here (501), or could not be this time (503).
        """
        async with self._lock:
            if self._measured is None:
                self._measured = await self._measure()
            return self._measured

    async def measure_again(self) -> bytes:
        """The Cluster as JSON, measured now.

        Raises:
            Problem: as for ``get``; what was measured before is kept.
        """
        async with self._lock:
            self._measured = await self._measure()
            return self._measured

    async def _measure(self) -> bytes:
        settings = self._settings
        self._worker = Worker(
            self._task,
            b"",
            lambda *_: None,
            limit_s=settings.measure_timeout_s,
            grace_s=settings.stop_grace_s,
        )
        try:
            return await asyncio.to_thread(self._worker.run)
        except Missing as error:
            raise Problem(
                501, "cannot-measure", "This node's devices cannot be measured", str(error)
            ) from error
        except (Crashed, Killed, Refused) as error:
            log.error("this node's devices could not be measured: %s", error)
            detail = f"this node's devices could not be measured: {error}. Asking again tries again"
            headers = {"Retry-After": "10"}
            raise Problem(
                503, "not-measured", "Measuring failed", detail, headers=headers
            ) from error
        finally:
            self._worker = None

    def stop(self) -> None:
        """End a measurement that is under way."""
        if self._worker is not None:
            self._worker.stop()
