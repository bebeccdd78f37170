"""Evaluation of maps, against the solver, the referee, hand-computed loads and brute force."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from commands import chain
from evaluated_maps import EVEN, example

from placer.errors import InputError
from placer.evaluation.evaluate import evaluate, evaluated
from placer.schema import (
    Cluster,
    Device,
    Edge,
    Layer,
    LayerMap,
    Link,
    Placement,
    PlacementRequest,
    Profile,
    SolveOptions,
)
from placer.schema.base import FormatName
from placer.solver.check import check
from placer.solver.solve import solve


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
        if (found := evaluated(request, LayerMap(layer_devices=where))).valid
    ]
    assert min(values) == pytest.approx(solve(request).objective_value)


def test_a_map_is_valid_exactly_if_the_independent_referee_takes_it():
    request = example(
        constraints={"pinned": {"head": "cuda:1"}, "colocated": [["embed", "block.0"]]}
    )
    verdicts, answer = set(), solve(request)
    for where in every_map(request):
        found = evaluated(request, LayerMap(layer_devices=where))
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


def blocks(times_ms: list[float], devices: int, sent_ms: float = 1.1) -> Profile:
    """Return a chain of an embedding, blocks and a head; the last time is the head's."""
    names = ["embed", *(f"layers.{number}" for number in range(len(times_ms) - 2)), "head"]
    places = [
        Device(name=f"cuda:{number}", type="gpu", memory_bytes=2**30) for number in range(devices)
    ]
    return Profile(
        layers=[
            Layer(name=name, forward_ms={"gpu": time}, param_bytes=10)
            for name, time in zip(names, times_ms, strict=True)
        ],
        edges=[Edge(source=a, targets=[b], bytes=10**6) for a, b in itertools.pairwise(names)],
        cluster=Cluster(
            devices=places,
            links=[
                # 1 MB takes 1 ms; the rest is latency
                Link(
                    source=a.name,
                    target=b.name,
                    bandwidth_bytes_per_s=1e9,
                    latency_s=(sent_ms - 1) / 1000,
                )
                for a, b in itertools.permutations(places, 2)
            ],
        ),
    )


def test_a_text_is_judged_by_the_loads_of_its_stages_and_against_the_best_text() -> None:
    found = evaluate(blocks([1, 2, 2, 2, 2, 5], devices=2), "2,2", "vllm")
    # embed and two blocks, and the transfer; two blocks and the head, and the transfer
    assert [load.load_ms for load in found.devices] == pytest.approx([1 + 4 + 1.1, 4 + 5 + 1.1])
    assert (found.valid, found.format) == (True, "vllm")
    assert found.objective_value == pytest.approx(10.1)
    # three blocks on the first device: 1 + 6 + 1.1 there, 2 + 5 + 1.1 on the second
    assert found.best is not None and found.best.export is not None
    assert found.best.export.text == "3,1"
    assert found.best_value == pytest.approx(8.1)
    assert found.best.speedup == pytest.approx(10.1 / 8.1)
    assert found.above_best == pytest.approx(10.1 / 8.1 - 1)


def bottleneck_ms(counts: tuple[int, ...], times_ms: list[float], sent_ms: float) -> float:
    """Return the largest load of stages with these numbers of blocks, by the formula."""
    ends = [1, *itertools.accumulate(counts, initial=1)][1:]
    stages = [times_ms[begin:end] for begin, end in itertools.pairwise(ends)]
    loads = [sum(stage) for stage in stages]
    loads[0] += times_ms[0]
    loads[-1] += times_ms[-1]
    last = len(loads) - 1
    return max(load + sent_ms * ((i > 0) + (i < last)) for i, load in enumerate(loads))


@pytest.mark.parametrize(
    ("times_ms", "sent_ms"),
    [
        ([3.0, 1, 2, 1, 4, 1, 2, 6], 1.1),
        ([0.5, 5, 1, 1, 1, 1, 5, 0.5], 1.5),
        ([1.0, 1, 1, 1, 1, 1, 1, 1], 4.0),
    ],
)
def test_the_best_text_is_the_best_of_all_partitions(times_ms: list[float], sent_ms: float) -> None:
    profile, total = blocks(times_ms, 3, sent_ms), len(times_ms) - 2
    partitions = [
        counts
        for stages in (1, 2, 3)
        for counts in itertools.product(range(1, total + 1), repeat=stages)
        if sum(counts) == total
    ]
    values = {counts: bottleneck_ms(counts, times_ms, sent_ms) for counts in partitions}
    for counts, value in values.items():
        found = evaluate(profile, ",".join(map(str, counts)), "vllm", best=False)
        assert found.objective_value == pytest.approx(value), counts
    best = evaluate(profile, str(total), "vllm").best
    assert best is not None and best.export is not None
    assert best.placement.status == "optimal"
    assert best.placement.objective_value == pytest.approx(min(values.values()))
    counts = tuple(map(int, best.export.text.split(",")))
    assert values[counts] == pytest.approx(min(values.values()))


