"""Several services on one database: each job is solved once, also after a service is killed.

On one SQLite file a job that a killed service had accepted stayed unanswered while another service
had the file open.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from accepted import accepted_jobs

import placer
from placer.schema import PlacementRequest
from placer_server.openapi import examples
from placer_server.store import database as database_module
from placer_server.store.database import StoreError, open_database
from placer_server.store.replicas import Replicas
from placer_server.store.store import Accepted, Answer, Store, StoredQuestion


def job(key, **fields):
    return Accepted(key, "me", "throughput", 1.0, b"{}", **fields)


@pytest.fixture
def replica(database):
    """Return ``replica(name)``: a store, and its replica's view of it."""
    stores = []

    def make(name, lease_s=60.0):
        stores.append(Store(database, keep=10, owner=name))
        return stores[-1], Replicas(stores[-1].database, name, lease_s)

    yield make
    for store in stores:
        store.close()


def look(view, room=0, watched=(), progress=None):
    return view.poll(progress or {}, watched, room)


def test_a_request_accepted_by_one_replica_is_not_accepted_again_by_another(replica):
    (a, _), (b, _) = replica("a"), replica("b")
    assert (a.accept(job("x")), b.accept(job("x"))) == (True, False)


def test_what_waits_at_one_replica_is_taken_by_another_that_has_room(replica):
    (a, at_a), (_, at_b) = replica("a"), replica("b")
    for key in "xyz":
        a.accept(job(key))
    look(at_a)
    assert [left.id for left in look(at_b, room=2).taken] == ["x", "y"]
    assert at_a.begin("x", 1) == "taken"
    assert at_a.begin("z", 1) == "mine"


def test_what_a_living_replica_solves_is_not_taken(replica):
    (a, at_a), (_, at_b) = replica("a"), replica("b")
    look(at_a)
    a.accept(job("x"))
    at_a.begin("x", 1)
    assert look(at_b, room=5).taken == []


def test_what_a_dead_replica_was_solving_is_taken_with_its_starts(replica):
    (a, at_a), (_, at_b) = replica("a"), replica("b", lease_s=0.2)
    look(at_a)
    a.accept(job("x"))
    at_a.begin("x", 2)
    assert look(at_b, room=5).taken == []
    time.sleep(0.3)
    look(at_b)  # finds it dead
    assert look(at_b, room=5).taken == [job("x", starts=2)]


def test_a_replica_that_is_alone_writes_nothing_while_nothing_happens(replica, tmp_path):
    (a, at_a) = replica("a")
    look(at_a)
    a.accept(job("x"))
    at_a.begin("x", 1)
    before = changes(a)
    for bound in range(20):
        assert not look(at_a, room=3, progress={"x": (7.0, float(bound))}).progress_written
    assert changes(a) == before
    _, at_b = replica("b")
    look(at_b)
    assert look(at_a, progress={"x": (7.0, 3.0)}).progress_written
    assert look(at_b, watched=["x"]).seen["x"].bound == 3.0


def changes(store):
    """Return how often the tables of replicas and jobs were written.

    For SQLite, the size of the write-ahead log.
    """
    if store.database.dialect == "sqlite":
        return store.database.read(lambda connection: os.stat(store.database.name + "-wal").st_size)
    query = sa.text("SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables")
    flush = sa.text("SELECT pg_stat_force_next_flush()")
    store.database.read(lambda connection: connection.execute(flush))
    return store.database.read(lambda connection: connection.scalar(query))


def test_its_own_job_whose_end_was_not_written_is_accepted_again(replica):
    # It was taken for a job of another replica, and nobody solved it.
    (a, _), (b, _) = replica("a"), replica("b")
    assert (a.accept(job("x")), a.accept(job("x")), b.accept(job("x"))) == (True, True, False)


def test_a_clock_that_jumps_kills_no_replica(replica, monkeypatch):
    (a, at_a), (_, at_b) = replica("a"), replica("b")
    look(at_a)
    a.accept(job("x"))
    at_a.begin("x", 1)
    look(at_b)
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert look(at_b, room=5).taken == []


def test_a_replica_that_leaves_gives_its_jobs_up_at_once(replica):
    (a, at_a), (_, at_b) = replica("a"), replica("b")
    look(at_a)
    a.accept(job("x"))
    at_a.begin("x", 1)
    at_a.leave()
    assert look(at_b, room=5).taken == [job("x")]


