"""Migration of the tables from every earlier version; later versions are rejected."""

from __future__ import annotations

import sqlite3
from threading import Thread

import pytest
import sqlalchemy as sa
from accepted import accepted_jobs
from alembic.autogenerate import compare_metadata
from alembic.command import upgrade
from alembic.config import Config
from alembic.migration import MigrationContext

import placer_server
from placer.errors import ServerError
from placer_server.store.database import open_database
from placer_server.store.store import Accepted, Answer, Store
from placer_server.store.tables import HEAD, METADATA

FIRST = """
    CREATE TABLE placements (
        id TEXT PRIMARY KEY, version TEXT NOT NULL, complete INTEGER NOT NULL,
        created_s REAL NOT NULL, placement BLOB NOT NULL
    );
    INSERT INTO placements VALUES ('a', '1', 1, 5.0, x'7b7d');
    PRAGMA user_version = 1;
"""
SECOND = """
    CREATE TABLE placements (
        id TEXT PRIMARY KEY, version TEXT NOT NULL, complete INTEGER NOT NULL,
        created_s REAL NOT NULL, profile_id TEXT, summary BLOB NOT NULL,
        question BLOB NOT NULL, placement BLOB NOT NULL
    );
    CREATE INDEX placements_by_profile ON placements (profile_id);
    CREATE TABLE profiles (id TEXT PRIMARY KEY, profile BLOB NOT NULL);
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY, client TEXT NOT NULL, objective TEXT NOT NULL,
        time_limit_s REAL NOT NULL, request BLOB NOT NULL
    );
    CREATE TABLE starts (id TEXT PRIMARY KEY, count INTEGER NOT NULL);
    CREATE TABLE failures (id TEXT PRIMARY KEY, status INTEGER NOT NULL, problem BLOB NOT NULL);
    INSERT INTO profiles VALUES ('p', CAST('{"layers": []}' AS BLOB));
    INSERT INTO placements VALUES
        ('z', '1', 1, 9.0, 'p', CAST('{"model": "Older"}' AS BLOB), CAST('{"seed": 3}' AS BLOB),
            x'7b7d'),
        ('a', '1', 0, 5.0, NULL, CAST('{"model": "Newer"}' AS BLOB), x'7b7d', x'7b7d');
    INSERT INTO jobs VALUES ('c', 'me', 'latency', 2.5, x'01'), ('b', 'you', 'memory', 1.5, x'02');
    INSERT INTO starts VALUES ('b', 2);
    INSERT INTO failures VALUES ('f', 500, x'03');
    PRAGMA user_version = 2;
"""


@pytest.fixture
def old(tmp_path):
    """Return ``old(script)``, a store over a file that the script made."""
    stores = []

    def make(script):
        connection = sqlite3.connect(tmp_path / "p.db")
        connection.executescript(script)
        connection.close()
        stores.append(Store(str(tmp_path / "p.db"), keep=10))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_a_file_of_the_first_version_keeps_its_answers(old):
    store = old(FIRST)
    assert store.get("a") == Answer(b"{}", True, "1")
    assert store.request("a") is None


def test_a_file_of_the_second_version_keeps_answers_questions_and_failures(old):
    store = old(SECOND)
    assert store.get("a") == Answer(b"{}", False, "1")
    assert store.request("z") == b'{"profile": {"layers": []}, "seed": 3}'
    assert store.failure("f") == (500, b"\x03")


def test_a_file_of_the_second_version_keeps_its_jobs_their_starts_and_their_order(old):
    assert accepted_jobs(old(SECOND)) == [
        Accepted("c", "me", "latency", 2.5, b"\x01", 0),
        Accepted("b", "you", "memory", 1.5, b"\x02", 2),
    ]


def test_placements_of_an_old_file_are_listed_in_the_order_of_writing(old):
    found = old(SECOND).search("", {}, 2**62, 10)
    assert [(row["id"], row["model"]) for row in found] == [("a", "Newer"), ("z", "Older")]


def test_a_file_is_migrated_once(old, tmp_path):
    old(SECOND).put("n", Answer(b"{}", True, "1"))
    again = Store(str(tmp_path / "p.db"), keep=10)
    assert [row["id"] for row in again.search("", {}, 2**62, 10)] == ["n", "a", "z"]
    again.close()


@pytest.mark.parametrize(
    "script",
    [
        "PRAGMA user_version = 99",
        "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES "
        "('0099')",
    ],
)
def test_a_database_of_a_later_version_is_refused(tmp_path, script):
    later = sqlite3.connect(tmp_path / "p.db")
    later.executescript(script)
    later.close()
    with pytest.raises(ServerError, match=r"version (00)?99"):
        open_database(str(tmp_path / "p.db"))


def url_of(database):
    return (
        database.replace("postgresql:", "postgresql+psycopg:")
        if "://" in database
        else f"sqlite:///{database}"
    )


def test_new_tables_are_those_that_the_migrations_lead_to(database):
    engine = sa.create_engine(url_of(database))
    config = Config()
    config.set_main_option("script_location", f"{placer_server.__path__[0]}/store/migrations")
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        upgrade(config, "head")
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        assert (
            connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
            == HEAD
        )
    engine.dispose()


def test_a_new_database_is_stamped_with_its_version_and_opened_again(database):
    for _ in range(2):
        open_database(database).close()
    engine = sa.create_engine(url_of(database))
    with engine.connect() as connection:
        assert (
            connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
            == HEAD
        )
    engine.dispose()


@pytest.mark.integration
def test_replicas_that_start_together_make_the_tables_once(postgres):
    failed = []

    def start():
        try:
            open_database(postgres).close()
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
