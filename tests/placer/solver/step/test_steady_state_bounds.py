"""Objective ``step`` for steady-state steps: choices, bounds, reports and checks."""

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import row
from small_requests import examples

from placer.errors import InputError, PlacementError
from placer.schema import Constraints, Edge, Link, PlacementRequest
from placer.solver.check import check
from placer.solver.referee.step import longest_mean
from placer.solver.solve import solve
from placer.solver.step.choices import bounded, choice_of

CONTIGUOUS = Constraints(contiguous=True)


def steady_state_request(times_ms, **asked):
    """Return a request for steady-state steps; half of a backward pass is for weights."""
    usual = {
        "grad_bytes": 1,
        "optimizer_ms": 0.0,
        "step_kind": "steady-state",
        "constraints": CONTIGUOUS,
    }
    return row(times_ms, **(usual | asked))


def test_under_zero_bubble_a_step_takes_what_the_busiest_device_has_to_do():
    placement = solve(
        steady_state_request(
            [1.0] * 4, devices=4, chunks=8, schedule="zero-bubble", optimizer_ms=0.5
        )
    )
    assert placement.objective_value == pytest.approx(8 * 3 + 0.5)
    assert placement.status == "optimal"


def test_a_long_row_is_proven_under_zero_bubble():
    placement = solve(
        steady_state_request([1.0, 2.0, 3.0] * 12, devices=4, chunks=8, schedule="zero-bubble")
    )
    assert placement.objective_value == pytest.approx(8 * 3 * 18, rel=1e-6)
    assert placement.status == "optimal"


def test_under_1f1b_the_first_stage_ends_last_so_that_nothing_is_won():
    placement = solve(steady_state_request([1.0] * 4, devices=4, chunks=8, schedule="1f1b"))
    assert placement.objective_value == pytest.approx((8 + 3) * 3)
    assert placement.status == "optimal"


def test_large_micro_batches_are_taken_where_only_a_step_alone_has_a_pipeline_to_fill():
    # 4 of 2 ms a layer take 48 in a row and 52 alone; 8 of 1.02 ms fill in half the time: 48.96 and
    # 51.
    small = steady_state_request([1.02] * 4).profile
    chosen = {}
    for step_kind in ("isolated", "steady-state"):
        large = steady_state_request(
            [2.0] * 4, size=2, batch_size=8, schedule="auto", step_kind=step_kind
        )
        placement = solve(large.model_copy(update={"profiles": (small,)}))
        chosen[step_kind] = (
            placement.chunks,
            placement.schedule,
            pytest.approx(placement.objective_value),
        )
    assert chosen == {
        "isolated": (8, "zero-bubble", 51.0),
        "steady-state": (4, "zero-bubble", 48.0),
    }


@examples(160)
@given(
    tenths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    devices=st.integers(2, 4),
    chunks=st.integers(2, 9),
    step_kind=st.sampled_from(["isolated", "steady-state"]),
)
def test_equal_times_from_other_sums_are_no_other_step(tenths, devices, chunks, step_kind):
    # Stages of tenths of a millisecond tie in many ways; ``solve`` raises if the referee orders
    # passes otherwise.
    times = [tenth / 10 for tenth in tenths]
    solve(
        steady_state_request(
            times,
            devices=devices,
            chunks=chunks,
            schedule="zero-bubble",
            step_kind=step_kind,
            work_limit=0.2,
        )
    )


@pytest.mark.parametrize("seed", [7, 28, 32, 70, 104, 107, 126])
def test_links_that_differ_by_direction_are_told_of_the_devices_that_are_returned(seed):
    # In a row either device may come first, alone not; ``solve`` raises where it tells another time
    # than is true.
    chance = random.Random(seed)
    times = [chance.randint(1, 1000) / 100 for _ in range(chance.randint(4, 24))]
    chunks, schedule = chance.choice([4, 8]), chance.choice(["zero-bubble", "auto"])
    asked = steady_state_request(times, chunks=chunks, schedule=schedule, work_limit=0.5)
    sizes = [chance.randint(1, 1000) for _ in asked.profile.edges]
    edges = [
        edge.model_copy(update={"bytes": size, "gradient_bytes": size})
        for edge, size in zip(asked.profile.edges, sizes, strict=True)
    ]
    links = [
        Link(source=a, target=b, bandwidth_bytes_per_s=chance.uniform(1e6, 1.05e6))
        for a, b in (("d0", "d1"), ("d1", "d0"))
    ]
    profile = asked.profile.model_copy(update={"edges": tuple(edges)})
    cluster = asked.cluster.model_copy(update={"links": tuple(links)})
    assert solve(asked.model_copy(update={"profile": profile, "cluster": cluster})).step is not None