def test_a_map_is_compared_with_the_best_of_all_placements() -> None:
    profile = chain([3.0, 1.0, 1.0, 1.0])
    where = {"l0": "cuda:0", "l1": "cuda:0", "l2": "cuda:1", "l3": "cuda:1"}
    found = evaluate(profile, where)
    assert found.objective_value == pytest.approx(4.0)
    assert found.best is not None and found.best.export is None
    assert found.best.speedup == pytest.approx(4.0 / 3.0)


def test_a_placement_of_the_same_request_is_compared_without_a_solve() -> None:
    request = PlacementRequest(profile=chain([3.0, 1.0, 1.0, 1.0]))
    slow = Placement(
        status="feasible",
        objective="throughput",
        objective_value=8.0,
        layer_devices=dict.fromkeys(["l0", "l1", "l2", "l3"], "cuda:0"),
    )
    found = evaluate(request, slow, best=slow)
    assert found.objective_value == pytest.approx(6.0)
    assert found.best is not None and found.best.speedup == pytest.approx(6.0 / 8.0)


def test_without_best_nothing_is_solved() -> None:
    found = evaluate(example(), EVEN, best=False)
    assert (found.best, found.best_value) == (None, None)


def test_options_make_the_request_of_a_profile() -> None:
    profile, options = chain([3.0, 1.0]), SolveOptions(objective="latency")
    where = {"l0": "cuda:0", "l1": "cuda:0"}
    assert evaluate(profile, where, options=options).objective_value == pytest.approx(4.0)
    assert evaluate(profile, where, objective="latency").objective == "latency"


@pytest.mark.parametrize("format", get_args(FormatName))
def test_the_best_map_of_every_format_is_evaluated_as_the_solver_predicts(
    format: FormatName,
) -> None:
    """It failed for Piper, whose stages are contiguous without being segments."""
    request = PlacementRequest(profile=blocks([1, 2, 2, 2, 1], devices=2), for_format=format)
    best = solve(request)
    found = evaluate(request.profile, best.export(format).text, format, best=False)
    assert found.valid
    assert found.objective_value == pytest.approx(best.objective_value)


def test_a_map_that_cuts_a_block_is_invalid_for_a_format_of_whole_blocks() -> None:
    profile = blocks([1, 2, 2, 2, 2, 5], devices=2)
    layers = [
        layer.model_copy(update={"name": f"{layer.name}.part"}) for layer in profile.layers[1:2]
    ]
    edges = [Edge(source="layers.0", targets=["layers.0.part"], bytes=8)]
    profile = profile.model_copy(
        update={
            "layers": (*profile.layers[:2], *layers, *profile.layers[2:]),
            "edges": (*profile.edges, *edges),
        }
    )
    where = {layer.name: "cuda:1" for layer in profile.layers}
    where |= {"embed": "cuda:0", "layers.0": "cuda:0"}
    assert evaluate(profile, where, best=False).valid
    found = evaluate(profile, where, "vllm", best=False)
    assert [fault.kind for fault in found.faults] == ["colocation-broken"]


def test_a_map_is_invalid_although_no_placement_is_possible() -> None:
    found = evaluate(example("infeasible"), EVEN)
    assert (found.valid, found.best_value) == (False, None)
    assert found.best is not None and found.best.placement.status == "infeasible"
    assert found.best.speedup is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (chain([1.0]), Placement(status="unknown", objective="throughput")),
            "the placement is unknown: it has no map",
        ),
        ((chain([1.0]), "1,1"), "no format is given; name its format"),
        ((chain([1.0]), "1,1", "vlm"), "did you mean 'vllm'?"),
        ((blocks([1, 2, 3, 1], 2), "2,1", "vllm"), "states 3 blocks in total"),
        ((chain([1.0]), ["cuda:0"]), "layer_devices is a list"),
        ((chain([1.0]), {"l0": 0}), "'l0': 0"),
        (({}, {"l0": "cuda:0"}), "request is a dict"),
        (([], {"l0": "cuda:0"}), "the list of profiles is empty"),
    ],
    ids=str,
)
def test_what_cannot_be_evaluated_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        evaluate(*arguments)


def test_options_of_a_whole_request_are_refused() -> None:
    with pytest.raises(InputError, match="chunks is given together with a request"):
        evaluate(example(), EVEN, chunks=4)


def test_two_different_formats_are_refused() -> None:
    request = PlacementRequest(profile=blocks([1, 2, 2, 1], 2), for_format="megatron")
    with pytest.raises(InputError, match=r"format is 'vllm', and for_format .* 'megatron'"):
        evaluate(request, "1,1", "vllm")
