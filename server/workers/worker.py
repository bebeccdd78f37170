"""Worker processes, forked from a server that has imported the solver.

Each task has a process of its own, so that none can block or crash the service or another task.

service                         worker (forkserver)
   │──── payload ──────────────────▶│
   │◀─── ("progress", value, bound) ─│  any number
   │◀─── ("best", result) ───────────│  a few per second at most
   │──── "stop" ────────────────────▶│  at most once; a closed pipe means that the service is gone
   │◀─── ("done" | "invalid" | "refused" | "missing" | "over" | "failed", value)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Generic, TypeVar

from placer.errors import MissingExtraError, PlacerError

from ..problem import Problem

try:
    import resource
except ImportError:
    # Windows has no such limits, so the memory of a worker is not limited there.
    resource = None  # type: ignore[assignment]

T = TypeVar("T")

# Callback that receives the best objective value so far and the proven bound.
Progress = Callable[[float | None, float | None], None]


class Report:
    """Messages that a task sends while it runs."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def __call__(self, value: float | None, bound: float | None) -> None:
        """Report the best objective value so far and the proven bound."""
        self._send("progress", value, bound)

    def best(self, result: bytes) -> None:
        """Report the best result so far; it replaces earlier reports and survives this process."""
        self._send("best", result)


# Function that runs in the worker and turns a payload into a result. It ends early with its best
# result when the event is set.
Task = Callable[[bytes, Report, threading.Event], T]

PRELOAD = ["placer_server.workers.solving", "placer.solver.solve"]

# Text of the RuntimeError that torch raises instead of a MemoryError.
_TORCH_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"

# Interval in seconds at which ``run`` checks the deadline.
_TICK_S = 0.1

# Neither "fork", which is unsafe with the service's threads, nor "spawn", which would import the
# solver for every solve.
CONTEXT = multiprocessing.get_context("forkserver")
_START_LOCK = threading.Lock()


class Refused(Exception):
    """The task found a fault in its payload; the message describes it."""


class MissingPackage(Exception):
    """The task needs a package that is not installed; the message says how to install it."""


class Crashed(Exception):
    """The task failed, or its process died."""


class Died(Crashed):
    """The process was killed from outside or by a fault, so another attempt may succeed."""


class MemoryExceeded(Crashed):
    """The task needs more memory than its process may use."""


class Killed(Exception):
    """The process did not stop in time and was killed."""


