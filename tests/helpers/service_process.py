"""A service in a process of its own, so that it can be killed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

SOLVERS = str(Path(__file__).parent)


class ServiceProcess:
    """``run`` on a database and a port of its own.

    Args:
        folder: for its script.
        solver: the name of one in ``solvers_for_tests``.
        database: see ``PLACER_DATABASE``.
        settings: others.
    """

    def __init__(self, folder: Path, solver: str, database: str, **settings: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.database = database
        given = {"port": self.port, "database": database, "workers": 1, "log_level": "warning", **settings}
        script = folder / f"{solver}{self.port}.py"
        script.write_text(
            "import sys\n"
            f"sys.path.insert(0, {SOLVERS!r})\n"
            "import solvers_for_tests\n"
            "from placer_server.app import run\n"
            "from placer_server.settings import Settings\n"
            f"run(Settings(**{given!r}), solver=solvers_for_tests.{solver})\n"
        )
        self.process = subprocess.Popen([sys.executable, str(script)])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=70)
        while not self._is_ready():
            assert self.process.poll() is None, "the service did not start"
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.ConnectError:
            return False

    def end(self, sig: int) -> int:
        """Send it a signal; its exit code."""
        self.client.close()
        self.process.send_signal(sig)
        return self.process.wait(30)
