"""What was answered, kept in SQLite by the content hash of the question."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS placements (
    id TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    complete INTEGER NOT NULL,
    created_s REAL NOT NULL,
    placement BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS placements_by_age ON placements (created_s);
"""

MEMORY_BYTES = 32 * 2**20
"""How much of the store is kept in memory as well, so that a question asked often costs no read."""


@dataclass(frozen=True)
class Answer:
    """One placement as it was sent.

    Attributes:
        placement: the Placement as JSON.
        complete: whether the solver had all the time that the request gave it. An answer that was stopped early is kept
            and can be read, but the same question asked again is solved again.
        version: of the Placer that made it; another version solves the question again.
    """

    placement: bytes
    complete: bool
    version: str


class Store:
    """The answers, newest ``keep`` of them. Safe to use from several threads.

    Args:
        database: an SQLite file, made if missing, or ``:memory:``.
        keep: how many answers it keeps.
    """

    def __init__(self, database: str, keep: int) -> None:
        self._keep = keep
        self._recent = _Recent(MEMORY_BYTES)
        in_memory = database == ":memory:"
        if not in_memory:
            database = str(Path(database).expanduser())
            Path(database).parent.mkdir(parents=True, exist_ok=True)
        self._writer = _Connection(database)
        self._writer.connection.execute("PRAGMA journal_mode=WAL")
        self._writer.connection.execute("PRAGMA synchronous=NORMAL")
        self._writer.connection.executescript(_SCHEMA)
        # With a write-ahead log, a reader of its own is never held up by a writer that waits for the disk.
        self._reader = self._writer if in_memory else _Connection(database)

    def get(self, key: str) -> Answer | None:
        """The answer to a question, or None if it was never asked."""
        if (answer := self._recent.get(key)) is not None:
            return answer
        with self._reader as connection:
            query = "SELECT placement, complete, version FROM placements WHERE id = ?"
            row = connection.execute(query, (key,)).fetchone()
        if row is None:
            return None
        answer = Answer(bytes(row[0]), bool(row[1]), row[2])
        self._recent.put(key, answer)
        return answer

    def put(self, key: str, answer: Answer) -> None:
        """Keep an answer.

        Raises:
            sqlite3.Error: it could not be written, say because the disk is full; it is kept in memory all the same.
        """
        self._recent.put(key, answer)
        self._write(key, answer)

    def _write(self, key: str, answer: Answer) -> None:
        with self._writer as connection:
            row = (key, answer.version, answer.complete, time.time(), answer.placement)
            connection.execute("INSERT OR REPLACE INTO placements VALUES (?, ?, ?, ?, ?)", row)
            connection.execute(
                "DELETE FROM placements WHERE id IN"
                " (SELECT id FROM placements ORDER BY created_s DESC, rowid DESC LIMIT -1 OFFSET ?)",
                (self._keep,),
            )

    def close(self) -> None:
        """Write everything to the file and let go of it."""
        self._reader.connection.close()
        self._writer.connection.close()


class _Connection:
    """A connection that one thread uses at a time: ``with`` it."""

    def __init__(self, database: str) -> None:
        self.connection = sqlite3.connect(database, check_same_thread=False, timeout=5, isolation_level=None)
        self._lock = threading.Lock()

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        return self.connection

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Recent:
    """The answers used last, up to so many bytes of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Answer | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def put(self, key: str, answer: Answer) -> None:
        with self._lock:
            if (old := self._answers.pop(key, None)) is not None:
                self._bytes -= len(old.placement)
            self._answers[key] = answer
            self._bytes += len(answer.placement)
            while self._bytes > self._limit_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._bytes -= len(dropped.placement)
