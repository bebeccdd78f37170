"""Sharing of one store's jobs among several services, called replicas.

Each replica increments a counter in its own row of ``replicas`` while others can see it; a replica
that is alone writes nothing while nothing happens. A replica is dead if its counter has not changed
for ``lease_s`` by the observer's own monotonic clock, so differing clocks do no harm. A replica may
take a job without an owner, whose owner is dead, or whose owner has not started it. If several try,
one succeeds: through ``FOR UPDATE SKIP LOCKED`` in PostgreSQL, and in SQLite since only one
transaction writes at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import sqlalchemy as sa

import placer

from .database import Database
from .store import JOB, Accepted
from .tables import graphs, jobs, placements, replicas

Begun = Literal["mine", "taken", "answered"]


@dataclass(frozen=True)
class JobProgress:
    """Progress of a job on any replica.

    Attributes:
        id: Content hash.
        objective: Objective that is minimised.
        time_limit_s: The solver's time limit in seconds.
        running: Whether a worker runs it.
        incumbent: Best objective value so far.
        bound: Proven bound so far.
    """

    id: str
    objective: str
    time_limit_s: float
    running: bool
    incumbent: float | None
    bound: float | None


PROGRESS_COLUMNS = tuple(jobs.c[field.name] for field in fields(JobProgress))


@dataclass(frozen=True)
class PollResult:
    """Result of one poll.

    Attributes:
        taken: Jobs that this replica owns from now on.
        stops: Own jobs that another replica asked to end.
        seen: Progress of the watched jobs that are not finished.
        progress_written: Whether this replica's progress was written. Without other replicas nobody
            would read it.
    """

    taken: Sequence[Accepted] = ()
    stops: Sequence[str] = ()
    seen: Mapping[str, JobProgress] = field(default_factory=dict)
    progress_written: bool = True


class Replicas:
    """One replica's view of the shared store. Any thread may use it.

    Every method raises StoreError if the store cannot be used.

    Args:
        database: The shared database.
        owner: Unique name of this replica.
        lease_s: Seconds without a sign of life after which another replica is dead.
    """

    def __init__(self, database: Database, owner: str, lease_s: float) -> None:
        self._database = database
        self._owner = owner
        self._lease_s = lease_s
        self._beats: dict[str, tuple[int, float]] = {}

    def poll(
        self,
        progress: Mapping[str, tuple[float | None, float | None]],
        watched: Sequence[str],
        room: int,
    ) -> PollResult:
        """Give a sign of life, and return what changed.

        Args:
            progress: Incumbent and bound of own jobs that changed.
            watched: Ids of other replicas' jobs for which clients wait here.
            room: Number of jobs that this replica can take.
        """

        def work(connection: sa.Connection) -> PollResult:
            self._beat(connection)
            for key, (incumbent, bound) in progress.items():
                mine = sa.update(jobs).where(jobs.c.id == key, jobs.c.owner == self._owner)
                connection.execute(mine.values(incumbent=incumbent, bound=bound))
            stops = connection.scalars(
                sa.select(jobs.c.id).where(jobs.c.owner == self._owner, jobs.c.stop)
            ).all()
            taken = self._take(connection, room) if room > 0 else []
            seen = (
                connection.execute(sa.select(*PROGRESS_COLUMNS).where(jobs.c.id.in_(watched))).all()
                if watched
                else []
            )
            return PollResult(taken, stops, {row.id: JobProgress(*row) for row in seen})

        # A read is enough for a replica that is alone, which spares the disk.
        if not watched and self._database.read(lambda connection: self._is_alone(connection, room)):
            return PollResult(progress_written=False)
        return self._database.write(work)

    def _is_alone(self, connection: sa.Connection, room: int) -> bool:
        """Return whether there is neither another replica nor a job that this one could take."""
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
        # The row is missing on the first beat, or after others have declared this replica dead.
        if connection.execute(mine).rowcount == 0:
            connection.execute(sa.insert(replicas), {"id": self._owner, "beats": 1})
        now, found = time.monotonic(), {}
        for name, beats in connection.execute(sa.select(replicas.c.id, replicas.c.beats)):
            last = self._beats.get(name)
            found[name] = last if last and last[0] == beats else (beats, now)
            # The condition on ``beats`` spares a replica that has just beaten again.
            if name != self._owner and now - found[name][1] > self._lease_s:
                dead = sa.delete(replicas).where(replicas.c.id == name, replicas.c.beats == beats)
                connection.execute(dead)
        self._beats = found

    def _take(self, connection: sa.Connection, room: int) -> list[Accepted]:
        dead = jobs.c.owner.not_in(sa.select(replicas.c.id))
        # Jobs that wait at another live replica are free too, since this one has room to run them.
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
        """Record a start of a job, and return whether the job is still to be done here.

        ``starts`` is the number of starts, including this one.
        """

        def work(connection: sa.Connection) -> Begun:
            mine = sa.update(jobs).where(jobs.c.id == key, jobs.c.owner == self._owner)
            # No updated row: another replica has the job, or the request was not written.
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

    def find(self, key: str) -> JobProgress | None:
        """Return the progress of another replica's job, or None.

        If a row of this replica belongs to no job in its memory, that job has ended here. The row
        remains because the next start continues the job, or because the end could not be written.
        """
        query = sa.select(*PROGRESS_COLUMNS).where(
            jobs.c.id == key, jobs.c.owner.is_distinct_from(self._owner)
        )
        row = self._database.read(lambda connection: connection.execute(query).one_or_none())
        return JobProgress(*row) if row else None

    def request_stop(self, key: str) -> None:
        """Ask the owner of a job to end it with the best placement so far."""
        update = sa.update(jobs).where(jobs.c.id == key).values(stop=True)
        self._database.write_one(lambda connection: connection.execute(update))

    def leave(self) -> None:
        """Release every job, so that another replica takes it at once."""

        def work(connection: sa.Connection) -> None:
            mine = sa.update(jobs).where(jobs.c.owner == self._owner)
            # The starts count crashes, and a release is not a crash.
            connection.execute(mine.values(owner=None, running=False, starts=0))
            connection.execute(
                sa.update(graphs).where(graphs.c.owner == self._owner).values(owner=None)
            )
            connection.execute(sa.delete(replicas).where(replicas.c.id == self._owner))

        self._database.write(work)