def test_replicas_that_reach_for_the_same_jobs_at_once_get_each_once(replica):
    store, _ = replica("first")
    keys = [f"{number:03}" for number in range(60)]
    for key in keys:
        store.accept(job(key))
    views = [replica(f"replica {number}")[1] for number in range(4)]

    def grab(view):
        begun = []
        while taken := look(view, room=2).taken:
            begun += [left.id for left in taken if view.begin(left.id, 1) == "mine"]
        return begun

    with ThreadPoolExecutor(4) as pool:
        begun = [key for found in pool.map(grab, views) for key in found]
    assert sorted(begun) == keys


def test_what_another_replica_answered_meanwhile_is_not_solved_again(replica):
    (a, _), (b, at_b) = replica("a"), replica("b")
    a.put("x", Answer(b"{}", True, placer.__version__))
    b.accept(job("x"))
    assert (at_b.begin("x", 1), accepted_jobs(b)) == ("answered", [])


def test_progress_and_the_wish_to_stop_reach_the_other_replica(replica):
    (a, at_a), (_, at_b) = replica("a"), replica("b")
    a.accept(job("x"))
    at_a.begin("x", 1)
    look(at_a, progress={"x": (7.0, 3.0)})
    seen = look(at_b, watched=["x", "y"]).seen
    assert list(seen) == ["x"] and (seen["x"].running, seen["x"].incumbent, seen["x"].bound) == (
        True,
        7.0,
        3.0,
    )
    at_b.request_stop("x")
    assert list(look(at_a).stops) == ["x"]


def test_a_model_whose_name_has_a_nul_is_listed(replica):
    store, _ = replica("a")
    store.put("x", Answer(b"{}", True, "1"), rb'{"model": "a\u0000b"}')
    assert [row["id"] for row in store.search("A", {}, 2**62, 5)] == ["x"]


def test_a_text_with_a_nul_is_searched_for_alike_in_both_databases(replica):
    # PostgreSQL refused the text, and the service answered 503; SQLite found every name.
    store, _ = replica("a")
    store.put("x", Answer(b"{}", True, "1"), rb'{"model": "a\u0000b"}')
    store.put("y", Answer(b"{}", True, "1"), rb'{"model": "ab"}')
    assert [row["id"] for row in store.search("a\0", {}, 2**62, 5)] == ["x"]


@pytest.mark.parametrize(
    ("text", "filters", "found"),
    [("NET%", {}, "b"), ("", {"status": "optimal"}, "c"), ("", {}, "cba")],
)
def test_placements_are_searched_alike_in_both_databases(database, text, filters, found):
    store = Store(database, keep=10)
    for key, model, status in [
        ("a", "Net", "feasible"),
        ("b", "net%x", "feasible"),
        ("c", "Other", "optimal"),
    ]:
        summary = b'{"model": "%s", "status": "%s"}' % (model.encode(), status.encode())
        store.put(key, Answer(b"{}", True, "1"), summary)
    assert "".join(row["id"] for row in store.search(text, filters, 2**62, 5)) == found
    store.close()


def test_a_profile_goes_with_the_last_of_its_placements(database):
    store = Store(database, keep=2)
    for key, profile in [("a", "p"), ("b", "p"), ("c", "q"), ("d", "q")]:
        store.put(key, Answer(b"{}", True, "1"), question=StoredQuestion(profile, b"{}", b"{}"))
        if key == "c":
            assert store.profile("p") is not None
    assert (store.profile("p"), store.profile("q")) == (None, b"{}")
    store.close()


@pytest.mark.integration
def test_a_password_is_in_no_error(postgres):
    url = postgres.replace("placer@", "placer:hunter2@").rpartition("/")[0] + "/nowhere"
    with pytest.raises(StoreError) as caught:
        open_database(url)
    assert "hunter2" not in str(caught.value) and "nowhere" in str(caught.value)


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def key_of(body):
    return PlacementRequest.model_validate(body).content_hash()


def noted(request_body, tmp_path, seed):
    body = request_body(seed=seed)
    body["profile"]["model"] = str(tmp_path / "notes")
    return body


def test_two_services_solve_each_request_once_whichever_is_asked(
    serve, solvers, request_body, database, tmp_path
):
    services = [
        serve(solvers.noted, database=database, queue=100, client_share=1, lease_s=5)
        for _ in range(2)
    ]
    bodies = [noted(request_body, tmp_path, seed) for seed in range(6)]
    for index, body in enumerate(bodies * 2):
        assert services[index % 2].post("/v1/placements?wait=0", json=body).status_code in (
            200,
            202,
        )
        assert services[(index + 1) % 2].post("/v1/placements?wait=0", json=body).status_code in (
            200,
            202,
        )
    replies = [
        [one.get(f"/v1/placements/{key_of(body)}?wait=60") for one in services] for body in bodies
    ]
    assert all(reply.json()["status"] == "optimal" for pair in replies for reply in pair)
    assert all(first.content == second.content for first, second in replies)
    assert Counter((tmp_path / "notes").read_text().split()) == {str(seed): 1 for seed in range(6)}


