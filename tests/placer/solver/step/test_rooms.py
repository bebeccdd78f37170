"""The room of zero-bubble's stages against every other room that there could be."""

import pytest
from enumeration import Enumeration, memories
from every_step import Steps, requests
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples

from placer.schema import Constraints
from placer.solver.check import check
from placer.solver.solve import solve


def use_bytes(every, placement, stage, room):
    """Return the memory of a stage's device with this many micro-batches in flight."""
    device, where = placement.stages[stage], placement.layer_devices
    if device in placement.recompute:
        return every.recomputed_use(where, device, room)
    fewest = min(placement.chunks, len(placement.stages) - stage)
    return every.use(where, device, room, memories(room, 1 + room - fewest))


@examples(200)
@given(
    request=requests(contiguous=True),
    objective=st.sampled_from(["step", "step", "throughput", "latency", "memory", "devices"]),
    limit=st.sampled_from([18, 25, 40, 60, 90]),
    rule=st.sampled_from(["never", "never", "auto"]),
)
def test_every_stage_has_the_most_room_for_which_its_device_has_memory(
    request, objective, limit, rule
):
    assume(request.is_training)
    devices = tuple(device.model_copy(update={"memory_bytes": limit}) for device in request.devices)
    changes = {
        "objective": objective,
        "schedule": "zero-bubble",
        "profiles": (),
        "step_kind": "isolated",
    }
    changes |= {"chunks": 6 // request.profile.batch_size, "batch_size": None, "training": True}
    changes |= {"bottleneck_ms": 50.0 if objective == "devices" else None}
    changes |= {"cluster": request.placed_on.model_copy(update={"devices": devices})}
    changes |= {"constraints": Constraints(contiguous=True, recompute=rule)}
    request = request.model_copy(update=changes)
    placement = solve(request)
    assume(placement.layer_devices)
    check(request, placement)
    every, count = Enumeration(request, contiguous=True), len(placement.stages)
    load_of = {load.device: load for load in placement.devices}
    for stage, (device, room) in enumerate(zip(placement.stages, placement.in_flight, strict=True)):
        fewest = min(placement.chunks, count - stage)
        most = min(placement.chunks, 2 * count) if count > 1 else 1
        assert fewest <= room <= most
        assert (
            use_bytes(every, placement, stage, room) == load_of[device].memory.total_bytes <= limit
        )
        if objective == "memory":
            assert room == fewest
        elif room < most:
            assert use_bytes(every, placement, stage, room + 1) > limit


@examples(60)
@given(request=requests(contiguous=True), step_kind=st.sampled_from(["isolated", "steady-state"]))
def test_a_step_takes_what_a_clock_says_with_the_rooms_that_were_chosen(request, step_kind):
    # The clock is a third reading beside the simulation and the referee, which the solver has
    # asked.
    assume(request.is_training)
    placement = solve(
        request.model_copy(update={"schedule": "zero-bubble", "step_kind": step_kind})
    )
    assume(placement.layer_devices)
    played = Steps(request.model_copy(update={"schedule": "zero-bubble", "step_kind": step_kind}))
    found = [
        played.step(pipeline, plan)
        for every, where in played.maps()
        if where == placement.layer_devices and every.request.chunks == placement.chunks
        for pipeline, _, plan in played.plans(every, where)
        if plan.in_flight == placement.in_flight and pipeline.places == _places(request, placement)
    ]
    assert any(value == pytest.approx(placement.objective_value, abs=1e-9) for value in found)


def _places(request, placement):
    names = [device.name for device in request.devices]
    return tuple(map(names.index, placement.stages))
