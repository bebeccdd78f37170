from __future__ import annotations

from placer_server.jobs.job import Job
from placer_server.jobs.queue import FairQueue


def queue_of(*names):
    queue = FairQueue()
    for name in names:
        queue.add(Job(name, client=name[0]))
    return queue


def drain(queue, running=()):
    names = []
    while (job := queue.pop(running)) is not None:
        names.append(job.id)
    return names


def test_clients_take_turns_and_each_is_served_in_order():
    assert drain(queue_of("a1", "a2", "a3", "b1", "c1")) == ["a1", "b1", "c1", "a2", "a3"]


def test_a_client_who_was_just_served_waits_for_the_others():
    queue = queue_of("a1", "a2", "b1")
    assert queue.pop(()).id == "a1"
    queue.add(Job("c1", client="c"))
    assert drain(queue) == ["b1", "a2", "c1"]


def test_a_job_whose_id_runs_waits_and_holds_nobody_up():
    queue = queue_of("a1", "a2", "b1")
    assert drain(queue, running={"a1"}) == ["a2", "b1"]
    assert len(queue) == 1


def test_a_job_that_was_removed_is_not_served():
    queue = queue_of("a1", "b1")
    queue.remove(queue.get("a1"))
    assert (drain(queue), queue.held_by("a")) == (["b1"], 0)


def test_a_client_fills_only_its_share_of_the_queue(serve, solvers, request_body):
    client = serve(solvers.until_stopped, queue=4, client_share=0.5)
    replies = [
        client.post("/v1/placements?wait=0", json=request_body(seed=seed)) for seed in range(4)
    ]
    assert [reply.status_code for reply in replies] == [202, 202, 202, 429]
    assert "PLACER_CLIENT_SHARE" in replies[3].json()["detail"]
