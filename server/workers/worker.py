"""One process a solve, forked from a server that has everything imported, so that none can block or
take down another.

service                         worker (forkserver)
   │──── payload ──────────────────▶│
   │◀─── ("progress", value, bound) ─│  any number
   │◀─── ("best", result) ───────────│  a few a second, at most
   │──── "stop" ────────────────────▶│  once, at most; a closed pipe means that the service is gone
   │◀─── ("done" | "refused" | "missing" | "over" | "failed", what)
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

try:
    import resource
except ImportError:  # Windows, where memory is not capped
    resource = None  # type: ignore[assignment]

T = TypeVar("T")

Progress = Callable[[float | None, float | None], None]
"""Told the best objective value so far and the proven bound."""


class Report:
    """What a task tells while it runs."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def __call__(self, value: float | None, bound: float | None) -> None:
        """Tell the best objective value so far and the proven bound."""
        self._send("progress", value, bound)

    def best(self, result: bytes) -> None:
        """Tell what there is so far, in the place of what was told before; it outlives this
        process.
        """
        self._send("best", result)


Task = Callable[[bytes, Report, threading.Event], T]
"""What runs in the worker: from a payload to a result, ending early with its best when the event is
set."""

PRELOAD = ["placer_server.workers.solving", "placer.solver.solve"]

_TICK_S = 0.1
CONTEXT = multiprocessing.get_context("forkserver")
_START_LOCK = threading.Lock()


class Refused(Exception):
    """The task found a fault in what it was given; the message says which."""


class Missing(Exception):
    """The task needs a package that is not installed; the message says how to get it."""


class Crashed(Exception):
    """The task failed, or its process died."""


class Died(Crashed):
    """The process was killed from outside or by a fault, so that another try may go well."""


class OverMemory(Crashed):
    """The task needs more memory than its process may take."""


class Killed(Exception):
    """The process did not stop in time and was killed."""


class Worker(Generic[T]):
    """A task in a process of its own.

    Args:
        task: what to run; importable by name.
        payload: what to give it.
        report: called with the task's progress, in the thread of ``run``.
        limit_s: after so many seconds the task is told to stop.
        grace_s: so many seconds after it was told to stop, its process is killed.
        memory_bytes: what its process may take; no limit if 0.

    Attributes:
        best: the best that the task told so far; None if it told none.
    """

    def __init__(
        self,
        task: Task[T],
        payload: bytes,
        report: Progress,
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
            Refused: the task found a fault in its payload.
            Missing: the task needs a package that is not installed.
            Crashed: it failed; Died: its process died; OverMemory: it needs more memory than it may
                take.
            Killed: it had to be killed.
        """
        pipe, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_serve, args=(theirs, self._task, self._memory_bytes), daemon=True
        )
        with starting_processes():
            process.start()
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
            pipe.close()
            process.kill()
            process.join()
            process.close()

    def stop(self) -> None:
        """Tell the task to end with the best that it has. Safe from any thread, before, during and
        after ``run``.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._deadline = time.monotonic() + self._grace_s
            if self._pipe is not None:
                self._tell_stop(self._pipe)

    @staticmethod
    def _tell_stop(pipe: Connection) -> None:
        try:
            pipe.send("stop")
        except OSError:
            pass  # it just ended by itself; ``run`` hears of that

    def _send_payload(self, pipe: Connection) -> None:
        pipe.send_bytes(self._payload)
        with self._lock:
            self._pipe = pipe
            if self._stopped:
                self._tell_stop(pipe)
            else:
                self._deadline = time.monotonic() + self._limit_s

    def _listen(self, pipe: Connection, sentinel: int) -> T:
        while True:
            if wait([pipe, sentinel], self._tick()):
                # raises EOFError where the process died without a word
                kind, *values = pipe.recv()
                if kind == "progress":
                    self._report(*values)
                elif kind == "best":
                    self.best = values[0]
                elif kind == "done":
                    result: T = values[0]
                    return result
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


ERRORS = {"refused": Refused, "missing": Missing, "over": OverMemory, "failed": Crashed}


def _exit_reason(exitcode: int | None) -> str:
    if exitcode is None:
        return "it closed its pipe"
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


@contextmanager
def starting_processes() -> Iterator[None]:
    """Where processes are started. Without this, each would first run the program's main script
    again.
    """
    with _START_LOCK:
        CONTEXT.set_forkserver_preload(PRELOAD)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def prepare() -> None:
    """Start the process that workers are forked from; it imports the solver while the caller goes
    on.
    """
    with starting_processes():
        forkserver.ensure_running()


def _cap_memory(limit_bytes: int) -> None:
    """Let what goes over the limit fail here. Counted is what the process writes to, not what it
    only maps.
    """
    if limit_bytes and resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def _serve(pipe: Connection, task: Task[Any], memory_bytes: int) -> None:
    """The worker's main function."""
    # Ctrl-C in a terminal reaches every process; the service decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    sending = threading.Lock()

    def send(*message: object) -> None:
        with sending:
            pipe.send(message)

    try:
        payload = pipe.recv_bytes()
    except EOFError:
        return  # the service was killed just now
    try:
        _cap_memory(memory_bytes)
        _start_listening(pipe, stop, memory_bytes)
        result = task(payload, Report(send), stop)
    except MissingExtraError as error:
        send("missing", str(error))
    except PlacerError as error:
        send("refused", str(error))
    except MemoryError:
        send(
            "over",
            f"it needs more than the {memory_bytes} bytes that a worker may take (PLACER_WORKER_MEMORY_BYTES)",
        )
    except BaseException as error:
        traceback.print_exc()
        send("failed", f"{type(error).__name__}: {error}"[:1000])
    else:
        send("done", result)


def _start_listening(pipe: Connection, stop: threading.Event, memory_bytes: int) -> None:
    try:
        threading.Thread(target=_await_stop, args=(pipe, stop), daemon=True).start()
    except RuntimeError as error:
        if memory_bytes:
            raise MemoryError from error  # for its stack
        raise


def end_with_parent() -> None:
    """Let this process end when the one that started it has, even where that was killed.

    A process of a pool waits for work at a pipe of which it holds both ends, so nothing tells it
    that none will come.
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
        os._exit(1)  # the service is gone, and nobody waits for the answer
    stop.set()


def tell_taken_bytes(payload: bytes, report: Report, stop: threading.Event) -> int:
    """The task that tells what a worker takes before it does anything, counted as its limit counts;
    0 if not known.

    It shows that workers start, and makes the first solve as quick as the others.
    """
    try:
        with open("/proc/self/status") as status:
            return next(
                int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")
            )
    except OSError:  # no Linux
        return 0
