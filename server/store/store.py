"""Questions and answers by the content hash of the question.

    accept ──▶ jobs ──▶ put ──▶ placements, profiles
                  └───▶ fail ──▶ failures

An accepted request stays in ``jobs`` until it is answered, so that the next start, or another
replica, finds it after a crash. ``replicas`` describes how services share the jobs.

Rows of an older schema version are not rewritten. They keep their ids, and are upgraded whenever
they are read.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from placer.schema import Placement, PlacementRequest, Profile
from placer.schema.versions import stored_json

from .database import StoreError, open_database
from .lru_cache import LruCache
from .tables import failures, graphs, jobs, measured, nodes, placements, profiles, replicas

T = TypeVar("T")
P = ParamSpec("P")

# Size of the cache of answers in bytes; a frequent question then costs no read.
MEMORY_BYTES = 32 * 2**20

FAILURES_KEPT = 1000
MEASURED_KEPT = 1000

# Largest number of job ends that wait for a store that fails. The next start solves the jobs beyond
# that number again.
MAX_UNWRITTEN = 1_000


@dataclass(frozen=True)
class Answer:
    """One placement.

    Attributes:
        placement: The Placement as JSON.
        complete: Whether the solver had all the time that the request gave it. An answer that was
            stopped early is kept and can be read, but the same question is solved again.
        version: Version of Placer that made it; another version solves the question again.
    """

    placement: bytes
    complete: bool
    version: str


@dataclass(frozen=True)
class StoredQuestion:
    """Question of an answer, in the parts that are stored.

    Attributes:
        profile_id: The profile's content hash.
        profile: The Profile as JSON; placements of one profile share it.
        question: The rest of the PlacementRequest as JSON.
    """

    profile_id: str
    profile: bytes
    question: bytes


@dataclass(frozen=True)
class Accepted:
    """Request that was accepted and is not answered yet.

    Attributes:
        id: Content hash.
        client: Client that asked.
        objective: Objective that is minimised.
        time_limit_s: The solver's time limit in seconds.
        request: The request body.
        starts: How often a worker started it.
    """

    id: str
    client: str
    objective: str
    time_limit_s: float
    request: bytes
    starts: int = 0


JOB = tuple(jobs.c[field.name] for field in fields(Accepted))

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_KEY: sa.BindParameter[str] = sa.bindparam("key")
_ANSWER = sa.select(placements.c.placement, placements.c.complete, placements.c.version).where(
    placements.c.id == _KEY
)
_BEFORE = _ANSWER.add_columns(placements.c.summary)
_PROFILE = sa.select(profiles.c.profile).where(profiles.c.id == _KEY)
_MEASURED = sa.select(measured.c.profile).where(measured.c.id == _KEY)
_FAILURE = sa.select(failures.c.status, failures.c.problem).where(failures.c.id == _KEY)
_REQUEST = (
    sa.select(placements.c.question, profiles.c.profile)
    .join(profiles, profiles.c.id == placements.c.profile_id)
    .where(placements.c.id == _KEY)
)


class Store:
    """The newest ``keep`` answers, and the accepted requests. Any thread may use it.

    Every method that reads or writes raises StoreError if the store cannot be used.

    Args:
        database: See ``open_database``.
        keep: Number of answers that it keeps.
        owner: Name of this replica, if several share the store.
        cache_bytes: Size of the cache of answers in bytes.
    """

    def __init__(
        self, database: str, keep: int, owner: str | None = None, cache_bytes: int | None = None
    ) -> None:
        self._keep = keep
        self._recent: LruCache[Answer] = LruCache(
            MEMORY_BYTES if cache_bytes is None else cache_bytes
        )
        self._unwritten: dict[str, Callable[[sa.Connection], Answer | None]] = {}
        self._unwritten_answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self.database = open_database(database)
        self._owner = owner if self.database.shared else None
        self._insert = _INSERTS[self.database.dialect]
        new = self._insert(jobs).inline().on_conflict_do_nothing(index_elements=["id"])
        self._accept = new.execution_options(preserve_rowcount=True)

    async def call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store from the event loop, in a thread if the database is remote."""
        if self.database.remote:
            return await asyncio.to_thread(call, *args, **kwargs)
        return call(*args, **kwargs)

    def recent(self, key: str) -> Answer | None:
        """Return the cached answer to a question, or None."""
        return self._recent.get(key) or self._unwritten_answers.get(key)

    def get(self, key: str) -> Answer | None:
        """Return the answer to a question, or None."""
        if (answer := self.recent(key)) is not None:
            return answer
        row = self._first_row(_ANSWER, key)
        if row is None:
            return None
        answer = Answer(stored_json(row.placement, Placement), row.complete, row.version)
        self._cache(key, answer)
        return answer

    def put(
        self,
        key: str,
        answer: Answer,
        summary: bytes = b"{}",
        question: StoredQuestion | None = None,
        *,
        settled: bool = True,
    ) -> Answer:
        """Store an answer and its question, unless the stored answer is better.

        Args:
            key: Content hash.
            answer: The answer.
            summary: The fields that lists of placements show, as JSON.
            question: Its question, if known.
            settled: Whether the job is done; if not, the next start continues it.

        Returns:
            The better of the two answers.

        Raises:
            StoreError: The answer could not be written. It stays in memory, and ``retry_unwritten``
                tries again.
        """
        write = partial(
            self._write_answer,
            key=key,
            answer=answer,
            summary=_without_nul(summary),
            question=question,
            settled=settled,
        )
        kept = answer
        try:
            kept = self._write_end(key, write, answer) or answer
        finally:
            self._cache(key, kept)
        return kept

    def _write_answer(
        self,
        connection: sa.Connection,
        key: str,
        answer: Answer,
        summary: Any,
        question: StoredQuestion | None,
        settled: bool,
    ) -> Answer:
        before = connection.execute(_BEFORE, {"key": key}).one_or_none()
        # Another replica or an earlier attempt may have stored a better answer.
        if before is not None and _is_worse(answer.version, summary, before):
            placement = stored_json(before.placement, Placement)
            kept = Answer(placement, before.complete or answer.complete, before.version)
            connection.execute(
                sa.update(placements).where(placements.c.id == key).values(complete=kept.complete)
            )
        else:
            kept = answer
            self._replace(connection, key, answer, summary, question)
        # In the same transaction as the answer: a crash cannot leave an answered job that is open.
        if settled:
            connection.execute(sa.delete(jobs).where(jobs.c.id == key))
        return kept

    def _replace(
        self,
        connection: sa.Connection,
        key: str,
        answer: Answer,
        summary: Any,
        question: StoredQuestion | None,
    ) -> None:
        values: dict[str, Any] = {"profile_id": None, "question": b"{}"}
        if question is not None:
            new = self._insert(profiles).on_conflict_do_nothing(index_elements=["id"])
            connection.execute(new, {"id": question.profile_id, "profile": question.profile})
            values = {"profile_id": question.profile_id, "question": question.question}
        values |= {"id": key, "created_s": time.time(), "summary": summary, **vars(answer)}
        # Insert instead of update, so that the row number gives the order of writing.
        connection.execute(sa.delete(placements).where(placements.c.id == key))
        connection.execute(sa.insert(placements), values)
        self._prune(connection)

    def _prune(self, connection: sa.Connection) -> None:
        """Delete the oldest answers by the order of writing, since a clock may jump."""
        old = _oldest(placements, self._keep).returning(placements.c.profile_id)
        # Profiles are shared: delete those that no remaining placement uses.
        for profile_id in set(connection.scalars(old)):
            left = sa.exists().where(placements.c.profile_id == profile_id)
            connection.execute(sa.delete(profiles).where(profiles.c.id == profile_id, ~left))

    def accept(self, job: Accepted) -> bool:
        """Write a request before its client learns that it was accepted.

        Returns:
            Whether this replica must answer it; False if another one accepted it before.
        """
        row = {**vars(job), "owner": self._owner}
        if self.database.write_one(
            lambda connection: connection.execute(self._accept, row).rowcount == 1
        ):
            return True
        query = sa.select(jobs.c.owner).where(jobs.c.id == job.id)
        owner = self.database.read(lambda connection: connection.scalar(query))
        # This replica's own row remains if the end of an earlier solve could not be written.
        return owner == self._owner

    def record_start(self, key: str, starts: int) -> None:
        """Record a job's start, so that a job that crashes the service is not repeated forever."""
        begun = sa.update(jobs).where(jobs.c.id == key).values(starts=starts, running=True)
        self.database.write_one(lambda connection: connection.execute(begun))

    def fail(self, key: str, status: int, problem: bytes) -> None:
        """Store why a job has no answer.

        Raises:
            StoreError: It could not be written; ``retry_unwritten`` tries again.
        """
        self._write_end(key, partial(_insert_failure, key=key, status=status, problem=problem))

    def failure(self, key: str) -> tuple[int, bytes] | None:
        """Return the status and problem of a failed job, or None."""
        row = self._first_row(_FAILURE, key)
        return (row[0], row[1]) if row else None

    def profile(self, key: str) -> bytes | None:
        """Return a profile as JSON by its content hash, or None if no placement of it is kept."""
        row = self._first_row(_PROFILE, key)
        return stored_json(row[0], Profile) if row else None

    def accept_graph(self, key: str, node: str, body: bytes) -> None:
        """Write a graph before its client learns that it was accepted."""
        new = self._insert(graphs).inline().on_conflict_do_nothing(index_elements=["id", "node"])
        row = {"id": key, "node": node, "owner": self._owner, "body": body}
        self.database.write_one(lambda connection: connection.execute(new, row))

    def take_graphs(self, node: str) -> list[tuple[str, bytes]]:
        """Take over the graphs of a node that no living service measures.

        Returns:
            Their ids and bodies, the oldest first.
        """
        free = sa.or_(graphs.c.owner.is_(None), graphs.c.owner.not_in(sa.select(replicas.c.id)))
        mine = graphs.c.owner.is_not_distinct_from(self._owner)
        left = sa.and_(graphs.c.node == node, free, ~mine)
        query = (
            sa.select(graphs.c.row, graphs.c.id, graphs.c.body).where(left).order_by(graphs.c.row)
        )

        def take(connection: sa.Connection) -> list[tuple[str, bytes]]:
            found = connection.execute(query.with_for_update(skip_locked=True)).all()
            taken = sa.update(graphs).where(graphs.c.row.in_([row.row for row in found]))
            connection.execute(taken.values(owner=self._owner))
            return [(row.id, row.body) for row in found]

        # Most polls find nothing, so look first without a write transaction.
        there = sa.select(graphs.c.row).where(left).limit(1)
        if self.database.read(lambda connection: connection.execute(there).first()) is None:
            return []
        return self.database.write(take)

    def delete_graph(self, key: str, node: str) -> None:
        """Delete a graph that cannot be measured."""
        done = sa.delete(graphs).where(graphs.c.id == key, graphs.c.node == node)
        self.database.write_one(lambda connection: connection.execute(done))

    def put_measured(self, key: str, node: str, profile: bytes) -> None:
        """Store a profile that a node measured, and delete all but the newest thousand."""

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(graphs).where(graphs.c.id == key, graphs.c.node == node))
            connection.execute(sa.delete(measured).where(measured.c.id == key))
            connection.execute(sa.insert(measured), {"id": key, "profile": profile})
            connection.execute(_oldest(measured, MEASURED_KEPT))

        self.database.write(write)

    def measured(self, key: str) -> bytes | None:
        """Return a measured profile by the hash of its request, or None."""
        row = self._first_row(_MEASURED, key)
        return stored_json(row[0], Profile) if row else None

    def put_node(self, name: str, cluster: bytes) -> float:
        """Store a node's devices, and return the time in seconds since 1970."""
        values = {"created_s": time.time(), "cluster": cluster}
        kept = self._insert(nodes).values(name=name, **values)
        kept = kept.on_conflict_do_update(index_elements=["name"], set_=values)
        self.database.write_one(lambda connection: connection.execute(kept))
        return float(values["created_s"])  # type: ignore[arg-type]

    def delete_node(self, name: str) -> bool:
        """Delete a node, and return whether it was registered."""
        dropped = sa.delete(nodes).where(nodes.c.name == name)
        return self.database.write_one(lambda connection: connection.execute(dropped).rowcount == 1)

    def nodes(self) -> dict[str, tuple[float, bytes]]:
        """Return the registered nodes by name: time of registration, and Cluster as JSON."""
        query = sa.select(nodes.c.name, nodes.c.created_s, nodes.c.cluster).order_by(nodes.c.name)
        rows = self.database.read(lambda connection: connection.execute(query).all())
        return {name: (created_s, cluster) for name, created_s, cluster in rows}

    def request(self, key: str) -> bytes | None:
        """Return the PlacementRequest of an answer as JSON, or None if it is not kept."""
        row = self._first_row(_REQUEST, key)
        if row is None:
            return None
        question = stored_json(row.question, PlacementRequest)
        return b'{"profile": %s, %s' % (stored_json(row.profile, Profile), question[1:])

    def search(
        self, text: str, filters: dict[str, str], before: int, limit: int
    ) -> list[dict[str, Any]]:
        """Return summaries of answers, newest first.

        Args:
            text: Text that the model's name or the id must contain, ignoring case; all if empty.
            filters: Required values of summary fields.
            before: Exclusive upper limit of ``row``.
            limit: Largest number of results.
        """
        c = placements.c
        query = sa.select(
            c.row, c.id, c.profile_id, c.complete, c.version, c.created_s, c.summary
        ).where(c.row < before)
        if text:
            # PostgreSQL refuses NUL, and SQLite ends the text there; names are stored without it.
            text = text.replace("\0", "\ufffd")
            model = c.summary["model"].as_string()
            query = query.where(
                c.id.icontains(text, autoescape=True) | model.icontains(text, autoescape=True)
            )
        for name, value in filters.items():
            query = query.where(c.summary[name].as_string() == value)
        query = query.order_by(c.row.desc()).limit(limit)
        rows = self.database.search(lambda connection: connection.execute(query).mappings().all())
        return [
            {**{name: row[name] for name in row if name != "summary"}, **row["summary"]}
            for row in rows
        ]

    def retry_unwritten(self) -> int:
        """Write what could not be written before.

        Returns:
            Number of job ends that are still unwritten.
        """
        for key, write in list(self._unwritten.items()):
            kept = self.database.write(write)
            with self._lock:
                # Otherwise a later end of the same job has replaced this one.
                if self._unwritten.get(key) is write:
                    del self._unwritten[key]
                    self._unwritten_answers.pop(key, None)
                    if kept is not None:
                        self._cache(key, kept)
        return len(self._unwritten)

    @property
    def unwritten(self) -> int:
        """Number of job ends that could not be written yet."""
        return len(self._unwritten)

    def close(self) -> None:
        """Write everything, and close the database."""
        self.database.close()

    def _write_end(
        self,
        key: str,
        write: Callable[[sa.Connection], Answer | None],
        answer: Answer | None = None,
    ) -> Answer | None:
        try:
            kept = self.database.write(write)
        except StoreError:
            with self._lock:
                if len(self._unwritten) < MAX_UNWRITTEN:
                    self._unwritten[key] = write
                    if answer is not None:
                        self._unwritten_answers[key] = answer
            raise
        # This end also replaces one that could not be written before.
        with self._lock:
            self._unwritten.pop(key, None)
            self._unwritten_answers.pop(key, None)
        return kept

    def _cache(self, key: str, answer: Answer) -> None:
        """Cache an answer.

        If replicas share the store, another replica may improve an answer that was stopped early,
        so it is not cached.
        """
        if answer.complete or not self.database.shared:
            self._recent.put(key, answer, len(answer.placement))

    def _first_row(self, query: sa.Executable, key: str) -> Any:
        """Return the row that a query finds, or None."""
        return self.database.read(
            lambda connection: connection.execute(query, {"key": key}).one_or_none()
        )


