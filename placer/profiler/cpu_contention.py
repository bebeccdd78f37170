"""CPU contention: how long threads of this process waited for a core while runnable.

Threads of a pass wait for one another, so the longest-waiting thread shows how much the times are
inflated. The spread of timings cannot show this: on a permanently busy CPU all of them are equally
long. Linux counts for each thread::

    /proc/self/task/1234/schedstat:  1520000000 4570000000 412
                                     ns it ran  ns it waited for a core
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["CoreWaits", "busy"]

MOST = 0.4
"""Largest acceptable waiting share of a thread's runnable time. Three processes that share two
cores fairly wait for a third of it."""

# Minimum runnable time of a thread in ns: a few time slices of another program distort less.
_LEAST_NS = 1e8

_TASKS = Path("/proc/self/task")


class CoreWaits:
    """The waiting times of this process's threads since its creation."""

    def __init__(self) -> None:
        self._before = thread_times()

    def share(self) -> float:
        """Return the waiting share of the longest-waiting thread; 0 if the system has no counts."""
        shares = [0.0]
        for thread, (ran, waited) in thread_times().items():
            ran_before, waited_before = self._before.get(thread, (0, 0))
            # time sleeping or blocked is neither running nor waiting for a core
            could_run = ran - ran_before + waited - waited_before
            if could_run > _LEAST_NS:
                shares.append((waited - waited_before) / could_run)
        return max(shares)


def thread_times() -> dict[str, tuple[int, int]]:
    """Return for each thread its nanoseconds of running and of waiting for a core."""
    times: dict[str, tuple[int, int]] = {}
    for path in _TASKS.glob("*/schedstat"):
        # the thread has just ended, or the system uses another format
        with suppress(OSError, ValueError):
            ran, waited, _ = map(int, path.read_text().split())
            times[path.parent.name] = ran, waited
    return times


def busy(kind: str, share: float) -> str:
    """Return a warning about contended CPU timings and its remedy; empty if all is well."""
    if share <= MOST:
        return ""
    return (
        f"while layers were timed on {kind}, a thread waited for a core {share:.0%} of its time: "
        "other programs, or more threads than cores, kept it busy, and times may be many times too "
        "long; when it is idle, or with fewer threads (torch.set_num_threads), clear the cache "
        "(placer cache clear) and profile again"
    )
