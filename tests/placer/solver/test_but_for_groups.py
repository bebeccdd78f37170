"""Chains with tied ends: contiguous but for the colocated layers, and quickly proven.

Before, colocation that pulled layers together made the placement free, and the search for the best
of all maps took up to 30 seconds for maps with many changes of device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import monotonic

import networkx
import pytest
from enumeration import Enumeration
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import DrawnRequest, examples, small_requests

import placer
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    TiedParameters,
)
from placer.solver.check import check
from placer.solver.problem import Problem

SETTINGS = examples(200)


def _pulling(request: PlacementRequest) -> set[str]:
    """Return the colocated layers that would pull others onto their device if contiguous."""
    names = [layer.name for layer in request.profile.layers]
    joined = networkx.Graph()
    joined.add_nodes_from(names)
    for group in (*request.profile.colocated, *request.constraints.colocated):
        joined.add_edges_from(pairwise(group))
    node_of = {
        name: min(group) for group in networkx.connected_components(joined) for name in group
    }
    grouped = {
        name for group in networkx.connected_components(joined) if len(group) > 1 for name in group
    }
    graph = networkx.DiGraph()
    graph.add_nodes_from(node_of.values())
    graph.add_edges_from(
        (node_of[e.source], node_of[t]) for e in request.profile.edges for t in e.targets
    )
    found: set[str] = set()
    for component in networkx.strongly_connected_components(graph):
        members = {name for name in names if node_of[name] in component}
        if members - grouped:
            found |= members & grouped
    return found


def _best(request: PlacementRequest, loose: set[str]) -> float | None:
    """Return the smallest objective of maps whose other values never come back to a device."""
    every = Enumeration(request, contiguous=False)
    values = []
    for where in every.maps():
        between = networkx.DiGraph(
            (where[e.source], where[t])
            for e in request.profile.edges
            for t in e.targets
            if where[e.source] != where[t] and not loose & {e.source, t}
        )
        if (
            networkx.is_directed_acyclic_graph(between)
            and (value := every.value(where)) is not None
        ):
            values.append(value)
    return min(values, default=None)


class Grouped(DrawnRequest):
    """A request with colocated layers, whose contiguity is for the solver to choose."""

    def constraints(self):
        chosen = {"contiguous": None, "colocated": self.groups()}
        return super().constraints().model_copy(update=chosen)


@SETTINGS
@given(data=st.data())
def test_no_placement_that_is_contiguous_but_for_groups_is_better(data: st.DataObject) -> None:
    request = data.draw(small_requests(objectives=("throughput",), kind=Grouped))
    assume(Problem.from_request(request).but_for_groups() is not None)
    placement = placer.solve(request)
    check(request, placement)
    best = _best(request, _pulling(request))
    if best is None:  # then free placements are looked for
        best = Enumeration(request, contiguous=False).best()
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal" and not placement.contiguous
    assert placement.objective_value == pytest.approx(best, rel=2e-6)


def _tied_chain(blocks: int, devices: int, training: bool, memory_bytes: int = 2**40) -> Profile:
    """Return blocks of slightly different times between an embedding and a tied head.

    All blocks read one value.
    """

    def layer(name: str, forward_ms: float, size: int) -> Layer:
        passes = {
            "backward_ms": {"t": 2 * forward_ms},
            "grad_bytes": size,
            "saved_bytes": size // 9,
        }
        more = passes if training else {}
        return Layer(
            name=name,
            forward_ms={"t": forward_ms},
            param_bytes=size,
            forward_workspace_bytes=10**6,
            **more,
        )

    row = [layer("embed", 0.3, 10**8)]
    row += [layer(f"block {i}", 1 + (i * 7 % 10) / 500, 5 * 10**7) for i in range(blocks)]
    row += [layer("norm", 0.02, 1000), layer("head", 1.5, 0)]
    edges = [
        Edge(source=a.name, targets=(b.name,), bytes=2**24, gradient_bytes=2**24 * training)
        for a, b in pairwise(row)
    ]
    edges.append(Edge(source="angles", targets=tuple(one.name for one in row[1:-2]), bytes=2**16))
    names = [f"d{i}" for i in range(devices)]
    return Profile(
        layers=[row[0], layer("angles", 0.01, 0), *row[1:]],
        edges=edges,
        colocated=[("embed", "head")],
        tied=[
            TiedParameters(
                layers=("embed", "head"), param_bytes=10**8, gradient_bytes=10**8 if training else 0
            )
        ],
        training=training,
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in names],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=2e11, latency_s=2e-5)
                for a in names
                for b in names
                if a != b
            ],
        ),
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("blocks", "devices"), [(4, 2), (32, 4), (64, 8)])
def test_a_tied_chain_is_proven_as_fast_as_a_chain(
    blocks: int, devices: int, training: bool, split: bool
) -> None:
    profile = _tied_chain(blocks, devices, training)
    request = PlacementRequest(
        profile=profile.untied() if split else profile, chunks=8 if training else 1
    )
    began = monotonic()
    placement = placer.solve(request)
    took_s = monotonic() - began
    assert placement.status == "optimal"
    line = list(placement.layer_devices.values())
    changes = sum(a != b for a, b in pairwise(line))
    # tied layers that share a device cost one change more
    assert changes == devices - split
    # about 0.2 s where nothing else runs; a free search takes all of its 30 s for some of these
    assert took_s < 5


def test_free_placements_are_looked_for_where_they_are_asked_for() -> None:
    profile = _tied_chain(4, 2, training=False)
    asked = PlacementRequest(profile=profile, constraints=Constraints(contiguous=False))
    free, pipeline = placer.solve(asked), placer.solve(PlacementRequest(profile=profile))
    assert free.objective_value is not None and pipeline.objective_value is not None
    assert free.objective_value < pipeline.objective_value < 1.05 * free.objective_value


def test_a_free_placement_is_found_where_no_other_fits() -> None:
    """The two ends of a chain fit beside its middle alone."""
    sizes = {"a": 1, "b": 5, "c": 2, "d": 5, "e": 1}
    profile = Profile(
        layers=[
            Layer(name=name, forward_ms={"t": 1.0}, param_bytes=size)
            for name, size in sizes.items()
        ],
        edges=[Edge(source=a, targets=(b,), bytes=0) for a, b in pairwise(sizes)],
        colocated=[("a", "e"), ("b", "d")],
        cluster=Cluster(
            devices=[
                Device(name=name, type="t", memory_bytes=size)
                for name, size in (("x", 4), ("y", 10))
            ],
            links=[Link(source=a, target=b, bandwidth_bytes_per_s=1e9) for a, b in ("xy", "yx")],
        ),
    )
    placement = placer.solve(PlacementRequest(profile=profile))
    assert placement.status == "optimal" and placement.layer_devices == dict(
        zip("abcde", "xyxyx", strict=True)
    )


def _row(times_ms: Sequence[float], **rules: object) -> PlacementRequest:
    """Return layers of 1 byte in a row, for two devices."""
    names = [f"l{i}" for i, _ in enumerate(times_ms)]
    profile = Profile(
        layers=[
            Layer(name=name, forward_ms={"t": time_ms}, param_bytes=1)
            for name, time_ms in zip(names, times_ms, strict=True)
        ],
        edges=[Edge(source=a, targets=(b,), bytes=0) for a, b in pairwise(names)],
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=10) for name in "xy"],
            links=[Link(source=a, target=b, bandwidth_bytes_per_s=1e9) for a, b in ("xy", "yx")],
        ),
    )
    return PlacementRequest(profile=profile, constraints=Constraints(**rules))


@pytest.mark.parametrize("objective", ["throughput", "memory", "latency"])
def test_layers_pinned_to_one_device_stay_in_one_contiguous_stage(objective: str) -> None:
    """Pins to one device counted as colocation, which ended contiguity without being asked."""
    request = _row([1.0] * 8, pinned={"l0": "x", "l6": "x"}).model_copy(
        update={"objective": objective}
    )
    placement = placer.solve(request)
    assert placement.status == "optimal" and placement.contiguous
    assert {placement.layer_devices[f"l{i}"] for i in range(7)} == {"x"}


def test_pins_never_make_a_placement_better() -> None:
    """The best cut of 2, 3 and 1 ms takes 4 ms; without contiguity, 2 + 1 and 3 take 3 ms."""
    assert placer.solve(_row([2.0, 3.0, 1.0])).objective_value == pytest.approx(4.0)
    pinned = placer.solve(_row([2.0, 3.0, 1.0], pinned={"l0": "x", "l2": "x"}))
    assert pinned.objective_value == pytest.approx(6.0)


def test_pins_that_contradict_contiguity_are_named() -> None:
    pins = {"l0": "x", "l3": "y", "l7": "x"}
    why = placer.solve(_row([1.0] * 8, pinned=pins)).infeasible
    assert why is not None
    assert "kept together by pins and contiguity" in why.reason
    assert set(why.requirements) == {
        "stages are contiguous (unless contiguous=False): values never come back to a device",
        *(f"layer {name!r} is pinned to {device!r}" for name, device in pins.items()),
    }
    assert placer.solve(_row([1.0] * 8, pinned=pins, contiguous=False)).layer_devices
