"""Piper's result: written, read, and solved for.

The grammar was also compared with Piper itself: ``to_json`` of a ``Result`` (algo.cpp at commit
d7fc8cf9), compiled and called once outside this repository, writes the fields that these tests
have, and ``TMPCids`` as pairs.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from block_plans import GPUS, block_layers
from enumeration import Enumeration
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples, small_requests

import placer
from placer.errors import InputError, PlacementError
from placer.exports.formats.piper import Piper
from placer.exports.plan import Plan
from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile

FORMAT = Piper()


@examples(300)
@given(data=st.data())
def test_an_exported_placement_is_read_again(data: st.DataObject) -> None:
    """Stages are sets of nodes in any order."""
    layers = data.draw(block_layers())
    on = data.draw(st.lists(st.sampled_from(GPUS), min_size=len(layers), max_size=len(layers)))
    where = dict(zip(layers, on, strict=True))
    stages = data.draw(st.permutations(list(dict.fromkeys(on))))
    plan = Plan(where, {}, stages=stages)
    assert FORMAT.read(FORMAT.export(plan).text, layers, stages) == where


def test_stages_have_nodes_degrees_and_choices() -> None:
    plan = Plan(
        {"a": "x", "b": "y", "c": "x"},
        {"x": ["x", "z"], "y": ["y", "w"]},
        stages=("y", "x"),
        recompute=("x",),
        training=True,
    )
    export = FORMAT.export(plan)
    degrees = {"dataParallelDegree": 2, "tensorParallelDegree": 1}
    assert json.loads(export.text) == {
        "stages": [
            {"nodes": [1], **degrees, "TMPCids": [[1, "vanilla"]]},
            {
                "nodes": [0, 2],
                **degrees,
                "TMPCids": [[0, "activation recomp"], [2, "activation recomp"]],
            },
        ]
    }
    assert export.notes == (
        "Node i is the layer at position i of the placement, from 0.",
        "The ranks of the engine, in order, are the devices y, w, x, z.",
    )
    assert FORMAT.read(export.text, "abc", ["y", "w", "x", "z"]) == plan.layer_devices


def test_what_piper_writes_is_read() -> None:
    """The first line that the compiled ``to_json`` printed."""
    text = (
        '{"stages":[{"TMPCids":[[1,"vanilla"],[0,"vanilla"]],"dataParallelDegree":2,'
        '"nodes":[0,1],"tensorParallelDegree":1}]}'
    )
    assert FORMAT.read(text, "ab", "xy") == {"a": "x", "b": "x"}


def stage(*nodes: Any, **degrees: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), **degrees}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ([], "has no 'stages'"),
        ({"stages": 3}, "are '3'; give a list of objects"),
        ({"stages": [{"nodes": 1}]}, "give a list of objects with nodes"),
        ({"stages": [stage(0, -1)]}, "give a list of objects"),
        ({"stages": [stage(0, 1, dataParallelDegree=0)]}, "give a list of objects"),
        ({"stages": [stage(0, 1, dataParallelDegree=10**30)]}, "give a list of objects"),
        ({"stages": [stage(0, 1, tensorParallelDegree=2)]}, "tensorParallelDegree is 2"),
        ({"stages": [stage(0)]}, "has 1 node, and the model has 2 layers; give each number"),
        ({"stages": [stage(0), stage(0)]}, "give each number from 0 to 1 once"),
        ({"stages": [stage(0, dataParallelDegree=4), stage(1)]}, "has 5 ranks, and there are 3"),
        ({"stages": [stage(0, dataParallelDegree=2), stage(1)]}, "have 2, 1 replicas"),
    ],
)
def test_a_faulty_result_is_named(content: Any, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        FORMAT.read(json.dumps(content), "ab", "xyz")


def test_a_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(InputError, match=r"Piper's result is not JSON: .*'stages', not '{'"):
        FORMAT.read("{", "ab", "xyz")


def branches(**asked: Any) -> PlacementRequest:
    """Return two parallel branches of two layers, whose layers take turns in execution order."""
    names = ["in", "a0", "b0", "a1", "b1", "out"]
    edges = [("in", "a0"), ("in", "b0"), ("a0", "a1"), ("b0", "b1"), ("a1", "out"), ("b1", "out")]
    profile = Profile(
        layers=[
            Layer(name=name, forward_ms={"t": ms}, backward_ms={"t": 0.0}, param_bytes=1)
            for name, ms in zip(names, (1.0, 2.0, 2.0, 2.0, 2.0, 1.0), strict=True)
        ],
        edges=[Edge(source=a, targets=(b,), bytes=0) for a, b in edges],
        training=True,
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=100) for name in "xy"],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e9)
                for a, b in itertools.permutations("xy")
            ],
        ),
    )
    return PlacementRequest(profile=profile, for_format="piper", **asked)


def test_a_stage_need_not_be_a_segment_of_the_execution_order() -> None:
    pins = {"in": "x", "a1": "x", "b0": "y"}
    placement = placer.solve(branches(constraints={"pinned": pins}))
    assert placement.contiguous
    assert "".join(placement.layer_devices.values()) == "xxyxyy"
    stages = json.loads(placement.export("piper").text)["stages"]
    assert [stage["nodes"] for stage in stages] == [[0, 1, 3], [2, 4, 5]]


@examples(160)
@given(request=small_requests(objectives=("throughput",)))
def test_no_contiguous_placement_is_better(request: PlacementRequest) -> None:
    rules = request.constraints.model_copy(update={"contiguous": None})
    request = request.model_copy(update={"constraints": rules, "for_format": "piper"})
    placement = placer.solve(request)
    best = Enumeration(request, contiguous=True).best()
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.objective_value == pytest.approx(best, rel=2e-6)
    names = [layer.name for layer in request.profile.layers]
    read = FORMAT.read(placement.export("piper").text, names, placement.stages)
    assert read == placement.layer_devices


def test_a_placement_whose_values_come_back_to_a_device_is_refused() -> None:
    request = branches(constraints={"pinned": {"in": "x", "a0": "y", "out": "x"}})
    rules = request.constraints.model_copy(update={"contiguous": False})
    free = request.model_copy(update={"constraints": rules, "for_format": None})
    placement = placer.solve(free)
    assert placement.layer_devices and not placement.contiguous
    with pytest.raises(PlacementError, match="gives x both 'in' and, after other devices"):
        placement.export("piper")


def test_values_never_come_back_to_a_stage() -> None:
    pins = {"in": "x", "a0": "y", "out": "x"}
    placement = placer.solve(branches(constraints={"pinned": pins}))
    assert placement.status == "infeasible"
