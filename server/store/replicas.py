"""How several services share the jobs of one store: which service answers for which job, and which
services live.

Each replica counts up its own row of ``replicas``, as long as there are others to see it: one that
is alone writes nothing while nothing happens. A replica whose count has not changed for ``lease_s``
by the watcher's own monotonic clock is dead, so clocks that differ or jump cost nothing. A job is
free to take when its owner is none, dead, or has not begun with it. Where several reach for it, one
gets it: by ``FOR UPDATE SKIP LOCKED`` in PostgreSQL, and in SQLite because one transaction writes
at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import sqlalchemy as sa

import placer

from .database import Database
from .store import JOB, Accepted
from .tables import graphs, jobs, placements, replicas

Begun = Literal["mine", "taken", "answered"]


@dataclass(frozen=True)
class Seen:
    """How far a job is, wherever it is solved.

    Attributes:
        id: the content hash.
        objective: what is made small.
        time_limit_s: the solver's time limit.
        running: whether a worker has it.
        incumbent: the best objective value so far.
        bound: the proven bound so far.
    """

    id: str
    objective: str
    time_limit_s: float
    running: bool
    incumbent: float | None
    bound: float | None


SEEN = (
    jobs.c.id,
    jobs.c.objective,
    jobs.c.time_limit_s,
    jobs.c.running,
    jobs.c.incumbent,
    jobs.c.bound,
)


@dataclass(frozen=True)
class Turn:
    """What a replica learns when it looks.

    Attributes:
        taken: jobs that are now its own.
        stops: its own jobs that another replica was asked to end.
        seen: those it asked about that are on their way; the others have ended.
        told: whether its progress was written down; it is not where no other replica would read it.
    """

    taken: Sequence[Accepted] = ()
    stops: Sequence[str] = ()
    seen: Mapping[str, Seen] = field(default_factory=dict)
    told: bool = True


class Replicas:
    """One replica's view of the store that it shares. Safe to use from several threads.

    Every method raises StoreError where the store cannot be used.

    Args:
        database: what is shared.
        owner: this replica's name, its own alone.
        lease_s: after so long without a sign of life another one is dead.
    """

    def __init__(self, database: Database, owner: str, lease_s: float) -> None:
        self._database = database
        self._owner = owner
        self._lease_s = lease_s
        self._beats: dict[str, tuple[int, float]] = {}

    def turn(
        self,
        progress: Mapping[str, tuple[float | None, float | None]],
        watched: Sequence[str],
        room: int,
    ) -> Turn:
        """Give a sign of life, and see what is new.

        Args:
            progress: incumbent and bound of those of its own jobs that found something new.
            watched: ids of jobs of others that somebody waits for here.
            room: how many jobs it can take.
        """

        def work(connection: sa.Connection) -> Turn:
            self._beat(connection)
            for key, (incumbent, bound) in progress.items():
                mine = sa.update(jobs).where(jobs.c.id == key, jobs.c.owner == self._owner)
                connection.execute(mine.values(incumbent=incumbent, bound=bound))
            stops = connection.scalars(
                sa.select(jobs.c.id).where(jobs.c.owner == self._owner, jobs.c.stop)
            ).all()
            taken = self._take(connection, room) if room > 0 else []
            seen = (
                connection.execute(sa.select(*SEEN).where(jobs.c.id.in_(watched))).all()
                if watched
                else []
            )
            return Turn(taken, stops, {row.id: Seen(*row) for row in seen})

        if not watched and self._database.read(lambda connection: self._is_alone(connection, room)):
            return Turn(told=False)
        return self._database.write(work)

    def _is_alone(self, connection: sa.Connection, room: int) -> bool:
        """Whether no other replica is there, nor a job that this one could take."""
        mine = sa.exists().where(replicas.c.id == self._owner)
        others = sa.exists().where(replicas.c.id != self._owner)
        left = sa.exists().where(jobs.c.owner.is_distinct_from(self._owner))
        is_there, has_others, has_left = connection.execute(sa.select(mine, others, left)).one()
        return bool(is_there and not has_others and not (has_left and room > 0))

    def _beat(self, connection: sa.Connection) -> None:
        mine = (
            sa.update(replicas)
            .where(replicas.c.id == self._owner)
            .values(beats=replicas.c.beats + 1)
        )
        # the first time, or others took it for dead
        if connection.execute(mine).rowcount == 0:
            connection.execute(sa.insert(replicas), {"id": self._owner, "beats": 1})
        now, found = time.monotonic(), {}
        for name, beats in connection.execute(sa.select(replicas.c.id, replicas.c.beats)):
            last = self._beats.get(name)
            found[name] = last if last and last[0] == beats else (beats, now)
            if name != self._owner and now - found[name][1] > self._lease_s:
                dead = sa.delete(replicas).where(replicas.c.id == name, replicas.c.beats == beats)
                connection.execute(dead)
        self._beats = found

    def _take(self, connection: sa.Connection, room: int) -> list[Accepted]:
        dead = jobs.c.owner.not_in(sa.select(replicas.c.id))
        free = sa.or_(jobs.c.owner.is_(None), dead, ~jobs.c.running)
        query = (
            sa.select(*JOB)
            .where(jobs.c.owner.is_distinct_from(self._owner), free)
            .order_by(jobs.c.row)
            .limit(room)
            .with_for_update(skip_locked=True)
        )
        found = [Accepted(*row) for row in connection.execute(query)]
        if found:
            mine = sa.update(jobs).where(jobs.c.id.in_([job.id for job in found]))
            connection.execute(mine.values(owner=self._owner, running=False))
        return found

    def begin(self, key: str, starts: int) -> Begun:
        """Write down that a worker begins with a job, and see whether it is still to be done here.

        Args:
            key: the job's id.
            starts: how often one began with it, this time included.
        """

        def work(connection: sa.Connection) -> Begun:
            mine = sa.update(jobs).where(jobs.c.id == key, jobs.c.owner == self._owner)
            held = connection.execute(mine.values(starts=starts, running=True)).rowcount
            if (
                not held
                and connection.execute(sa.select(jobs.c.id).where(jobs.c.id == key)).first()
            ):
                return "taken"
            if not self._answered(connection, key):
                return "mine"
            connection.execute(sa.delete(jobs).where(jobs.c.id == key, jobs.c.owner == self._owner))
            return "answered"

        return self._database.write(work)

    @staticmethod
    def _answered(connection: sa.Connection, key: str) -> bool:
        c = placements.c
        query = sa.select(c.id).where(c.id == key, c.complete, c.version == placer.__version__)
        return connection.execute(query).first() is not None

    def find(self, key: str) -> Seen | None:
        """How far a job of another replica is; None if none has a job of that id.

        A row of this replica whose job is no longer in its memory has ended here. The row is only
        still there because the next start goes on with the job, or because the end could not be
        written.
        """
        query = sa.select(*SEEN).where(jobs.c.id == key, jobs.c.owner.is_distinct_from(self._owner))
        row = self._database.read(lambda connection: connection.execute(query).one_or_none())
        return Seen(*row) if row else None

    def ask_stop(self, key: str) -> None:
        """Let whoever solves a job end it with the best so far."""
        asked = sa.update(jobs).where(jobs.c.id == key).values(stop=True)
        self._database.write_one(lambda connection: connection.execute(asked))

    def leave(self) -> None:
        """Give up every job, so that another takes it at once."""

        def work(connection: sa.Connection) -> None:
            mine = sa.update(jobs).where(jobs.c.owner == self._owner)
            connection.execute(mine.values(owner=None, running=False, starts=0))
            connection.execute(
                sa.update(graphs).where(graphs.c.owner == self._owner).values(owner=None)
            )
            connection.execute(sa.delete(replicas).where(replicas.c.id == self._owner))

        self._database.write(work)
