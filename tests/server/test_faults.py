"""A full disk and a killed PostgreSQL: no accepted request is lost.

Nothing is reported as accepted that is not stored.
"""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from accepted import accepted_jobs
from fastapi.testclient import TestClient
from postgres_server import PostgresServer, find_binaries

from placer_server.app import create_app
from placer_server.keys import make
from placer_server.settings import Settings
from placer_server.store import write_retries
from placer_server.store.database import StoreError
from placer_server.store.store import Accepted, Answer, Store


@pytest.fixture
def own_postgres():
    """Start a PostgreSQL that no other test uses, so that it may be killed."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    server = PostgresServer(binaries)
    yield server
    server.stop()


def fill(store: Store, free: bool = False) -> None:
    """Limit the size of SQLite's file; SQLite then reports a full disk."""
    with store.database._writer as connection:
        pages = 2**30 if free else connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")


def large(request_body, **fields):
    """Return a request that does not fit into the rest of a page."""
    body = request_body(**fields)
    body["profile"]["layers"][0]["module"] = "x" * 500
    body["profile"]["versions"] = {str(number): "x" * 500 for number in range(200)}
    return body


def test_an_answer_for_which_the_disk_has_no_room_is_written_when_it_has(
    serve, request_body, tmp_path, wait_until
):
    client = serve(database=str(tmp_path / "p.db"))
    store = client.app.state.service.store
    real = store.accept
    # the disk is full once the request is written
    store.accept = lambda job: (real(job), fill(store))[0]
    first = client.post("/v1/placements?wait=30", json=large(request_body))
    key = first.json()["id"]
    assert first.status_code == 200 and store.unwritten == 1
    assert client.get(f"/v1/placements/{key}").content == first.content
    fill(store, free=True)
    wait_until(lambda: store.unwritten == 0)
    again = serve(database=str(tmp_path / "p.db"))
    assert again.get(f"/v1/placements/{key}").content == first.content
    assert accepted_jobs(store) == []


def test_a_request_for_which_the_disk_has_no_room_is_not_said_to_be_accepted(
    serve, solvers, request_body, tmp_path
):
    client = serve(solvers.until_stopped, database=str(tmp_path / "p.db"))
    fill(client.app.state.service.store)
    reply = client.post("/v1/placements?wait=0", json=large(request_body))
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:placer:problem:not-kept")


def test_what_a_full_disk_left_unwritten_is_solved_again_after_a_kill(tmp_path, request_body):
    # The answer was in memory alone; its job is still in the file.
    store = Store(str(tmp_path / "p.db"), keep=10)
    store.accept(Accepted("a", "", "throughput", 1.0, b"{}"))
    fill(store)
    with pytest.raises(StoreError, match="full"):
        store.put("a", Answer(b"x" * 200_000, True, "1"))
    store.close()  # writes nothing more
    again = Store(str(tmp_path / "p.db"), keep=10)
    assert (again.get("a"), [job.id for job in accepted_jobs(again)]) == (None, ["a"])
    again.close()


@pytest.mark.integration
def test_while_postgres_is_away_requests_are_503_and_after_it_what_was_accepted_is_answered(
    own_postgres, serve, solvers, request_body, wait_until, monkeypatch, tmp_path
):
    monkeypatch.setattr(write_retries, "RETRY_S", 0.1)
    client = serve(solvers.noted, database=own_postgres.new_database(), queue=5, lease_s=1)
    body = request_body()
    body["profile"]["model"] = str(tmp_path / "notes")
    where = client.post("/v1/placements?wait=0", json=body).headers["Location"]
    own_postgres.kill()

    away = client.post("/v1/placements?wait=0", json=request_body(seed=1))
    assert (away.status_code, away.json()["type"]) == (503, "urn:placer:problem:store-away")
    assert away.headers["Retry-After"] == "2"
    wait_until(lambda: client.get("/readyz").status_code == 503)
    assert_says_nothing_of_the_store(client, "127.0.0.1", str(own_postgres.port), "placer@")
    assert client.get("/healthz").status_code == 200

    own_postgres.start()
    wait_until(lambda: client.get("/readyz").status_code == 200)
    reply = client.get(where, params={"wait": 30})
    assert (reply.status_code, reply.json()["status"]) == (200, "optimal")
    wait_until(lambda: client.app.state.service.store.unwritten == 0)
    assert client.post("/v1/placements?wait=30", json={**body, "seed": 1}).status_code == 200


def assert_says_nothing_of_the_store(client, *words):
    """Check that no response without a key reveals the database's address."""
    for path in ("/", "/healthz", "/readyz", "/openapi.json", "/page/main.js", "/v1/placements"):
        reply = client.get(path)
        told = f"{reply.text} {dict(reply.headers)}"
        assert not [
            word
            for word in words
            if word in told and path not in ("/openapi.json", "/page/main.js")
        ], told


def test_callers_without_a_key_are_not_told_where_the_store_is(
    serve, tmp_path, wait_until, monkeypatch, service_log
):
    key_file = tmp_path / "keys"
    key_file.write_text(make("someone")[1])
    database = str(tmp_path / "secret-folder" / "p.db")
    client = serve(database=database, keys_file=str(key_file))

    def away(*_):
        raise StoreError(f"database {database!r} cannot be used: unable to open database file")

    monkeypatch.setattr(client.app.state.service.store.database, "read", away)
    wait_until(lambda: client.get("/readyz").status_code == 503)
    assert (
        client.get("/readyz").json()["detail"]
        == "the store cannot be used at the moment; see the service's log"
    )
    assert_says_nothing_of_the_store(client, "secret-folder", "p.db")
    assert "secret-folder" in service_log.text  # the operator is told


def test_callers_without_a_key_are_not_told_what_the_system_says(monkeypatch, service_log):
    def broken(*_, **__):
        raise OSError(2, "No such file or directory", "/opt/secret-folder/python")

    monkeypatch.setattr("placer_server.app.Worker.run", broken)
    app = create_app(Settings(database=":memory:"))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        reply = client.get("/readyz")
        while "first worker" in reply.text:
            reply = client.get("/readyz")
    assert (reply.status_code, "secret-folder" in reply.text) == (503, False)
    assert "secret-folder" in service_log.text


@pytest.mark.integration
def test_an_answer_that_was_found_while_postgres_was_away_is_written_when_it_is_back(
    own_postgres, serve, solvers, request_body, wait_until, monkeypatch
):
    monkeypatch.setattr(write_retries, "RETRY_S", 0.1)
    url = own_postgres.new_database()
    client = serve(solvers.until_stopped, database=url)
    where = client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: client.get(where).json()["incumbent"] is not None)
    own_postgres.kill()
    reply = client.delete(where)
    assert reply.json()["objective_value"] == 7.0
    own_postgres.start()
    wait_until(lambda: client.app.state.service.store.unwritten == 0)
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar_one() == 0
        assert (
            connection.exec_driver_sql("SELECT placement FROM placements").scalar_one()
            == reply.content
        )
    engine.dispose()


@pytest.mark.integration
def test_the_process_ends_in_order_while_postgres_is_away(
    own_postgres, serve, solvers, request_body
):
    client = serve(solvers.quick, database=own_postgres.new_database())
    assert client.post("/v1/placements?wait=30", json=request_body()).status_code == 200
    own_postgres.kill()  # the fixture closes the client, and with it the service
