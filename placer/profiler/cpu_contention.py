"""Whether a CPU was busy with other programs: how long threads of this process waited for a core
while they could run.

Threads of a pass wait for one another, so the one that waited most tells how much too long times are. The spread of
timings need not: on a CPU that is busy all the time they are all as long. Linux counts for each thread::

    /proc/self/task/1234/schedstat:  1520000000 4570000000 412
                                     ns it ran  ns it waited for a core
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["CoreWaits", "busy"]

MOST = 0.4
"""Of the time that a thread could have run; three processes that share two cores fairly wait for a
third of it."""

# A thread that could run no longer than this says nothing: a few slices of another program's may
# fall on it.
_LEAST_NS = 1e8

_TASKS = Path("/proc/self/task")


class CoreWaits:
    """How long threads of this process wait for a core, from now on."""

    def __init__(self) -> None:
        self._before = thread_times()

    def share(self) -> float:
        """The part of its time that the thread waited which waited most; 0 where the system does
        not count it.
        """
        shares = [0.0]
        for thread, (ran, waited) in thread_times().items():
            ran_before, waited_before = self._before.get(thread, (0, 0))
            could_run = ran - ran_before + waited - waited_before
            if could_run > _LEAST_NS:
                shares.append((waited - waited_before) / could_run)
        return max(shares)


def thread_times() -> dict[str, tuple[int, int]]:
    """By thread, for how many nanoseconds it ran, and for how many it waited for a core."""
    times: dict[str, tuple[int, int]] = {}
    for path in _TASKS.glob("*/schedstat"):
        # it has just ended, or the system counts something else
        with suppress(OSError, ValueError):
            ran, waited, _ = map(int, path.read_text().split())
            times[path.parent.name] = ran, waited
    return times


def busy(kind: str, share: float) -> str:
    """What is wrong with timings on a CPU while threads waited so much, and the way out; empty
    where nothing is.
    """
    if share <= MOST:
        return ""
    return (
        f"while layers were timed on {kind}, a thread waited for a core {share:.0%} of its time: "
        "other programs, or more threads than cores, kept it busy, and times may be many times too "
        "long; when it is idle, or with fewer threads (torch.set_num_threads), clear the cache "
        "(placer cache clear) and profile again"
    )
