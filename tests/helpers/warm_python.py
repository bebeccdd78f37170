"""Programs in processes of their own, without the seconds that importing torch takes each.

    test ──▶ shim (a client, no imports) ──socket: program, stdio──▶ server (modules imported)
                     ▲                                                        │ fork
                     └──── exit status ◀── waits ◀── fork: runs the program ◀─┘

The server imports what others wrote, and nothing of Placer: what a program forgets to import of
that it still misses."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMALL = ["pydantic", "httpx", "typer", "rich"]
"""What the base install needs, without the solver's library."""
MODULES = ["torch", "torch.export", "torch._dynamo", "ortools.sat.python.cp_model", *SMALL]
_LONGEST = 1 << 20


class WarmPython:
    """A server and its shim.

    Args:
        modules: what the server imports.

    Attributes:
        path: of an executable that takes what ``python`` takes: ``-c``, ``-m`` or a script; ``-P``
            is as if given.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        # the path of a socket may not be long
        self._folder = tempfile.TemporaryDirectory(prefix="warm")
        folder = Path(self._folder.name)
        self.path = str(folder / "python")
        Path(self.path).write_text(
            f'#!/bin/sh\nexec {shlex.join(_client(folder / "socket"))} "$@"\n'
        )
        Path(self.path).chmod(0o755)
        command = [sys.executable, "-P", __file__, "serve", str(folder / "socket"), *modules]
        self._server = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while not (folder / "socket").exists():
            assert self._server.poll() is None, "the server did not start"
            time.sleep(0.02)

    def close(self) -> None:
        """End the server; the programs that it runs have ended."""
        self._server.terminate()
        self._server.wait(30)
        self._folder.cleanup()


def _client(path: Path) -> list[str]:
    return [sys.executable, "-S", "-E", __file__, "run", str(path)]


def run(path: str, arguments: list[str]) -> int:
    """Have a program run; its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        order = json.dumps(
            {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        ).encode()
        socket.send_fds(connection, [len(order).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(order)
        answer = connection.recv(1)
    return answer[0] if answer else 1


def serve(path: str, modules: Sequence[str]) -> list[str] | None:
    """Fork for every program that is asked for; in such a process, what to run."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a search for cycles in a fork would copy all of it
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    return _wait(connection)


def _reap(*_: Any) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _wait(connection: socket.socket) -> list[str]:
    """Fork once more: this process waits and tells, the other one returns what to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, *_ = socket.recv_fds(connection, 4, 3)
    order = b""
    while len(order) < int.from_bytes(head, "big"):
        order += connection.recv(_LONGEST)
    program = os.fork()
    if program == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # a stream asks once what its descriptor can do
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        told = json.loads(order)
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environment"])
        arguments: list[str] = told["arguments"]
        return arguments
    for file in files:
        os.close(file)
    connection.setblocking(False)
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            connection.sendall(bytes([code if code >= 0 else 128 - code]))
            os._exit(0)
        try:
            if not connection.recv(1):  # whoever waited for it was ended
                os.kill(program, signal.SIGTERM)
                connection.close()
                os.waitpid(program, 0)
                os._exit(0)
        except BlockingIOError:
            time.sleep(0.01)


def _become(arguments: list[str]) -> int:
    """Run as ``python`` would; the exit status."""
    while arguments[0] in ("-P", "-u"):
        arguments = arguments[1:]
    kind, *rest = arguments
    try:
        if kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """End in order, but for what Python frees at its end: of all that torch consists of that takes
    a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    asked = serve(sys.argv[2], sys.argv[3:])
    assert asked is not None
    _end(_become(asked))