def _is_worse(version: str, summary: dict[str, Any], before: sa.Row[Any]) -> bool:
    """Return whether an answer is worse than the stored one.

    Values of two versions of Placer are not comparable.
    """
    mine, other = _rank(summary), _rank(before.summary)
    return mine < other and (version == before.version or mine == _rank({}))


def _rank(summary: dict[str, Any]) -> tuple[bool, float]:
    """Return a sort key: proven answers first, then the smallest value; no placement is last."""
    value = summary.get("objective_value")
    proven = summary.get("status") in ("optimal", "infeasible")
    return proven, -math.inf if value is None else -value


def _insert_failure(connection: sa.Connection, key: str, status: int, problem: bytes) -> None:
    connection.execute(sa.delete(failures).where(failures.c.id == key))
    connection.execute(sa.insert(failures), {"id": key, "status": status, "problem": problem})
    connection.execute(_oldest(failures, FAILURES_KEPT))
    connection.execute(sa.delete(jobs).where(jobs.c.id == key))


def _oldest(table: sa.Table, kept: int) -> sa.Delete:
    """Return the statement that deletes all but the newest rows of a table."""
    last = sa.select(table.c.row).order_by(table.c.row.desc()).offset(kept).limit(1)
    return sa.delete(table).where(table.c.row <= last.scalar_subquery())


def _without_nul(summary: bytes) -> Any:
    """Return the summary without NUL characters.

    A model's name may contain them, but PostgreSQL's text type does not.
    """
    return json.loads(summary.replace(rb"\u0000", rb"\ufffd"))
