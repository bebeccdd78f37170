from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Skips

from placer.capture.capture import capture_graph
from placer.capture.layers import Layer, LayerGraph, Value
from placer.distributed.stage_line import Line, line


def graph_of(reads: list[list[int]]) -> LayerGraph:
    """Layer ``i`` makes value ``vi``; it reads the values of the layers named, or the input."""
    names = [f"l{index}" for index in range(len(reads))]
    layers = [
        Layer(
            name,
            (name,),
            "Linear",
            (),
            (),
            tuple(f"v{r}" for r in read) or ("x",),
            (f"v{index}",),
            len,
            "",
        )  # type: ignore[arg-type]
        for index, (name, read) in enumerate(zip(names, reads, strict=True))
    ]
    values = {
        name: Value(name, (2,), torch.float32, 8, 0, True, None)
        for name in ["x", *(f"v{i}" for i in range(len(reads)))]
    }
    return LayerGraph(layers, values, ("x",), (f"v{len(reads) - 1}", "x"), (), {}, True, 2, "fine")


def run(cut: Line, graph: LayerGraph) -> set[int]:
    """What a line does, value by value; the layers that ran."""
    ran: set[int] = set()
    sent: tuple[str, ...] = graph.inputs
    for stage in cut.stages:
        assert stage.arrives == sent
        here = set(stage.arrives)
        for index in stage.layers:
            assert here.issuperset(graph.layers[index].reads)
            here.update(graph.layers[index].writes)
            assert index not in ran
            ran.add(index)
        assert here.issuperset(stage.leaves)
        sent = stage.leaves
    assert sent == graph.outputs
    return ran


@st.composite
def graphs_with_places(draw: st.DrawFn) -> tuple[LayerGraph, list[str]]:
    count = draw(st.integers(1, 9))
    reads = [
        sorted(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else []
        for index in range(count)
    ]
    return graph_of(reads), [f"cuda:{draw(st.integers(0, 3))}" for _ in range(count)]


@settings(max_examples=300, deadline=None)
@given(graphs_with_places())
def test_every_layer_runs_once_on_its_device_with_all_that_it_reads(
    case: tuple[LayerGraph, list[str]],
) -> None:
    graph, places = case
    cut = line(graph, places)
    assert run(cut, graph) == set(range(len(places)))
    assert all(places[index] == stage.device for stage in cut.stages for index in stage.layers)


@settings(max_examples=300, deadline=None)
@given(graphs_with_places())
def test_stages_go_round_the_devices_in_turn(case: tuple[LayerGraph, list[str]]) -> None:
    graph, places = case
    cut = line(graph, places)
    assert set(cut.devices) == set(places) and len(cut.devices) == len(set(places))
    assert [stage.device for stage in cut.stages] == list(cut.devices) * cut.rounds


@settings(max_examples=300, deadline=None)
@given(graphs_with_places())
def test_a_value_crosses_no_border_that_it_need_not(case: tuple[LayerGraph, list[str]]) -> None:
    graph, places = case
    cut = line(graph, places)
    for border in range(1, len(cut.stages)):
        before = {
            name
            for stage in cut.stages[:border]
            for i in stage.layers
            for name in graph.layers[i].writes
        }
        later = {
            name
            for stage in cut.stages[border:]
            for i in stage.layers
            for name in graph.layers[i].reads
        }
        needed = (before | set(graph.inputs)) & (later | set(graph.outputs))
        assert set(cut.stages[border].arrives) == needed


def test_a_skip_passes_through_the_stage_between() -> None:
    cut = line(graph_of([[], [0], [0, 1]]), ["a", "b", "c"])
    assert [stage.leaves for stage in cut.stages] == [("x", "v0"), ("x", "v0", "v1"), ("v2", "x")]


def test_branches_that_take_turns_become_one_stage_a_device() -> None:
    cut = line(graph_of([[], [0], [0], [1, 2]]), ["a", "b", "a", "b"])
    assert [(stage.device, stage.layers) for stage in cut.stages] == [("a", (0, 2)), ("b", (1, 3))]
    assert cut.reordered


def test_a_device_that_is_come_back_to_makes_another_round() -> None:
    cut = line(graph_of([[], [0], [1], [2]]), ["a", "b", "a", "c"])
    assert [(stage.device, stage.layers) for stage in cut.stages] == [
        ("a", (0,)), ("b", (1,)), ("c", ()), ("a", (2,)), ("b", ()), ("c", (3,)),
    ]  # fmt: skip
    assert not cut.reordered


def test_a_captured_model_is_cut_like_any_graph() -> None:
    graph = capture_graph(Skips(), torch.randn(2, 5))
    places = [f"cuda:{index % 3}" for index in range(len(graph.layers))]
    assert run(line(graph, places), graph) == set(range(len(places)))


@pytest.mark.parametrize("count", [1, 5])
def test_one_device_is_one_stage(count: int) -> None:
    cut = line(graph_of([[index - 1] if index else [] for index in range(count)]), ["a"] * count)
    assert len(cut.stages) == cut.rounds == 1
