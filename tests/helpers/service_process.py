"""A service in a process of its own, so that it can be killed."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import httpx
import solvers_for_tests

from placer_server.app import run
from placer_server.settings import Settings
from placer_server.workers.worker import CONTEXT, start_fork_server, starting_processes


class ServiceProcess:
    """``run`` on a database and a port of its own.

    Its process, and those of its workers, are forks of the one that workers of this process are
    forked from: each would import all anew. That a service begins with nothing imported is tested
    where users begin it.

    Args:
        solver: the name of one in ``solvers_for_tests``.
        database: see ``PLACER_DATABASE``.
        settings: others.
    """

    def __init__(self, solver: str, database: str, **settings: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.database = database
        given = {
            "port": self.port,
            "database": database,
            "workers": 1,
            "log_level": "warning",
            **settings,
        }
        start_fork_server()
        self._asking = tempfile.NamedTemporaryFile()
        server = forkserver._forkserver
        asked = (
            # from Python 3.14 on, the fork server starts processes only for holders of its key
            (server._forkserver_address, getattr(server, "_forkserver_authkey", None)),
            dict(os.environ),
            self._asking.name,
            solver,
            given,
        )
        self.process = CONTEXT.Process(target=_serve, args=asked)
        with starting_processes():
            self.process.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=70)
        while not self._is_ready():
            assert self.process.is_alive(), "the service did not start"
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.ConnectError:
            return False

    def end(self, sig: int) -> int | None:
        """Send it a signal, not while it asks for a fork; its exit code."""
        self.client.close()
        assert self.process.pid is not None
        with _locked(self._asking.name):
            os.kill(self.process.pid, sig)
        self.process.join(30)
        return self.process.exitcode


def _serve(
    server: tuple[str, bytes | None],
    environment: Mapping[str, str],
    asking: str,
    solver: str,
    given: Mapping[str, Any],
) -> None:
    """Serve in this fork, in the environment of now; Python would start another process to fork
    workers from."""
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    forkserver._forkserver._forkserver_address, forkserver._forkserver._forkserver_authkey = server
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None
    ask = forkserver.connect_to_new_process

    def ask_whole(descriptors: list[int]) -> tuple[int, int]:
        # the process that forks dies of half a question, and with it all that it forked
        with _locked(asking):
            return ask(descriptors)

    forkserver.connect_to_new_process = ask_whole
    run(Settings(**given), solver=getattr(solvers_for_tests, solver))


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