class Worker(Generic[T]):
    """A task in a process of its own.

    Args:
        task: Function to run; importable by name.
        payload: Argument of the task.
        report: Called with the task's progress, in the thread of ``run``; None to ignore it.
        limit_s: Seconds after which the task must stop.
        grace_s: Seconds between the request to stop and the kill of the process.
        memory_bytes: Memory limit of the process in bytes; no limit if 0.

    Attributes:
        best: Last result that the task reported; None if it reported none.
    """

    def __init__(
        self,
        task: Task[T],
        payload: bytes,
        report: Progress | None = None,
        *,
        limit_s: float,
        grace_s: float,
        memory_bytes: int = 0,
    ) -> None:
        self.best: bytes | None = None
        self._task = task
        self._payload = payload
        self._report = report
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._deadline = 0.0
        self._stopped = False

    def run(self) -> T:
        """Run the task to its end, in the calling thread.

        Raises:
            Problem: The payload is a body that is invalid.
            Refused: The task found another fault in its payload.
            MissingPackage: The task needs a package that is not installed.
            Crashed: The task failed. Died: its process died. MemoryExceeded: it exceeded its memory
                limit.
            Killed: The process did not stop in time.
        """
        pipe, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_serve, args=(theirs, self._task, self._memory_bytes), daemon=True
        )
        with starting_processes():
            process.start()
        # With this end open here, the death of the process would not close the pipe.
        theirs.close()
        try:
            self._send_payload(pipe)
            return self._listen(pipe, process.sentinel)
        except (EOFError, OSError) as error:
            process.join(1)
            raise Died(f"its process died ({_exit_reason(process.exitcode)})") from error
        finally:
            with self._lock:
                self._pipe = None
            # After the result, the process has nothing left to do, so it need not end by itself.
            pipe.close()
            process.kill()
            process.join()
            process.close()

    def stop(self) -> None:
        """Ask the task to end with its best result.

        Any thread may call this, before, during and after ``run``.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._deadline = time.monotonic() + self._grace_s
            if self._pipe is not None:
                self._send_stop(self._pipe)

    @staticmethod
    def _send_stop(pipe: Connection) -> None:
        try:
            pipe.send("stop")
        except OSError:
            # The task has just ended by itself, which ``run`` notices.
            pass

    def _send_payload(self, pipe: Connection) -> None:
        # The payload comes first: another thread could otherwise send a stop before it.
        pipe.send_bytes(self._payload)
        with self._lock:
            self._pipe = pipe
            if self._stopped:
                self._send_stop(pipe)
            else:
                self._deadline = time.monotonic() + self._limit_s

    def _listen(self, pipe: Connection, sentinel: int) -> T:
        while True:
            if wait([pipe, sentinel], self._tick()):
                # Raises EOFError if the process died without a message.
                kind, *values = pipe.recv()
                if kind == "progress":
                    if self._report is not None:
                        self._report(*values)
                elif kind == "best":
                    self.best = values[0]
                elif kind == "done":
                    result: T = values[0]
                    return result
                elif kind == "invalid":
                    raise values[0]
                else:
                    raise ERRORS[kind](values[0])
            self._check_deadline()

    def _tick(self) -> float:
        return max(0.0, min(_TICK_S, self._deadline - time.monotonic()))

    def _check_deadline(self) -> None:
        if time.monotonic() < self._deadline:
            return
        if self._stopped:
            raise Killed(f"it did not stop within {self._grace_s:g} s and was killed")
        self.stop()


ERRORS = {"refused": Refused, "missing": MissingPackage, "over": MemoryExceeded, "failed": Crashed}


def _exit_reason(exitcode: int | None) -> str:
    if exitcode is None:
        return "it closed its pipe"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


@contextmanager
def starting_processes() -> Iterator[None]:
    """Hide the main script while a process starts; the process would otherwise run it again."""
    # All threads share ``sys.modules``.
    with _START_LOCK:
        CONTEXT.set_forkserver_preload(PRELOAD)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def start_fork_server() -> None:
    """Start the fork server, which imports the solver while the caller continues."""
    with starting_processes():
        forkserver.ensure_running()


def _limit_memory(limit_bytes: int) -> None:
    """Let allocations beyond the limit fail here.

    The limit counts memory that the process writes to, not memory that it only maps.
    """
    if limit_bytes and resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _memory_exceeded(limit_bytes: int) -> str:
    if not limit_bytes:
        return "it needs more memory than this machine has"
    return (
        f"it needs more than the {limit_bytes} bytes that a worker may use"
        " (PLACER_WORKER_MEMORY_BYTES)"
    )


def _serve(pipe: Connection, task: Task[Any], memory_bytes: int) -> None:
    """Run the task in the worker process."""
    # Ctrl-C in a terminal reaches every process; the service alone decides what to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    sending = threading.Lock()

    def send(*message: object) -> None:
        with sending:
            pipe.send(message)

    try:
        payload = pipe.recv_bytes()
    except EOFError:
        # The service has just been killed.
        return
    try:
        _limit_memory(memory_bytes)
        _start_listening(pipe, stop, memory_bytes)
        result = task(payload, Report(send), stop)
    except MissingExtraError as error:
        send("missing", str(error))
    except PlacerError as error:
        send("refused", str(error))
    except Problem as problem:
        send("invalid", problem)
    except BaseException as error:
        if isinstance(error, MemoryError) or _TORCH_OUT_OF_MEMORY in str(error):
            send("over", _memory_exceeded(memory_bytes))
        else:
            traceback.print_exc()
            send("failed", f"{type(error).__name__}: {error}"[:1000])
    else:
        send("done", result)


def _start_listening(pipe: Connection, stop: threading.Event, memory_bytes: int) -> None:
    try:
        threading.Thread(target=_await_stop, args=(pipe, stop), daemon=True).start()
    except RuntimeError as error:
        if memory_bytes:
            # The memory limit leaves no room for the thread's stack.
            raise MemoryError from error
        raise


def end_with_parent() -> None:
    """End this process when its parent has ended, even if the parent was killed.

    A process of a pool waits at a pipe whose both ends it holds, so it would not notice.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _await_stop(pipe: Connection, stop: threading.Event) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        # The service is gone, so nobody waits for the answer.
        os._exit(1)
    stop.set()


def measure_idle_bytes(payload: bytes, report: Report, stop: threading.Event) -> int:
    """Return the memory that an idle worker uses, in bytes, as its limit counts; 0 if unknown.

    The task shows that workers start, and makes the first solve as fast as the others.
    """
    try:
        with open("/proc/self/status") as status:
            return next(
                int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")
            )
    except OSError:
        # Not Linux.
        return 0
