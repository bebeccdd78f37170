from __future__ import annotations

import itertools
import json

import pytest

from placer.errors import InputError
from placer.schema import Placement, PlacementRequest, Replica
from placer.solver.check import check
from placer.solver.solve import solve
from placer_server.judge.evaluation import compare, evaluate
from placer_server.openapi import examples

EVALUATE = "/v1/placements:evaluate"
COMPARE = "/v1/placements:compare"
EVEN = {"embed": "cuda:0", "block.0": "cuda:0", "block.1": "cuda:1", "head": "cuda:1"}


def example(name="throughput", **changes):
    return PlacementRequest.model_validate({**examples.requests()[name]["value"], **changes})


def every_map(request):
    names = [layer.name for layer in request.profile.layers]
    for choice in itertools.product([device.name for device in request.devices], repeat=len(names)):
        yield dict(zip(names, choice, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": "latency"},
        {"objective": "memory"},
        {"objective": "step", "schedule": "auto", "chunks": 6},
        {"objective": "step", "schedule": "1f1b", "chunks": 6},
        {"training": False},
        {"transfers": "overlapped"},
    ],
    ids=str,
)
def test_the_best_of_all_valid_maps_is_the_solvers_optimum(changes):
    request = example(**changes)
    values = [
        found.objective_value
        for where in every_map(request)
        if (found := evaluate(request, where)).valid
    ]
    assert min(values) == pytest.approx(solve(request).objective_value)


def test_a_map_is_valid_exactly_if_the_independent_referee_takes_it():
    request = example(
        constraints={"pinned": {"head": "cuda:1"}, "colocated": [["embed", "block.0"]]}
    )
    verdicts, answer = set(), solve(request)
    for where in every_map(request):
        found = evaluate(request, where)
        verdicts.add(found.valid)
        single = found.single_device.objective_value
        placement = answer.model_copy(
            update={
                "layer_devices": where,
                "stages": found.stages,
                # 1F1B: a stage holds a micro-batch for itself and each stage behind it.
                "in_flight": tuple(
                    min(request.chunks, left) for left in range(len(found.stages), 0, -1)
                ),
                "devices": found.devices,
                "objective_value": found.objective_value,
                "speedup": single / found.objective_value,
                "bound": 0.0,
                "gap": 1.0,
                "status": "feasible",
            }
        )
        try:
            check(request, placement)
        except ValueError:
            assert not found.valid
        else:
            assert found.valid
    assert verdicts == {True, False}


