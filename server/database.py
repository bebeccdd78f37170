"""The SQLite file: its tables, and connections that one thread uses at a time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from placer.errors import ServerError

try:
    import fcntl
except ImportError:  # Windows, where two services on one file are not told apart
    fcntl = None  # type: ignore[assignment]

MIGRATIONS = [
    """
    CREATE TABLE IF NOT EXISTS placements (
        id TEXT PRIMARY KEY,
        version TEXT NOT NULL,
        complete INTEGER NOT NULL,
        created_s REAL NOT NULL,
        placement BLOB NOT NULL
    );
    """,
    """
    CREATE TABLE answers (  -- what is large comes last, so that a search does not read it
        id TEXT PRIMARY KEY,
        version TEXT NOT NULL,
        complete INTEGER NOT NULL,
        created_s REAL NOT NULL,
        profile_id TEXT,
        summary BLOB NOT NULL,
        question BLOB NOT NULL,
        placement BLOB NOT NULL
    );
    INSERT INTO answers
        SELECT id, version, complete, created_s, NULL, x'7b7d', x'7b7d', placement FROM placements ORDER BY rowid;
    DROP TABLE placements;
    ALTER TABLE answers RENAME TO placements;
    CREATE INDEX placements_by_profile ON placements (profile_id);
    CREATE TABLE profiles (id TEXT PRIMARY KEY, profile BLOB NOT NULL);
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY,
        client TEXT NOT NULL,
        objective TEXT NOT NULL,
        time_limit_s REAL NOT NULL,
        request BLOB NOT NULL
    );
    CREATE TABLE starts (id TEXT PRIMARY KEY, count INTEGER NOT NULL);
    CREATE TABLE failures (id TEXT PRIMARY KEY, status INTEGER NOT NULL, problem BLOB NOT NULL);
    """,
]
"""Each step brings a file from the version before it; ``PRAGMA user_version`` says which have run."""


class Database:
    """One SQLite file, made if missing, or ``:memory:``.

    Args:
        name: the file.

    Attributes:
        durable: whether what is written outlives the process.
        alone: whether no other service has the file open; that one then sees to the jobs in it.
        writer: the connection that writes.
        reader: one that reads: with a write-ahead log it is never held up by a writer that waits for the disk.
        searcher: one for what takes long to read.

    Raises:
        ServerError: a later version of Placer made the file.
    """

    def __init__(self, name: str) -> None:
        self.durable = name != ":memory:"
        if self.durable:
            name = str(Path(name).expanduser())
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        self.writer = Connection(name)
        # NORMAL: a commit outlives a killed process at once, and a power failure after the next checkpoint.
        # Large pages: requests are tens of kilobytes, and each page of a write has a price of its own.
        for pragma in ("page_size=16384", "journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=1000"):
            self.writer.connection.execute(f"PRAGMA {pragma}")
        _migrate(self.writer.connection, name)
        self.reader = Connection(name) if self.durable else self.writer
        self.searcher = Connection(name) if self.durable else self.writer
        self._lock = _Lock(name + ".lock") if self.durable else None
        self.alone = self._lock is None or self._lock.held

    def close(self) -> None:
        """Write everything to the file and let go of it."""
        self.searcher.connection.close()
        self.reader.connection.close()
        self.writer.connection.close()
        if self._lock is not None:
            self._lock.close()


class Connection:
    """A connection that one thread uses at a time: ``with`` it."""

    def __init__(self, database: str) -> None:
        self.connection = sqlite3.connect(database, check_same_thread=False, timeout=5, isolation_level=None)
        self._lock = threading.Lock()

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        return self.connection

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is written in the context, or none of it."""
        with self as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


class _Lock:
    """Held by one process at a time, and let go of by the system when that is killed."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a")
        self.held = True
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.held = False

    def close(self) -> None:
        self._file.close()


def _migrate(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute("COMMIT")
    if version > len(MIGRATIONS):
        connection.close()
        raise ServerError(
            f"database {name!r} has version {version}, this Placer reads up to {len(MIGRATIONS)}: a later Placer made"
            " it; upgrade, or set PLACER_DATABASE to another file"
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
