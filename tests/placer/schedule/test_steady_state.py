"""The time of a step in a row, against a clock that plays many, closed forms, and bounds."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placer.schedule import (
    Pipeline,
    Transfer,
    plan,
    simulate,
    steady_state,
    steady_state_ms,
    step_ms,
)

SCHEDULES = st.sampled_from(["fill-drain", "1f1b", "zero-bubble", "interleaved"])
SIZES = st.integers(1, 5)
SETTLED, PERIODS = 36, 24


def planned(pipeline, schedule, chunks, **options):
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    return plan(schedule, pipeline.places, chunks, **times, **options)


@settings(max_examples=48, deadline=None)
@given(schedule=SCHEDULES, chunks=st.integers(1, 4), training=st.booleans(), data=st.data())
def test_it_is_what_a_clock_shows_over_many_steps(
    schedule, chunks, training, data, strategies, ends_of
):
    """Steps 36 to 60 are whole rounds of 1, 2, 3, 4, 6, 8, 12 or 24 steps."""
    pipeline = data.draw(strategies.pipelines())
    found = planned(pipeline, schedule, chunks, training=training)
    ends = ends_of(pipeline, found, SETTLED + PERIODS)
    grown = [after - before for before, after in pairwise(ends)]
    # else it has not settled, or in rounds of another length
    assume(grown[-PERIODS:] == grown[-PERIODS - 12 : -12])
    assert steady_state_ms(pipeline, found) == pytest.approx(
        (ends[-1] - ends[-1 - PERIODS]) / PERIODS, abs=1e-9
    )


@settings(max_examples=80, deadline=None)
@given(schedule=SCHEDULES, chunks=SIZES, training=st.booleans(), data=st.data())
def test_both_ways_to_find_it_agree(schedule, chunks, training, data, strategies):
    pipeline = data.draw(strategies.pipelines())
    found = planned(pipeline, schedule, chunks, training=training)
    row = steady_state.StepsInARow(pipeline, found)
    by_chains = steady_state._longest_mean(row, row.busiest_ms())
    assert steady_state_ms(pipeline, found) == pytest.approx(by_chains, abs=1e-9)


@given(schedule=SCHEDULES, chunks=SIZES, training=st.booleans(), data=st.data())
def test_it_is_between_the_busiest_device_and_a_step_alone(
    schedule, chunks, training, data, strategies
):
    pipeline = data.draw(strategies.pipelines())
    found = planned(pipeline, schedule, chunks, training=training)
    optimizer = pipeline.optimizer_by_device()
    busy = simulate(pipeline, found).busy_ms
    value = steady_state_ms(pipeline, found)
    assert value >= max(busy[device] + optimizer.get(device, 0) for device in busy) - 1e-9
    assert value <= step_ms(pipeline, found) + max(optimizer.values(), default=0) + 1e-9


@pytest.mark.parametrize(("stages", "chunks"), [(2, 3), (2, 4), (4, 7), (4, 16), (8, 15), (8, 32)])
def test_under_zero_bubble_equal_stages_never_wait(stages, chunks):
    pipeline = Pipeline.chain([1.0] * stages, [2.0] * stages, optimizer_ms=[0.5] * stages)
    assert steady_state_ms(pipeline, planned(pipeline, "zero-bubble", chunks)) == 3 * chunks + 0.5


@pytest.mark.parametrize(("forward", "backward", "weights"), [(19.0, 30.0, 16.0), (7.5, 9.5, 7.0)])
def test_under_zero_bubble_two_stages_hardly_wait_though_their_passes_take_unlike_times(
    forward, backward, weights
):
    """The weight halves that are left for the end of a step fill the time until the next one has
    come so far."""
    pipeline = Pipeline.chain([forward] * 2, [backward + weights] * 2, weight_grad_ms=[weights] * 2)
    assert steady_state_ms(pipeline, planned(pipeline, "zero-bubble", 4)) <= 1.02 * 4 * (
        forward + backward + weights
    )


@pytest.mark.parametrize(("stages", "chunks"), [(2, 4), (4, 8), (8, 8), (4, 3)])
@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain"])
def test_under_1f1b_and_fill_drain_nothing_is_won(schedule, stages, chunks):
    """The first stage ends last, and only then begins the next step."""
    pipeline = Pipeline.chain([1.0] * stages, [2.0] * stages, optimizer_ms=[0.5] * stages)
    assert (
        steady_state_ms(pipeline, planned(pipeline, schedule, chunks))
        == 3 * (chunks + stages - 1) + 0.5
    )


def test_inference_goes_at_the_pace_of_the_slowest_stage():
    pipeline = Pipeline.chain([1.0, 4.0, 2.0], [0.0] * 3, transfer_ms=3.0)
    assert steady_state_ms(pipeline, planned(pipeline, "1f1b", 5, training=False)) == 20.0


def test_a_lane_that_is_busier_than_any_device_sets_the_pace():
    pipeline = Pipeline.chain([1.0, 1.0], [0.0] * 2, transfer_ms=3.0)
    assert steady_state_ms(pipeline, planned(pipeline, "1f1b", 5, training=False)) == 15.0


def test_what_takes_nothing_takes_nothing_in_a_row():
    pipeline = Pipeline.chain([0.0, 0.0], [0.0, 0.0])
    assert steady_state_ms(pipeline, planned(pipeline, "1f1b", 3)) == 0.0


def test_where_the_longest_chain_comes_round_after_two_steps_it_is_their_mean(ends_of):
    """No gradient comes back: the first stage sends for the next step beside what the second one
    still does."""
    pipeline = Pipeline((0, 1), (4, 2), (6, 7), (1, 1), (Transfer(0, 1, 3),), (2, 4))
    found = planned(pipeline, "fill-drain", 2)
    ends = ends_of(pipeline, found, 9)
    assert [after - before for before, after in pairwise(ends)][-4:] == [23, 24, 23, 24]
    assert steady_state_ms(pipeline, found) == pytest.approx(23.5)
