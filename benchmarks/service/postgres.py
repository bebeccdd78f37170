"""A PostgreSQL of the benchmark's own, the one that the tests start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

HELPERS = Path(__file__).resolve().parents[2] / "tests" / "helpers"


class Postgres(Protocol):
    """A running server; see ``tests/helpers/postgres_server.py``."""

    def new_database(self) -> str:
        """The URL of a new, empty database."""

    def kill(self) -> None:
        """End it as ``kill -9`` does."""

    def start(self) -> None:
        """Start it again."""


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Start one, and stop it at the end.

    Raises:
        RuntimeError: it is not installed.
    """
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    from postgres_server import PostgresServer, find_binaries

    binaries = find_binaries()
    if binaries is None:
        raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
    server = PostgresServer(binaries)
    try:
        yield server
    finally:
        server.stop()
