"""Requests for a format: the best placement that it can express, and reasons if none exists."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest
from enumeration import Enumeration
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import DrawnRequest, examples

import placer
from placer.errors import InputError, PlacementError
from placer.exports.formats import FORMATS, format_named
from placer.exports.restriction import expressible
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

MODELS = (
    ("embed", "h.0", "h.1", "norm"),
    ("h.0.a", "h.0.b", "h.1", "h.2"),
    ("embed", "h.0.a", "angles", "h.0.b", "h.1.a"),
    ("h.0", "h.1", "h.1@1", "h.2", "head"),
    ("h.0.a", "h.0.b+h.1.a", "h.1.b", "h.2"),
)
"""Layers in execution order, with the blocks of the list ``h``."""
UNITS = {
    MODELS[0]: (2, 2),
    MODELS[1]: (2, 1, 1),
    MODELS[2]: (4, 1),
    MODELS[3]: (1, 2, 2),
    MODELS[4]: (3, 1),
}
"""How many layers each unit has, written down by hand."""


class DrawnBlocks(DrawnRequest):
    """A random request for layers that belong to blocks."""

    def __init__(self, random: Random, devices: int, layers: tuple[str, ...], objective: str):
        super().__init__(random, devices, len(layers), (objective,))
        self.layers = list(layers)


@st.composite
def requests(draw: st.DrawFn, objective: str) -> PlacementRequest:
    """Return a request for a format, with any features together."""
    layers = draw(st.sampled_from(MODELS))
    seed = draw(st.integers(0, 2**64 - 1))
    drawn = DrawnBlocks(Random(seed), draw(st.integers(2, 3)), layers, objective)
    while True:
        try:
            request = drawn.request()
            break
        except InputError:
            pass
    rules = request.constraints.model_copy(update={"contiguous": None})
    return request.model_copy(update={"constraints": rules, "for_format": "vllm"})


def units_of(request: PlacementRequest) -> list[tuple[str, ...]]:
    names = tuple(layer.name for layer in request.profile.layers)
    ends = list(itertools.accumulate(UNITS[names]))
    return [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def expressible_maps(request: PlacementRequest) -> Iterator[dict[str, str]]:
    """Yield every map of whole units such that each device has one segment of the order."""
    units = units_of(request)
    names = [device.name for device in request.devices]
    for choice in itertools.product(names, repeat=len(units)):
        runs = [device for device, _ in itertools.groupby(choice)]
        if len(runs) == len(set(runs)):
            yield {
                layer: device for unit, device in zip(units, choice, strict=True) for layer in unit
            }


def without_format(request: PlacementRequest, **changed: Any) -> PlacementRequest:
    """Return the request about the same costs, without a format.

    The engine passes each unit's result to the next unit, so a cut costs a transfer at least, and
    it copies shared parameters.
    """
    units = units_of(request)
    profile = request.profile.untied()
    direct = {
        (index, other)
        for edge in profile.edges
        for target in edge.targets
        for index, unit in enumerate(units)
        for other, readers in enumerate(units)
        if edge.source in unit and target in readers
    }
    empty = [
        Edge(source=units[index][-1], targets=(units[index + 1][0],), bytes=0)
        for index in range(len(units) - 1)
        if (index, index + 1) not in direct
    ]
    profile = profile.model_copy(update={"edges": (*profile.edges, *empty)})
    return request.model_copy(update={"for_format": None, "profile": profile, **changed})


def best_expressible(request: PlacementRequest) -> float | None:
    every = Enumeration(without_format(request), contiguous=True)
    values = (every.value(where) for where in expressible_maps(request))
    return min((value for value in values if value is not None), default=None)


def contradictory(request: PlacementRequest) -> bool:
    """Return whether pins of one unit name several devices."""
    pinned = request.constraints.pinned
    return any(len({pinned[x] for x in unit if x in pinned}) > 1 for unit in units_of(request))


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
@examples(200)
@given(data=st.data())
def test_no_placement_that_the_format_can_express_is_better(
    objective: str, data: st.DataObject
) -> None:
    request = data.draw(requests(objective))
    assume(not contradictory(request))
    placement = placer.solve(request)
    check(request, placement)
    assert placement.id == request.content_hash()
    best = best_expressible(request)
    if best is None:
        assert placement.status == "infeasible" and placement.infeasible is not None
        assert placement.infeasible.reason
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)
    assert placement.layer_devices in list(expressible_maps(request))
    placement.export("vllm")


@pytest.mark.parametrize("objective", ["step", "devices"])
@examples(40)
@given(data=st.data())
def test_no_map_is_better_under_objectives_with_their_own_search(
    objective: str, data: st.DataObject
) -> None:
    """Each map that the format can express, pinned layer by layer, is the only answer."""
    request = data.draw(requests("throughput"))
    assume(not contradictory(request) and not request.constraints.forbidden)
    changed: dict[str, Any] = {"objective": objective}
    if objective == "devices":
        changed["bottleneck_ms"] = 12.0
    request = request.model_copy(update=changed)
    placement = placer.solve(request)
    rules = request.constraints
    values = []
    for where in expressible_maps(request):
        if rules.pinned.items() <= where.items():
            pinned = rules.model_copy(update={"pinned": where, "contiguous": True})
            answer = placer.solve(without_format(request, constraints=pinned))
            values += [] if answer.objective_value is None else [answer.objective_value]
    if not values:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(min(values), rel=2e-6)
    assert placement.layer_devices in list(expressible_maps(request))


def row(
    layers: Mapping[str, float],
    devices: int = 2,
    edges: tuple[Edge, ...] | None = None,
    memory_bytes: int = 100,
    training: bool = False,
    **asked: Any,
) -> PlacementRequest:
    """Return a request for a chain of layers on alike devices x, y, ... for vLLM.

    Args:
        layers: the time of each layer, in ms; each has 10 bytes of parameters.
        devices: their number.
        edges: between the layers; by default, values of 0 bytes from each layer to the next.
        memory_bytes: of each device.
        training: whether backward passes take time, too.
        asked: further fields of the request.
    """
    names = "xyzuvw"[:devices]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in names],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
            for a, b in itertools.permutations(names, 2)
        ],
    )
    if edges is None:
        edges = tuple(Edge(source=a, targets=(b,), bytes=0) for a, b in itertools.pairwise(layers))
    profile = Profile(
        layers=[
            Layer(
                name=name,
                forward_ms={"t": time_ms},
                backward_ms={"t": time_ms} if training else {},
                param_bytes=10,
            )
            for name, time_ms in layers.items()
        ],
        edges=edges,
        training=training,
        cluster=cluster,
    )
    return PlacementRequest(profile=profile, **{"for_format": "vllm", **asked})


BLOCKS = {"h.0.a": 1.0, "h.0.b": 1.0, "h.1.a": 1.0, "h.1.b": 1.0}


def test_pins_of_one_unit_to_two_devices_are_refused_with_both_layers() -> None:
    request = row(BLOCKS, constraints=Constraints(pinned={"h.0.a": "x", "h.0.b": "y"}))
    with pytest.raises(
        InputError, match=r"'h\.0\.a' to 'x' and 'h\.0\.b' to 'y', and VLLM_PP.* keeps 'h\.0' on"
    ):
        placer.solve(request)


def test_a_pin_of_one_layer_pins_its_unit() -> None:
    placement = placer.solve(row(BLOCKS, constraints=Constraints(pinned={"h.0.b": "y"})))
    assert placement.layer_devices == dict(zip(BLOCKS, "yyxx", strict=True))


def test_a_format_of_segments_refuses_placements_that_need_not_be_contiguous() -> None:
    with pytest.raises(InputError, match=r"contiguous is False.*leave contiguous out"):
        placer.solve(row(BLOCKS, constraints=Constraints(contiguous=False)))


def test_a_model_without_blocks_is_bad_input_for_a_format_that_counts_them() -> None:
    with pytest.raises(InputError, match=r"^for_format is 'vllm': .*counts the blocks of one list"):
        placer.solve(row({"embed": 1.0, "head": 1.0}))


def test_parallel_branches_stay_in_execution_order() -> None:
    """Without the format, each device has 3 + 2 ms; in order, 3 + 3 ms is the best."""
    request = row({"h.0": 3.0, "h.1": 3.0, "h.2": 2.0, "h.3": 2.0}, edges=())
    free = placer.solve(request.model_copy(update={"for_format": None}))
    assert free.objective_value == pytest.approx(5.0)
    placement = placer.solve(request)
    # the first device also sends an empty value, in 1 us
    assert placement.objective_value == pytest.approx(6.001)
    assert list(placement.layer_devices.values()) in (list("xxyy"), list("yyxx"))


def test_a_placement_that_the_format_cannot_express_does_not_pass_the_check() -> None:
    request = row({"h.0.a": 1.0, "h.0.b": 2.0, "h.1": 3.0})
    free = placer.solve(
        request.model_copy(
            update={
                "for_format": None,
                "constraints": Constraints(pinned={"h.0.a": "x", "h.0.b": "y", "h.1": "y"}),
            }
        )
    )
    cut_inside = free.model_copy(update={"id": request.content_hash()})
    with pytest.raises(PlacementError, match="colocated layers"):
        check(request, cut_inside)


def test_the_check_refuses_an_answer_to_the_same_request_without_the_format() -> None:
    request = row(BLOCKS)
    other = placer.solve(request.model_copy(update={"for_format": None}))
    with pytest.raises(PlacementError, match="id"):
        check(request, other)


def test_a_claim_that_nothing_fits_is_checked_against_the_format() -> None:
    request = row(BLOCKS, memory_bytes=15)
    why = placer.solve(request)
    assert why.status == "infeasible"
    roomier = row(BLOCKS, memory_bytes=20)
    with pytest.raises(PlacementError, match="meets every requirement"):
        check(roomier, why.model_copy(update={"id": roomier.content_hash()}))


def test_the_reason_against_a_placement_names_the_format() -> None:
    """Each layer fits by itself, and the two layers of a block do not fit together."""
    request = row(BLOCKS, devices=4, memory_bytes=15)
    assert placer.solve(request.model_copy(update={"for_format": None})).layer_devices
    why = placer.solve(request).infeasible
    assert why is not None
    assert "for_format='vllm' also requires" in why.reason


def test_what_would_help_includes_placements_that_the_format_cannot_express() -> None:
    request = row({"h.0.a": 3.0, "h.0.b": 3.0, "h.1": 1.0}, explain=True)
    limits = placer.solve(request).limits
    assert limits is not None
    found = {help.change: help.objective_value for help in limits.improvements}
    # 3 ms and 3 + 1 ms, plus the latency of a transfer, instead of 3 + 3 ms
    assert found["placements that vllm cannot express"] == pytest.approx(4.0, rel=1e-2)
    assert not any("contiguous" in change for change in found)


@pytest.mark.parametrize("replicas", ["never", "auto", "by-stage"])
def test_a_format_without_replicas_has_none(replicas: str) -> None:
    """Without the format, data parallelism divides the two blocks evenly."""
    request = row(
        {"h.0": 3.0, "h.1": 1.0}, training=True, replicas=replicas, objective="throughput"
    )
    placement = placer.solve(request)
    assert not placement.replicas
    assert placement.objective_value == pytest.approx(6.0, rel=1e-2)


def test_layers_with_shared_parameters_have_copies_where_the_engine_makes_them() -> None:
    """vLLM copies the embedding to the last rank if the output layer shares its parameters."""
    layers = {"embed": 1.0, "h.0": 1.0, "h.1": 1.0, "head": 1.0}
    request = row(layers)
    tied = request.profile.model_copy(
        update={
            "colocated": (("embed", "head"),),
            "tied": (TiedParameters(layers=("embed", "head"), param_bytes=10),),
        }
    )
    placement = placer.solve(request.model_copy(update={"profile": tied}))
    assert placement.objective_value == pytest.approx(2.0, rel=1e-2)
    last = placement.devices[-1] if placement.layer_devices["head"] == "y" else placement.devices[0]
    assert last.memory.param_bytes == 2 * 10 + 10


def test_the_request_without_a_format_is_returned_itself() -> None:
    request = row(BLOCKS, for_format=None)
    assert expressible(request) is request


def test_the_restriction_changes_no_other_field() -> None:
    request = row(BLOCKS, seed=3, transfers="overlapped", time_limit_s=7.0)
    found = expressible(request)
    changed = {
        name for name in type(found).model_fields if getattr(found, name) != getattr(request, name)
    }
    assert changed == {"for_format", "constraints"}
    assert found.constraints == Constraints(
        contiguous=True, colocated=(("h.0.a", "h.0.b"), ("h.1.a", "h.1.b"))
    )


def test_an_unknown_format_names_the_nearest_one() -> None:
    with pytest.raises(
        InputError, match=r"there is no format 'vlm'; give one of .*; did you mean 'vllm'\?"
    ):
        format_named("vlm")


def test_an_unknown_format_like_no_other_is_answered_with_each_format_once() -> None:
    with pytest.raises(InputError) as refused:
        format_named("zzz")
    assert [str(refused.value).count(name) for name in FORMATS] == [1] * len(FORMATS)
