"""Timelines of stages with numbers of replicas of their own, against enumerated steps."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas_by_stage import GroupedSteps, unlike_counts
from replicated_steps import drawn_request
from small_requests import SHARE, examples

from placer.report.page import html_report
from placer.schema import Placement, PlacementRequest, Profile, Replica, Timeline
from placer.solver.solve import solve
from placer_server.judge.timeline import MAX_PASSES, timeline, trace

SCHEDULES = ("1f1b", "zero-bubble", "fill-drain")


def request_of(seed: int, objective: str, order: str) -> PlacementRequest:
    """A question on three or four alike devices, about isolated steps."""
    request = drawn_request(seed, devices=(3, 4), schedule=order)
    fields: dict[str, object] = {"step_kind": "isolated", "replicas": "by-stage"}
    if objective == "throughput":
        fields |= {"objective": "throughput", "chunks": 12, "batch_size": None, "profiles": ()}
    else:
        fields |= {"batch_size": (8, 12)[seed % 2]}
    return request.model_copy(update=fields)


def planned(
    request: PlacementRequest, profile: Profile, plan: GroupedSteps, cuts: tuple[int, ...]
) -> Placement:
    """The placement of a plan on consecutive devices."""
    names, layers = [one.name for one in request.devices], [one.name for one in profile.layers]
    ends, seats = [0, *cuts, len(layers)], [0, *itertools.accumulate(plan.counts)]
    samples = math.lcm(*plan.counts) * profile.batch_size
    where, replicas = {}, {}
    for stage, count in enumerate(plan.counts):
        members = names[seats[stage] : seats[stage + 1]]
        where |= dict.fromkeys(layers[ends[stage] : ends[stage + 1]], members[0])
        if count > 1:
            replicas[members[0]] = tuple(
                Replica(device=name, samples=samples // count) for name in members
            )
    return Placement(
        status="feasible",
        objective=request.objective,
        layer_devices=where,
        replicas=replicas,
        batch_size=samples,
        chunks=plan.chunks,
        schedule=plan.request.schedule,
        training=True,
    )


def plans_of(request: PlacementRequest) -> Iterable[tuple[Placement, float]]:
    """Every placement by stage that fits, with its enumerated step in ms."""
    whole = request
    if request.objective == "throughput":
        batch = request.chunks * request.profile.batch_size
        whole = request.model_copy(update={"objective": "step", "batch_size": batch})
    for counts, cuts in unlike_counts(request):
        for profile in (request.profile, *request.profiles):
            plan = GroupedSteps(whole, profile, request.schedule, counts, cuts)
            for step_ms in plan.all():
                yield planned(request, profile, plan, cuts), step_ms


def require_consistent(shown: Timeline, placement: Placement) -> None:
    """Check devices, order and transfers of the units."""
    units = math.lcm(*placement.replicas_by_stage)
    members = [
        [one.device for one in placement.replicas.get(first, ())] or [first]
        for first in dict.fromkeys(placement.layer_devices.values())
    ]
    assert [one.device for one in shown.devices] == list(itertools.chain(*members))
    phases = {one.phase for one in shown.passes}
    place = {(one.stage, one.phase, one.micro_batch): one for one in shown.passes}
    assert len(place) == len(shown.passes)
    assert place.keys() == set(
        itertools.product(range(len(members)), phases, range(shown.shown_chunks))
    )
    by_device = defaultdict(list)
    for one in shown.passes:  # by start
        own = members[one.stage]
        assert own.index(one.device) == one.micro_batch % units * len(own) // units
        by_device[one.device].append(one)
    for spent in shown.devices:
        mine = by_device[spent.device]
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(mine))
        assert spent.busy_ms == pytest.approx(sum(one.end_ms - one.start_ms for one in mine))
    lanes = defaultdict(list)
    for copy in shown.copies:  # by start
        phase = "forward" if copy.carries == "values" else "backward"
        before = place[copy.source_stage, phase, copy.micro_batch]
        after = place[copy.target_stage, phase, copy.micro_batch]
        assert (copy.source, copy.target) == (before.device, after.device)
        assert before.end_ms <= copy.start_ms + 1e-9
        assert copy.end_ms <= after.start_ms + 1e-9
        kind = copy.source_stage, copy.target_stage, copy.carries
        lanes["sends", copy.source, kind].append(copy)
        lanes["receives", copy.target, kind].append(copy)
    for several in lanes.values():
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in itertools.pairwise(several))


@pytest.mark.parametrize("objective", ["step", "throughput"])
@examples(160)
@given(seed=st.integers(0, 2000), order=st.sampled_from(SCHEDULES))
def test_the_timeline_of_every_plan_ends_with_its_step(objective, seed, order):
    request = request_of(seed, objective, order)
    for placement, step_ms in plans_of(request):
        shown = timeline(request, placement)
        units = math.lcm(*placement.replicas_by_stage)
        assert (shown.schedule, shown.chunks) == (order, placement.chunks * units)
        assert shown.shown_chunks == shown.chunks
        assert shown.step_ms == pytest.approx(step_ms, rel=1e-9)
        require_consistent(shown, placement)
        slices = [one for one in json.loads(trace(shown))["traceEvents"] if one["ph"] == "X"]
        ends_ms = [(one["ts"] + one["dur"]) / 1e3 for one in slices]
        assert max(ends_ms) == pytest.approx(shown.step_ms)


@pytest.mark.parametrize("kind", ["isolated", "steady-state"])
def test_the_timeline_of_an_answer_ends_with_its_isolated_step(kind):
    seen = 0
    for seed in range(math.ceil(240 * SHARE)):
        request = request_of(seed, "step", "1f1b").model_copy(
            update={"schedule": "auto", "step_kind": kind}
        )
        placement = solve(request)
        if len(set(placement.replicas_by_stage)) < 2:
            continue
        shown = timeline(request, placement)
        assert shown.schedule == placement.schedule
        assert shown.step_ms == pytest.approx(placement.step.isolated_ms, rel=1e-9)
        if kind == "isolated":
            assert shown.step_ms == pytest.approx(placement.objective_value, rel=1e-9)
            assert shown.bubble == pytest.approx(placement.step.bubble)
        text = html_report(placement)
        for members in placement.replicas.values():
            assert ", ".join(one.device for one in members) in text
        seen += 1
    assert seen >= 1


def test_of_many_units_the_first_micro_batches_are_shown():
    request = request_of(3, "step", "1f1b")
    request = request.model_copy(update={"batch_size": 120_000, "profiles": ()})
    size = request.profile.batch_size
    counts, cuts = next(iter(unlike_counts(request)))
    plan = GroupedSteps(request, request.profile, "1f1b", counts, cuts)
    placement = planned(request, request.profile, plan, cuts)
    shown = timeline(request, placement)
    assert shown.chunks * size == 120_000
    assert len(shown.passes) <= MAX_PASSES
    assert shown.shown_chunks % math.lcm(*counts) == 0
    require_consistent(shown, placement)
