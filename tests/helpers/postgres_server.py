"""A PostgreSQL of the tests' own, from Debian's packages or the PATH."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import sqlalchemy as sa

SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "on",
    "shared_buffers": "16MB",
    "max_connections": "60",
}
"""fsync matters to a machine that fails, not to a process that is killed."""


def find_binaries() -> Path | None:
    """The folder of ``initdb`` and ``postgres``, the newest version's."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4])
    )
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class PostgresServer:
    """A running server in a folder of its own; as root, it runs as another user, for it refuses
    root."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = _unprivileged() if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="placer-pg-"))
        if self._user:
            shutil.chown(self._folder, self._user)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._run(
            "initdb",
            "-D",
            str(self._data),
            "-U",
            "placer",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        )
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def start(self) -> None:
        """Start it and wait until it answers."""
        given = {
            **SETTINGS,
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
        }
        options = " ".join(
            f"-c {name}={value}" if value != "" else f"-c {name}=''"
            for name, value in given.items()
        )
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-l", log, "-o", options, "-w", "start")

    def kill(self) -> None:
        """End it as ``kill -9`` does, with all of its processes."""
        leader = self.pid
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(leader)], capture_output=True, text=True
        ).stdout
        for pid in (leader, *map(int, children.split())):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        while _runs(leader) or any(map(_runs, map(int, children.split()))):
            time.sleep(0.01)
        # Where nobody reaps the dead, PostgreSQL takes the one that this names for alive.
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        """Of its first process."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def stop(self) -> None:
        """End it and remove its folder."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        engine = sa.create_engine(
            self._url("postgres", "postgresql+psycopg"), isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        return self._url(name)

    def _url(self, database: str, scheme: str = "postgresql") -> str:
        return f"{scheme}://placer@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        command = [str(self._binaries / program), *arguments]
        # pg_ctl's server inherits what it writes to; a pipe would never end.
        with tempfile.TemporaryFile() as said:
            ended = subprocess.run(
                command,
                user=self._user,
                cwd="/",
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
            )
            said.seek(0)
            if check and ended.returncode:
                raise RuntimeError(f"{program} failed: {said.read().decode()}")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _unprivileged() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
