"""Connections to the store: an SQLite file or a PostgreSQL database.

Several services may share either.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from placer.errors import InputError, MissingExtraError, ServerError

from .tables import replicas
from .upgrade import upgrade

try:
    import fcntl
except ImportError:
    # Windows has no such locks. A start cannot know that it is alone, and waits for leases to
    # expire.
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

# Key of the advisory lock that PostgreSQL migrations hold.
MIGRATION_LOCK = 0x706C61636572

CONNECT_S = 5
STATEMENT_S = 30

# Connections in each of the two pools.
POOL = 8
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")


class StoreError(ServerError):
    """The store could not be read or written: the disk is full, or PostgreSQL is unreachable."""


class Database(ABC):
    """Connections to a store; each method takes a function of a connection.

    Attributes:
        name: Name of the store, without a password.
        durable: Whether writes survive the process.
        shared: Whether other services may work on the same jobs.
        remote: Whether a statement waits for a network.
        dialect: ``sqlite`` or ``postgresql``.
    """

    name: str
    durable = True
    shared = True
    remote = False
    dialect: str

    def read(self, work: Work[T]) -> T:
        """Run a function that only reads."""
        return self._run(self._reading, work)

    def search(self, work: Work[T]) -> T:
        """Run a function whose reads take long, without blocking ``read``."""
        return self._run(self._searching, work)

    def write(self, work: Work[T]) -> T:
        """Run a function that writes, in a transaction.

        It may run twice, if the connection breaks at its end.
        """
        return self._run(self._writing, work)

    def write_one(self, work: Work[T]) -> T:
        """Run a function of one writing statement."""
        return self._run(self._writing_one, work)

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    def _reading(self) -> Any: ...

    @abstractmethod
    def _searching(self) -> Any: ...

    @abstractmethod
    def _writing(self) -> Any: ...

    @abstractmethod
    def _writing_one(self) -> Any: ...

    def _run(self, connecting: Callable[[], Any], work: Work[T]) -> T:
        try:
            try:
                with connecting() as connection:
                    return work(connection)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
            # The server has restarted since the connection was made; a new connection may work.
            with connecting() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            raise StoreError(f"database {self.name!r} cannot be used: {_reason(error)}") from error


def open_database(name: str) -> Database:
    """Open a database, and create or migrate its tables.

    Args:
        name: SQLite file, made if missing; ``:memory:``; or
            ``postgresql://user:password@host/database``.

    Raises:
        InputError: The URL cannot be read.
        MissingExtraError: PostgreSQL's driver is not installed.
        ServerError: A later version of Placer made it; StoreError: it cannot be used.
    """
    scheme, separator, _ = name.partition("://")
    if not separator:
        return SqliteDatabase(name)
    if scheme not in SCHEMES:
        raise InputError(
            f"PLACER_DATABASE has the scheme {scheme!r}; give a file, ':memory:', or"
            " postgresql://user@host/database"
        )
    return PostgresDatabase(name)


class SqliteDatabase(Database):
    """One SQLite file with a write-ahead log, or ``:memory:``.

    One connection writes. Another one reads, so that it never waits for a writer that waits for the
    disk. A third one searches. Several services may open the file and share its jobs as replicas
    (see ``Replicas``). A start that finds the file open nowhere knows at once, without waiting for
    leases to expire, that all earlier replicas are gone.
    """

    dialect = "sqlite"

    def __init__(self, name: str) -> None:
        self.durable = self.shared = name != ":memory:"
        if self.durable:
            name = str(Path(name).expanduser())
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._engine = sa.create_engine(
            sa.URL.create("sqlite", database=name),
            poolclass=sa.StaticPool if not self.durable else sa.NullPool,
            # Transactions are explicit, so that they take SQLite's write lock at their start.
            isolation_level="AUTOCOMMIT",
            connect_args={"check_same_thread": False, "timeout": 5},
        )
        try:
            self._open()
        except SQLAlchemyError as error:
            raise StoreError(f"database {name!r} cannot be used: {_reason(error)}") from error

    def _open(self) -> None:
        self._presence = _PresenceLock(self.name + ".lock") if self.durable else None
        self._writer = _LockedConnection(self._engine.connect())
        # synchronous=NORMAL: a commit survives a killed process at once, and a power failure after
        # the next checkpoint. Large pages: requests have tens of kilobytes, and each written page
        # has a cost of its own.
        for pragma in (
            "page_size=16384",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "wal_autocheckpoint=1000",
        ):
            self._writer.connection.exec_driver_sql(f"PRAGMA {pragma}")
        with self._writing() as connection:
            upgrade(connection, self.name)
            if self._presence is not None and self._presence.is_alone:
                connection.execute(sa.delete(replicas))
        if self._presence is not None:
            self._presence.share()
        self._reader = _LockedConnection(self._engine.connect()) if self.durable else self._writer
        self._searcher = _LockedConnection(self._engine.connect()) if self.durable else self._writer

    def close(self) -> None:
        """Write everything to the file, and close it."""
        for locked in (self._searcher, self._reader, self._writer):
            locked.connection.close()
        self._engine.dispose()
        if self._presence is not None:
            self._presence.close()

    def _reading(self) -> Any:
        return self._reader

    def _searching(self) -> Any:
        return self._searcher

    def _writing_one(self) -> Any:
        return self._writer

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with self._writer as connection:
            # IMMEDIATE: a read lock that is upgraded later could deadlock with another service.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                raw: Any = connection.connection.dbapi_connection
                if raw.in_transaction:
                    connection.exec_driver_sql("ROLLBACK")
                raise


class PostgresDatabase(Database):
    """PostgreSQL database with two connection pools, for single statements and for transactions.

    Connections that stay in autocommit mode cost half as much as those that switch to it.
    """

    dialect = "postgresql"
    remote = True

    def __init__(self, name: str) -> None:
        try:
            url = sa.make_url(name).set(drivername="postgresql+psycopg")
        except (ArgumentError, ValueError) as error:
            raise InputError(
                "PLACER_DATABASE is not a valid URL; an example is"
                " postgresql://user:password@host/database"
            ) from error
        self.name = url.render_as_string(hide_password=True).replace("+psycopg", "", 1)
        try:
            self._engine = self._pool(url)
            self._plain = self._pool(url, isolation_level="AUTOCOMMIT", pool_reset_on_return=None)
        except ImportError as error:
            raise MissingExtraError(
                "PostgreSQL's driver is not installed: pip install 'torch-placer[postgres]'"
            ) from error
        # The advisory lock inside makes replicas that start together upgrade one after another.
        self.write(self._upgrade)

    @staticmethod
    def _pool(url: sa.URL, **options: Any) -> sa.Engine:
        given = {
            "connect_timeout": CONNECT_S,
            "keepalives_idle": CONNECT_S,
            **_KEEPALIVE,
            **url.query,
        }
        engine = sa.create_engine(
            url,
            pool_size=POOL,
            max_overflow=0,
            pool_timeout=CONNECT_S,
            connect_args=given,
            **options,
        )
        sa.event.listen(engine, "connect", _set_limits)
        return engine

    def _upgrade(self, connection: sa.Connection) -> None:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        upgrade(connection, self.name)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
        self._plain.dispose()

    def _reading(self) -> Any:
        return self._plain.connect()

    _searching = _writing_one = _reading

    def _writing(self) -> Any:
        return self._engine.begin()


# Socket options with which a silently lost server is noticed in seconds instead of hours.
_KEEPALIVE = {
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * 2 * CONNECT_S,
}


def _set_limits(connection: Any, _: object) -> None:
    """Limit the duration of statements, so that none blocks a thread or a lock for long."""
    before, connection.autocommit = connection.autocommit, True
    connection.execute(f"SET statement_timeout = '{STATEMENT_S}s'")
    connection.execute(f"SET idle_in_transaction_session_timeout = '{STATEMENT_S}s'")
    connection.autocommit = before


class _LockedConnection:
    """Connection that one thread at a time uses, in a ``with`` statement."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def __enter__(self) -> sa.Connection:
        self._lock.acquire()
        return self.connection

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _PresenceLock:
    """File lock that shows that a service has the database open; it ends with the process.

    Every service holds a shared lock on a file next to the database. The first of them gets the
    exclusive lock, so it knows that it is alone. It keeps that lock until ``share``, and no other
    service starts until then.

    Args:
        path: File to lock.

    Raises:
        StoreError: Another service holds the exclusive lock for too long.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a")
        self.is_alone = self._try_lock(exclusive=True)
        until_s = time.monotonic() + CONNECT_S
        while not self.is_alone and not self._try_lock(exclusive=False):
            if time.monotonic() > until_s:
                self._file.close()
                raise StoreError(
                    f"{path!r} is locked by a service that does not share its database; stop that"
                    " service"
                )
            time.sleep(0.05)

    def share(self) -> None:
        """Let other services start."""
        self._try_lock(exclusive=False)

    def _try_lock(self, exclusive: bool) -> bool:
        """Try to lock the file, and return whether it is locked.

        On systems without such locks, no lock is exclusive.
        """
        if fcntl is None:
            return not exclusive
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def _reason(error: SQLAlchemyError) -> str:
    """Return the driver's message without the statement and its values."""
    message = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    return " ".join(message.split())[:500]