@pytest.mark.parametrize("step_kind", ["isolated", "steady-state"])
def test_both_times_are_told_whichever_is_made_short(step_kind):
    placement = solve(
        steady_state_request(
            [1.0] * 4, chunks=4, schedule="zero-bubble", optimizer_ms=1.0, step_kind=step_kind
        )
    )
    step = placement.step
    assert (step.kind, step.optimizer_ms) == (step_kind, 2.0)
    assert step.isolated_ms == pytest.approx(4 * 6 + 2 + 2)
    assert step.steady_state_ms == pytest.approx(4 * 6 + 2)
    assert (
        placement.objective_value
        == {"isolated": step.isolated_ms, "steady-state": step.steady_state_ms}[step_kind]
    )
    assert step.samples_per_s == pytest.approx(1e3 * 4 / placement.objective_value)


def test_devices_that_never_wait_have_no_bubble():
    assert solve(
        steady_state_request([1.0] * 4, chunks=4, schedule="zero-bubble")
    ).step.bubble == pytest.approx(0, abs=1e-9)


def test_one_device_alone_is_as_fast_in_a_row():
    placement = solve(steady_state_request([1.0] * 4, chunks=4, schedule="auto", optimizer_ms=0.5))
    assert placement.single_device.objective_value == pytest.approx(4 * 12 + 2)


@pytest.mark.parametrize("field", ["isolated_ms", "steady_state_ms", "optimizer_ms"])
def test_a_time_that_is_not_what_is_claimed_is_refused(field):
    request = steady_state_request([1.0, 2.0, 3.0], chunks=4, schedule="auto", optimizer_ms=1.0)
    placement = solve(request)
    false = placement.step.model_copy(update={field: getattr(placement.step, field) * 0.99})
    with pytest.raises(PlacementError, match=f"step.{field}"):
        check(request, placement.model_copy(update={"step": false}))


def test_a_step_alone_is_no_answer_for_one_in_a_row():
    request = steady_state_request(
        [1.0] * 4, chunks=4, schedule="zero-bubble", step_kind="isolated"
    )
    placement = solve(request)
    other = request.model_copy(update={"step_kind": "steady-state"})
    with pytest.raises(PlacementError, match="objective_value"):
        check(other, placement.model_copy(update={"id": other.content_hash()}))


def test_other_objectives_know_no_steps_in_a_row():
    with pytest.raises(
        InputError,
        match="step_kind: only objective 'step' chooses it; the objective is 'throughput'",
    ):
        PlacementRequest(
            profile=steady_state_request([1.0]).profile,
            cluster=steady_state_request([1.0]).cluster,
            step_kind="steady-state",
        )


@st.composite
def repeated(draw):
    """Up to 5 events.

    Which of the same step and of the step before each waits for, and how long each takes.
    """
    count = draw(st.integers(1, 5))
    waits = {
        (e,): {(b,) for b in draw(st.sets(st.integers(0, e - 1)))} if e else set()
        for e in range(count)
    }
    carried = {
        (e,): {(b,) for b in draw(st.sets(st.integers(0, count - 1), max_size=2))}
        for e in range(count)
    }
    carried[0,].add((count - 1,))
    times = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return waits, carried, times


@examples(120)
@given(case=repeated())
def test_the_referee_finds_the_longest_chain_that_repeats(case):
    waits, carried, times = case
    best = Fraction(0)
    for size in range(1, len(times) + 1):
        for chain in itertools.permutations(range(len(times)), size):
            pairs = [*itertools.pairwise(chain), (chain[-1], chain[0])]
            # where an event waits for another in both ways, only that of its own step makes a
            # shorter step
            same = [(b,) in waits[e,] for b, e in pairs]
            before = [(b,) in carried[e,] for b, e in pairs]
            if all(a or c for a, c in zip(same, before, strict=True)) and not all(same):
                steps = sum(not a for a in same)
                best = max(best, Fraction(sum(times[e] for e in chain), steps))
    found = longest_mean(waits, carried, lambda event: times[event[0]])
    assert found == pytest.approx(float(best), abs=1e-9)


def test_the_way_from_the_last_of_many_first_layers_counts():
    # Eight layers of 1 ms and one of 10 ms read nothing; a layer of 10 ms reads them all.
    asked = steady_state_request([1.0] * 8 + [10.0] * 2, devices=10, schedule="1f1b")
    edges = [
        Edge(source=f"l{first}", targets=("l9",), bytes=1, gradient_bytes=1) for first in range(9)
    ]
    profile = asked.profile.model_copy(update={"edges": tuple(edges)})
    choice = bounded(choice_of(asked.model_copy(update={"profile": profile})))
    assert choice.bound == pytest.approx(10 + 10 + 20 + 20, rel=1e-6)
