"""asyncio tasks that the service awaits before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Pending tasks; those that write the end of a job are found by the job's id."""

    def __init__(self) -> None:
        self._all: set[asyncio.Task[Any]] = set()
        self._ends: dict[str, asyncio.Task[Any]] = {}

    def spawn(self, work: Coroutine[Any, Any, T], *, end_of: str = "") -> asyncio.Task[T]:
        """Start a task.

        Args:
            work: Coroutine of the task.
            end_of: Id of the job whose end the task writes; none if empty.
        """
        task = asyncio.create_task(work)
        self._all.add(task)
        if end_of:
            self._ends[end_of] = task
        task.add_done_callback(partial(self._forget, end_of))
        return task

    def end_of(self, key: str) -> asyncio.Task[Any] | None:
        """Return the pending task that writes the end of a job, or None."""
        return self._ends.get(key)

    async def wait(self) -> None:
        """Wait for all tasks."""
        if self._all:
            await asyncio.wait(self._all)

    def _forget(self, key: str, task: asyncio.Task[Any]) -> None:
        self._all.discard(task)
        if self._ends.get(key) is task:
            del self._ends[key]