FAULTS = {
    "layer-missing": ({}, lambda m: m.pop("head"), "'head' has no device"),
    "layer-unknown": ({}, lambda m: m.update(tail="cuda:0"), "no such layer"),
    "device-unknown": ({}, lambda m: m.update(head="cuda:7"), "'cuda:7' is not a device"),
    "pin-broken": (
        {"constraints": {"pinned": {"head": "cuda:0"}}},
        lambda m: None,
        "pinned to 'cuda:0'",
    ),
    "device-forbidden": (
        {"constraints": {"forbidden": {"*": ["cuda:1"]}}},
        lambda m: None,
        "must not be on",
    ),
    "colocation-broken": (
        {"constraints": {"colocated": [["embed", "head"]]}},
        lambda m: None,
        "share a device",
    ),
    "too-many-devices": (
        {"constraints": {"max_devices": 1}},
        lambda m: None,
        "it uses 2 devices; max_devices is 1",
    ),
    "too-few-devices": (
        {"constraints": {"min_devices": 2}},
        lambda m: m.update(dict.fromkeys(m, "cuda:0")),
        "it uses 1 device; min_devices is 2",
    ),
    "too-many-layers": (
        {"constraints": {"max_layers": 1}},
        lambda m: None,
        "layers; max_layers is 1",
    ),
    "not-contiguous": (
        {},
        lambda m: m.update(head="cuda:0"),
        "form a cycle between 'cuda:0', 'cuda:1'",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_map_is_named(kind):
    changes, spoil, words = FAULTS[kind]
    where = dict(EVEN)
    spoil(where)
    found = evaluate(example(**changes), where)
    assert (found.valid, found.faults[0].kind) == (False, kind)
    assert words in found.faults[0].detail


def test_a_map_that_does_not_fit_says_how_many_bytes_are_short():
    # 0.5 + 1 GiB of weights, as much of gradients, twice as much for Adam: 6 GiB on each of two
    # devices of 2 GiB. A value that is kept, one that is sent, and its gradient take 16 MiB each.
    found = evaluate(example("infeasible"), EVEN)
    assert [fault.kind for fault in found.faults] == ["out-of-memory"] * 2
    assert found.faults[0].missing_bytes == 4 * 2**30 + 3 * 2**24


def test_placements_with_replicas_are_no_maps_to_compare():
    request = example()
    first = request.devices[0].name
    where = {layer.name: first for layer in request.profile.layers}
    shared = tuple(Replica(device=device.name, samples=4) for device in request.devices[:2])
    placement = Placement(
        status="feasible", objective="throughput", layer_devices=where, replicas={first: shared}
    )
    with pytest.raises(InputError, match="placement p has replicas"):
        compare(request, {"p": where, "mine": where}, {"p": placement})


def test_a_map_over_a_missing_link_is_named_and_has_no_value():
    back = {"source": "cuda:1", "target": "cuda:0", "bandwidth_bytes_per_s": 1e9}
    request = example(
        cluster={"devices": [device.model_dump() for device in example().devices], "links": [back]}
    )
    found = evaluate(request, EVEN)
    assert {fault.kind for fault in found.faults} == {"link-missing"}
    assert found.objective_value is None


def test_maps_side_by_side_name_the_best_and_the_layers_that_differ():
    found = compare(example(), {"even": EVEN, "uneven": examples.own_map()})
    assert found.best == "even"
    assert [(move.layer, move.devices) for move in found.moves] == [
        ("block.1", ("cuda:1", "cuda:0"))
    ]


@pytest.mark.parametrize(
    ("path", "made"), [(EVALUATE, examples.evaluations), (COMPARE, examples.comparisons)]
)
def test_each_example_of_the_openapi_document_is_judged(serve, path, made):
    client = serve()
    for example in made().values():
        reply = client.post(path, json=example["value"])
        assert reply.status_code == 200, reply.text


def test_a_map_is_judged_by_the_question_of_a_past_placement_and_against_its_answer(
    serve, request_body
):
    client = serve(solve)
    placed = client.post("/v1/placements", json=request_body()).json()
    own = client.post(
        f"{EVALUATE}?id={placed['id']}", json={"layer_devices": examples.own_map()}
    ).json()
    assert (own["valid"], own["best_id"], own["best_value"]) == (
        True,
        placed["id"],
        placed["objective_value"],
    )
    assert own["above_best"] == pytest.approx(
        own["objective_value"] / placed["objective_value"] - 1
    )
    same = client.post(
        f"{EVALUATE}?id={placed['id']}", json={"layer_devices": placed["layer_devices"]}
    ).json()
    assert (same["devices"], same["above_best"]) == (placed["devices"], 0.0)


def test_two_past_placements_are_compared_without_a_body(serve, request_body):
    client = serve(solve)
    ids = [
        client.post("/v1/placements", json=request_body(constraints=rules)).json()["id"]
        for rules in ({}, {"pinned": {"embed": "cuda:1"}})
    ]
    found = client.post(f"{COMPARE}?id={ids[0]}&id={ids[1]}").json()
    assert found["names"] == ids
    assert all(evaluation["valid"] for evaluation in found["evaluations"])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (EVALUATE, {"layer_devices": {}, "reqest": {}}, 422, "did you mean 'request'?"),
        (EVALUATE, {"layer_devices": {}}, 422, "?id="),
        (EVALUATE, {"layer_devices": {"a": 5}}, 422, "layer_devices.a"),
        (COMPARE, {}, 422, "no request"),
        (f"{COMPARE}?id={'0' * 32}", {}, 404, "no placement"),
        (f"{EVALUATE}?id=x", {"layer_devices": {}}, 404, "not an id"),
    ],
)
def test_a_body_that_cannot_be_judged_is_a_problem_that_says_why(serve, path, body, status, words):
    reply = serve().post(path, json=body)
    assert (reply.status_code, reply.headers["Content-Type"]) == (
        status,
        "application/problem+json",
    )
    assert words in reply.json()["detail"]


def test_a_hostile_map_is_a_problem_of_at_most_4_kb(serve):
    client = serve()
    for body in (
        b"[" * 100_000,
        b"",
        b"\xff",
        json.dumps({"layer_devices": {"a" * 600_000: "b"}}).encode(),
    ):
        reply = client.post(EVALUATE, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code in (400, 422)
        assert len(reply.content) <= 4096
