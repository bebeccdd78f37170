"""Timeline, trace and report use the placement's own micro-batches and schedule.

``/timeline`` chose the schedule again, as the best for the placement's map. A search that was
stopped may not have tried that schedule with the map, so the page drew a shorter batch than the
placement described.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_step
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import row
from small_requests import examples, small_requests

from placer.evaluation.compare import compare
from placer.evaluation.evaluate import map_of
from placer.report.page import html_report
from placer.report.pictures import placed_chart
from placer.schema import Cluster, Constraints, Device, Link, Placement, PlacementRequest, Profile
from placer.solver.referee import recompute, step
from placer.solver.solve import solve
from placer_server.judge.timeline import profile_of, timeline, trace

MODELS = Path("benchmarks/workloads/models")


def never(_: Any) -> bool:
    return False


def at_once(_: Any) -> bool:
    return True


def split(incumbent: Any) -> bool:
    """Return whether the incumbent uses several devices."""
    return len(set(incumbent.placement().layer_devices.values())) > 1


STOPS = [never, at_once, split]


def solved(request: PlacementRequest, stops: Callable[[Any], bool] = never) -> Placement:
    """Solve until an incumbent for which ``stops`` is true."""
    stop = threading.Event()

    def progress(incumbent: Any) -> None:
        if stops(incumbent):
            stop.set()

    return solve(request, progress=progress, stop=stop)


@st.composite
def requests(draw: Any) -> PlacementRequest:
    """Draw a small request of any objective."""
    if draw(st.booleans()):
        return draw(every_step.requests())
    request = draw(small_requests())
    if draw(st.booleans()):
        return request
    return request.model_copy(
        update={"objective": "devices", "bottleneck_ms": draw(st.sampled_from([10.0, 40.0, 1e6]))}
    )


def reading_of(
    request: PlacementRequest, placement: Placement
) -> tuple[PlacementRequest, step.StepReading]:
    """Return the referee's simulation of a placement's batch, event by event."""
    if request.objective == "step":
        asked = step.chosen(request, placement)
        assert asked is not None
    else:
        rules = request.constraints.model_copy(update={"contiguous": placement.contiguous})
        asked = request.model_copy(update={"constraints": rules})
    asked = recompute.repeated(asked, placement.layer_devices, placement.recompute)
    return asked, step.StepReading(
        asked, placement.layer_devices, placement.stages, placement.in_flight or None
    )


def measured(request: PlacementRequest, placement: Placement) -> Profile:
    """Return the profile with the placement's micro-batch size."""
    return next(
        one
        for one in (request.profile, *request.profiles)
        if one.batch_size == placement.batch_size
    )


def single_device_ms(request: PlacementRequest, placement: Placement) -> float:
    """Return the time of all micro-batches and the optimizer on the placement's single device."""
    device = placement.single_device.device
    kind = next(one.type for one in request.devices if one.name == device)
    profile = measured(request, placement)
    trained = request.is_training
    forward = sum(layer.forward_ms[kind] for layer in profile.layers)
    backward = sum(layer.backward_ms[kind] for layer in profile.layers) if trained else 0.0
    optimizer = (
        sum(layer.optimizer_ms.get(kind, 0.0) for layer in profile.layers) if trained else 0.0
    )
    return placement.chunks * (forward + backward) + optimizer


@pytest.mark.exhaustive
@examples(240)
@given(request=requests(), stops=st.sampled_from(STOPS))
def test_what_is_shown_follows_the_placement_for_every_objective_and_schedule_stopped_or_not(
    request, stops
):
    placement = solved(request, stops)
    if not placement.layer_devices:
        return
    _, reading = reading_of(request, placement)
    shown = timeline(request, placement)
    assert (shown.schedule, shown.chunks, shown.training) == (
        placement.schedule,
        placement.chunks,
        placement.training,
    )
    assert shown.step_ms == pytest.approx(reading.isolated_ms)
    assert shown.single_device_ms == pytest.approx(single_device_ms(request, placement))
    drawn = [(one.stage, one.phase, one.micro_batch) for one in shown.passes]
    assert sorted(drawn) == sorted(
        (one.stage, one.phase, one.micro_batch) for one in reading.plan.issue
    )
    if placement.step is not None:
        assert shown.step_ms == pytest.approx(placement.step.isolated_ms)
        if placement.step.kind == "isolated":
            assert shown.step_ms == pytest.approx(placement.objective_value)
            assert shown.bubble == pytest.approx(placement.step.bubble)
    slices = [event for event in json.loads(trace(shown))["traceEvents"] if event["ph"] == "X"]
    ends_ms = [(event["ts"] + event["dur"]) / 1e3 for event in slices]
    assert max(ends_ms) == pytest.approx(shown.step_ms)
    shown_profile = profile_of(request, placement)
    assert shown_profile.layers == measured(request, placement).layers
    count = "1 micro-batch" if placement.chunks == 1 else f"{placement.chunks} micro-batches"
    assert f"{count} of {placement.batch_size}, {placement.schedule}" in html_report(
        placement, shown_profile
    )


