"""What was asked and answered, kept in SQLite by the content hash of the question.

    accept ──▶ jobs ──▶ settle ──▶ placements, profiles
                  └───▶ fail ────▶ failures

What was accepted stays in ``jobs`` until it is answered, so that the next start finds what a crash left.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .database import Database

MEMORY_BYTES = 32 * 2**20
"""How much of the store is kept in memory as well, so that a question asked often costs no read."""

FAILURES_KEPT = 1000


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


@dataclass(frozen=True)
class Asked:
    """The question of an answer, in the parts in which it is kept.

    Attributes:
        profile_id: the profile's content hash.
        profile: the Profile as JSON; placements of one profile share it.
        question: the rest of the PlacementRequest as JSON.
        summary: what lists of placements show, as JSON.
    """

    profile_id: str
    profile: bytes
    question: bytes
    summary: bytes


@dataclass(frozen=True)
class Accepted:
    """A request that was accepted and is not yet answered.

    Attributes:
        id: the content hash.
        client: who asked.
        objective: what is made small.
        time_limit_s: the solver's time limit.
        request: the body as it was sent.
        starts: how often a worker began with it.
    """

    id: str
    client: str
    objective: str
    time_limit_s: float
    request: bytes
    starts: int = 0


class Store:
    """The answers, newest ``keep`` of them, and what is yet to be answered. Safe to use from several threads.

    Args:
        database: an SQLite file, made if missing, or ``:memory:``.
        keep: how many answers it keeps.
    """

    def __init__(self, database: str, keep: int) -> None:
        self._keep = keep
        self._recent = _Recent(MEMORY_BYTES)
        self.database = Database(database)

    def get(self, key: str) -> Answer | None:
        """The answer to a question, or None if it was never asked."""
        if (answer := self._recent.get(key)) is not None:
            return answer
        row = self._one("SELECT placement, complete, version FROM placements WHERE id = ?", key)
        if row is None:
            return None
        answer = Answer(bytes(row[0]), bool(row[1]), row[2])
        self._recent.put(key, answer)
        return answer

    def put(self, key: str, answer: Answer, asked: Asked | None = None, *, settled: bool = True) -> None:
        """Keep an answer, and with it its question.

        Args:
            key: the content hash.
            answer: the answer.
            asked: its question, if it is known in parts.
            settled: whether the job is done; if not, the next start goes on with it.

        Raises:
            sqlite3.Error: it could not be written, say because the disk is full; it is kept in memory all the same.
        """
        self._recent.put(key, answer)
        self._write(lambda connection: self._put(connection, key, answer, asked, settled))

    def _put(
        self, connection: sqlite3.Connection, key: str, answer: Answer, asked: Asked | None, settled: bool
    ) -> None:
        if asked is not None:
            connection.execute("INSERT OR IGNORE INTO profiles VALUES (?, ?)", (asked.profile_id, asked.profile))
        parts = (asked.profile_id, asked.summary, asked.question) if asked else (None, b"{}", b"{}")
        row = (key, answer.version, answer.complete, time.time(), *parts, answer.placement)
        connection.execute("INSERT OR REPLACE INTO placements VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        if settled:
            _remove_job(connection, key)
        self._prune(connection)

    def _prune(self, connection: sqlite3.Connection) -> None:
        """By the order of writing: a clock may jump."""
        old = connection.execute(
            "DELETE FROM placements WHERE rowid IN (SELECT rowid FROM placements ORDER BY rowid DESC LIMIT -1 OFFSET ?)"
            " RETURNING profile_id",
            (self._keep,),
        ).fetchall()
        for (profile_id,) in old:
            connection.execute(
                "DELETE FROM profiles WHERE id = ? AND NOT EXISTS (SELECT 1 FROM placements WHERE profile_id = ?)",
                (profile_id, profile_id),
            )

    def accept(self, job: Accepted) -> None:
        """Write down a request before its client is told that it was accepted.

        Raises:
            sqlite3.Error: it could not be written.
        """
        row = (job.id, job.client, job.objective, job.time_limit_s, job.request)
        with self.database.writer as connection:  # one statement is a transaction by itself
            connection.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)", row)

    def started(self, key: str, starts: int) -> None:
        """Write down that a worker begins with a job, so that one which takes the service down is not tried forever.

        Raises:
            sqlite3.Error: it could not be written.
        """
        with self.database.writer as connection:
            connection.execute("INSERT OR REPLACE INTO starts VALUES (?, ?)", (key, starts))

    def fail(self, key: str, status: int, problem: bytes) -> None:
        """Keep why a job has no answer.

        Raises:
            sqlite3.Error: it could not be written.
        """

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", (key, status, problem))
            connection.execute(
                "DELETE FROM failures WHERE rowid IN"
                " (SELECT rowid FROM failures ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                (FAILURES_KEPT,),
            )
            _remove_job(connection, key)

        self._write(write)

    def failure(self, key: str) -> tuple[int, bytes] | None:
        """The status and problem of a job that failed, or None."""
        row = self._one("SELECT status, problem FROM failures WHERE id = ?", key)
        return (row[0], bytes(row[1])) if row else None

    def backlog(self) -> list[Accepted]:
        """What was accepted and not answered, in the order in which it came."""
        query = (
            "SELECT id, client, objective, time_limit_s, request, coalesce(count, 0)"
            " FROM jobs LEFT JOIN starts USING (id) ORDER BY jobs.rowid"
        )
        with self.database.reader as connection:
            return [Accepted(*row) for row in connection.execute(query)]

    def forget_starts(self) -> None:
        """A service that ends in order takes no job down with it.

        Raises:
            sqlite3.Error: it could not be written.
        """
        self._write(lambda connection: connection.execute("DELETE FROM starts"))

    def profile(self, key: str) -> bytes | None:
        """A profile as JSON by its content hash, or None if no placement of it is kept."""
        row = self._one("SELECT profile FROM profiles WHERE id = ?", key)
        return bytes(row[0]) if row else None

    def request(self, key: str) -> bytes | None:
        """The PlacementRequest of an answer as JSON, or None where it is not kept."""
        query = (
            "SELECT question, profile FROM placements JOIN profiles ON profiles.id = profile_id WHERE placements.id = ?"
        )
        row = self._one(query, key)
        return b'{"profile": %s, %s' % (bytes(row[1]), bytes(row[0])[1:]) if row else None

    def search(self, text: str, filters: dict[str, str], before: int, limit: int) -> list[dict[str, Any]]:
        """Summaries of answers, newest first.

        Args:
            text: what model or id must contain, whatever its case; all if empty.
            filters: summary field -> the value that it must have.
            before: only those whose ``row`` is smaller.
            limit: how many at most.
        """
        query = "SELECT rowid, id, profile_id, complete, version, created_s, summary FROM placements WHERE rowid < ?"
        values: list[Any] = [before]
        if text:
            query += " AND (id LIKE ? ESCAPE '!' OR json_extract(summary, '$.model') LIKE ? ESCAPE '!')"
            values += [f"%{_escaped(text)}%"] * 2
        for name, value in filters.items():
            query += f" AND json_extract(summary, '$.{name}') = ?"
            values.append(value)
        with self.database.searcher as connection:
            rows = connection.execute(f"{query} ORDER BY rowid DESC LIMIT ?", (*values, limit)).fetchall()
        return [
            {"row": row[0], "id": row[1], "profile_id": row[2], "complete": bool(row[3]), "version": row[4]}
            | {"created_s": row[5], **json.loads(row[6])}
            for row in rows
        ]

    def close(self) -> None:
        """Write everything to the file and let go of it."""
        self.database.close()

    def _write(self, work: Callable[[sqlite3.Connection], object]) -> None:
        with self.database.writer.transaction() as connection:
            work(connection)

    def _one(self, query: str, key: str) -> tuple[Any, ...] | None:
        with self.database.reader as connection:
            row: tuple[Any, ...] | None = connection.execute(query, (key,)).fetchone()
        return row


def _remove_job(connection: sqlite3.Connection, key: str) -> None:
    connection.execute("DELETE FROM jobs WHERE id = ?", (key,))
    connection.execute("DELETE FROM starts WHERE id = ?", (key,))


def _escaped(text: str) -> str:
    return "".join(f"!{letter}" if letter in "!%_" else letter for letter in text)


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
