"""A PostgreSQL server of the benchmark's own, which is the one that the tests start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from .helpers import helper


class Postgres(Protocol):
    """A running server; see ``tests/helpers/postgres_server.py``."""

    def new_database(self) -> str:
        """Return the URL of a new, empty database."""

    def kill(self) -> None:
        """Kill it as ``kill -9`` does."""

    def start(self) -> None:
        """Start it again."""

    def stop(self) -> None:
        """Stop it, and remove its files."""


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Start a server, and stop it at the end.

    Raises:
        RuntimeError: PostgreSQL is not installed.
    """
    found = helper("postgres_server")
    binaries = found.find_binaries()
    if binaries is None:
        raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
    server: Postgres = found.PostgresServer(binaries)
    try:
        yield server
    finally:
        server.stop()