@pytest.mark.parametrize("order", ["fill-drain", "1f1b", "zero-bubble"])
def test_a_schedule_that_is_not_the_best_for_its_map_is_the_one_that_is_shown(order):
    placement = solve(row([1.0] * 4, grad_bytes=1, chunks=4, schedule=order))
    shown = timeline(row([1.0] * 4, grad_bytes=1, chunks=4, schedule="auto"), placement)
    forward_ms, backward_ms = 2.0, 4.0  # two layers on each of two devices
    step_ms = {  # with zero-bubble the last stage waits for its first input alone
        "fill-drain": 5 * (forward_ms + backward_ms),
        "1f1b": 5 * (forward_ms + backward_ms),
        "zero-bubble": forward_ms + 4 * (forward_ms + backward_ms),
    }
    assert shown.schedule == order
    assert ("weights" in {one.phase for one in shown.passes}) == (order == "zero-bubble")
    assert shown.step_ms == pytest.approx(placement.step.isolated_ms)
    assert shown.step_ms == pytest.approx(step_ms[order])


@pytest.mark.parametrize("objective", ["step", "throughput"])
@pytest.mark.parametrize("memory_bytes", [51, 60, 125])
def test_zero_bubble_is_shown_with_the_room_that_memory_leaves(memory_bytes, objective):
    """Four stages of one layer, 8 micro-batches and passes of 1 ms: more memory, shorter steps."""
    asked = {
        "chunks": 8,
        "schedule": "zero-bubble",
        "constraints": Constraints(contiguous=True, min_devices=4),
    }
    request = row(
        [1.0] * 4, devices=4, memory_bytes=memory_bytes, saved_bytes=10, grad_bytes=1, **asked
    )
    request = request.model_copy(update={"objective": objective})
    placement = solve(request)
    shown = timeline(request, placement)
    assert min(placement.in_flight) == {51: 3, 60: 4, 125: 8}[memory_bytes]
    assert shown.step_ms == pytest.approx(3 * 8 + {51: 5, 60: 3, 125: 3}[memory_bytes])
    held = dict.fromkeys(placement.stages, 0)
    for one in shown.passes:  # by start
        held[one.device] += {"forward": 1, "backward": 0, "weights": -1}[one.phase]
        assert held[one.device] <= placement.in_flight[one.stage]


@pytest.mark.covering
@pytest.mark.parametrize("model", ["inception", "unet", "gpt2"])
@pytest.mark.parametrize("stops", [at_once, split])
def test_of_a_stopped_answer_the_batch_that_it_describes_is_shown(model, stops):
    found = Profile.model_validate_json((MODELS / f"{model}.json").read_text())
    kinds = sorted({kind for layer in found.layers for kind in layer.forward_ms})
    names = [f"d{number}" for number in range(5)]
    devices = [
        Device(name=name, type=kinds[number // 3 % len(kinds)], memory_bytes=2**40)
        for number, name in enumerate(names)
    ]
    links = [
        Link(source=a, target=b, bandwidth_bytes_per_s=10e9) for a in names for b in names if a != b
    ]
    request = PlacementRequest(
        profile=found,
        cluster=Cluster(devices=devices, links=links),
        objective="step",
        schedule="auto",
        chunks=8,
    )
    placement = solved(request, stops)
    shown = timeline(request, placement)
    # it was left out of what was shown
    assert placement.step.optimizer_ms > 0.01 * placement.step.isolated_ms
    assert shown.step_ms == pytest.approx(placement.step.isolated_ms)
    assert max(one.optimizer_ms for one in shown.devices) == pytest.approx(
        placement.step.optimizer_ms
    )
    for one in shown.devices:
        assert one.busy_ms + one.idle_ms == pytest.approx(
            shown.step_ms - placement.step.optimizer_ms
        )


def test_the_report_shows_the_times_of_the_micro_batches_that_were_chosen():
    # It showed the times of the request's first profile, whichever size had been chosen.
    small, large = row([1.0] * 4, size=1), row([7.0] * 4, size=2)
    request = small.model_copy(update={"profiles": (large.profile,), "batch_size": 4})
    placement = solve(request)
    assert placement.batch_size == 1
    other = large.model_copy(update={"profiles": (small.profile,), "batch_size": 4})
    answered = solve(other)
    assert answered.batch_size == 1
    parts = placed_chart(answered, profile_of(other, answered)).parts
    assert sorted(value for part in parts for value in part.values if value) == [3.0] * 4


def test_placements_are_compared_by_their_own_schedules():
    request = row([1.0] * 4, grad_bytes=1, chunks=4, schedule="auto")
    slow, best = (
        solve(row([1.0] * 4, grad_bytes=1, chunks=4, schedule="fill-drain")),
        solve(request),
    )
    found = compare(
        request,
        {"slow": map_of(request, slow), "best": map_of(request, best)},
        {"slow": slow, "best": best},
    )
    assert [one.objective_value for one in found.evaluations] == [
        slow.objective_value,
        best.objective_value,
    ]
    assert found.best == "best"
