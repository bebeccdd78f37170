"""A service in a process of its own on loopback, with its time and processor time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from .load import Connection

START_S = 60.0


class Server:
    """A running service."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def connect(self) -> Connection:
        return Connection(self.port)

    def cpu_s(self) -> float:
        """Return the processor time of the service's main process so far, without its workers."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return the private memory of the main process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(
    solver: str = "", *, environment: Mapping[str, str] | None = None, **settings: object
) -> Iterator[Server]:
    """Start a service, wait until it is ready, and stop it at the end.

    Args:
        solver: the name of a solver in ``benchmarks.service.solvers``; Placer's own if empty.
        environment: variables for its process in addition to the settings.
        settings: see ``placer_server.settings``.
    """
    with TemporaryDirectory() as folder:
        process, port = start(solver, folder, environment=environment, **settings)
        try:
            wait_ready(port)
            yield Server(process, port)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def start(
    solver: str, folder: str, *, environment: Mapping[str, str] | None = None, **settings: object
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a service without waiting for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"port": port, "database": f"{folder}/placements.db", "log_level": "error", **settings}
    named = {f"PLACER_{name.upper()}": str(value) for name, value in given.items()}
    command = ["-m", "benchmarks.service", solver] if solver else ["-m", "placer", "serve"]
    return subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **(environment or {}), **named}
    ), port


def wait_ready(port: int, path: str = "/readyz") -> None:
    """Wait until the service answers 200."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if Connection(port).get(path).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.005)
    raise TimeoutError(f"the service did not answer {path} within {START_S} s")