def test_a_solve_can_be_watched_and_stopped_at_another_replica(
    serve, solvers, request_body, database, wait_until
):
    first = serve(solvers.until_stopped, database=database)
    second = serve(solvers.until_stopped, database=database)
    where = first.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    wait_until(lambda: second.get(where).json()["incumbent"] == 7.0)
    assert second.delete(where).json()["objective_value"] == 7.0
    assert first.get(where, params={"wait": 30}).json()["objective_value"] == 7.0
    assert '"objective_value":7.0' in second.get(f"{where}/events").text


def test_a_failure_is_told_by_the_other_replica_as_well(
    serve, solvers, request_body, database, capfd
):
    first, second = (serve(solvers.failing, database=database) for _ in range(2))
    told = first.post("/v1/placements?wait=30", json=request_body())
    reply = second.get(f"/v1/placements/{key_of(request_body())}")
    assert (told.status_code, reply.status_code, reply.json()["detail"]) == (
        500,
        500,
        told.json()["detail"],
    )


def test_a_killed_replicas_jobs_are_taken_over_and_answered(start, request_body, database):
    first = start("until_stopped", database=database, queue=10, client_share=1, lease_s=1)
    bodies = [request_body(seed=seed) for seed in range(3)]
    for body in bodies:
        assert first.client.post("/v1/placements?wait=0", json=body).status_code == 202
    second = start("quick", database=database, queue=10, client_share=1, lease_s=1, workers=2)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    replies = [second.client.get(f"/v1/placements/{key_of(body)}?wait=60") for body in bodies]
    assert [reply.json()["status"] for reply in replies] == ["optimal"] * 3


def test_a_replica_that_is_stopped_hands_its_jobs_to_the_other_at_once(
    start, request_body, database
):
    first = start("until_stopped", database=database, lease_s=3600)
    assert first.client.post("/v1/placements?wait=0", json=request_body()).status_code == 202
    assert first.end(signal.SIGTERM) == 0
    second = start("quick", database=database, lease_s=3600)
    reply = second.client.get(f"/v1/placements/{key_of(request_body())}?wait=60")
    assert reply.json()["status"] == "optimal"


def test_a_start_that_is_alone_on_a_file_waits_for_no_lease(start, request_body):
    first = start("until_stopped", lease_s=3600)
    assert first.client.post("/v1/placements?wait=0", json=request_body()).status_code == 202
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    again = start("quick", lease_s=3600)
    assert (
        again.client.get(f"/v1/placements/{key_of(request_body())}?wait=30").json()["status"]
        == "optimal"
    )


def test_a_start_leaves_the_jobs_of_every_living_service_alone(start, request_body):
    """The first of three services on one file is killed before the third starts.

    The killed service's lock says nothing about the second service.
    """
    first, second = (start("until_stopped", lease_s=3600) for _ in range(2))
    where = second.client.post("/v1/placements?wait=0", json=request_body()).headers["Location"]
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    third = start("quick", lease_s=3600)
    time.sleep(1.5)  # three looks
    assert third.client.get(where).json()["status"] == "running"
    assert second.client.delete(where).json()["objective_value"] == 7.0


@pytest.mark.integration
def test_a_graph_that_a_killed_service_accepted_is_measured_by_the_other(start, database):
    body = examples.graphs()["one layer"]["value"]
    second = start("quick", database=database, lease_s=1)
    first = start("quick", database=database, lease_s=1)
    where = first.client.post("/v1/profiles?wait=0", json=body).headers["Location"]
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: second.client.get(where, params={"wait": 60}).status_code == 200, seconds=60)


def test_a_graph_is_taken_by_one_service_of_its_node_alone(replica):
    (a, at_a), (b, at_b) = replica("a"), replica("b", lease_s=0.2)
    look(at_a)
    a.accept_graph("k", "node", b"body")
    assert (a.take_graphs("node"), b.take_graphs("node"), b.take_graphs("other")) == ([], [], [])
    look(at_b)
    time.sleep(0.3)
    look(at_b)  # finds it dead
    assert (b.take_graphs("node"), b.take_graphs("node")) == ([("k", b"body")], [])


def test_a_file_that_another_program_locks_for_itself_is_told(tmp_path, monkeypatch):
    """A version of Placer that shares no file locks it; a start waited for it without a message."""
    monkeypatch.setattr(database_module, "CONNECT_S", 0.1)
    with open(tmp_path / "p.db.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            StoreError, match=r"p.db.lock' is locked by a service that does not share its database"
        ):
            open_database(str(tmp_path / "p.db"))
