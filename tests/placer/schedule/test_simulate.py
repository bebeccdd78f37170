"""Simulated steps against closed forms, and against a clock that goes from event to event."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import placer.schedule
from placer.errors import InputError
from placer.schedule import Pipeline, Transfer, plan, simulate, step_ms

SCHEDULES = st.sampled_from(["fill-drain", "1f1b", "zero-bubble", "interleaved"])
SIMPLE = st.sampled_from(["fill-drain", "1f1b"])
SIZES = st.integers(1, 7)


def planned(pipeline, schedule, chunks, **options):
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    return plan(schedule, pipeline.places, chunks, **times, **options)


@settings(max_examples=160, deadline=None)
@given(schedule=SCHEDULES, chunks=SIZES, training=st.booleans(), data=st.data())
def test_a_clock_agrees(schedule, chunks, training, data, strategies, clock):
    pipeline = data.draw(strategies.pipelines())
    found = planned(pipeline, schedule, chunks, training=training)
    assert step_ms(pipeline, found) == clock(pipeline, found)


@settings(max_examples=80, deadline=None)
@given(schedule=st.sampled_from(["1f1b", "zero-bubble"]), chunks=SIZES, data=st.data())
def test_a_clock_agrees_where_every_device_has_one_stage(schedule, chunks, data, strategies, clock):
    pipeline = data.draw(strategies.pipelines(alone=True))
    for known in ((), pipeline.transfers):
        found = planned(pipeline, schedule, chunks, transfers=known)
        assert step_ms(pipeline, found) == clock(pipeline, found)


@settings(max_examples=80, deadline=None)
@given(
    schedule=SCHEDULES,
    chunks=SIZES,
    steps=st.integers(1, 4),
    training=st.booleans(),
    data=st.data(),
)
def test_a_clock_agrees_on_when_each_of_several_steps_ends(
    schedule, chunks, steps, training, data, strategies, ends_of
):
    pipeline = data.draw(strategies.pipelines())
    found = planned(pipeline, schedule, chunks, training=training)
    assert simulate(pipeline, found, steps).ends_ms == ends_of(pipeline, found, steps)


@given(schedule=SCHEDULES, chunks=SIZES, steps=st.integers(1, 3), data=st.data())
def test_steps_in_a_row_hold_the_work_of_each_and_number_micro_batches_on(
    schedule, chunks, steps, data, strategies
):
    pipeline = data.draw(strategies.pipelines())
    timeline = simulate(pipeline, planned(pipeline, schedule, chunks), steps)
    work = chunks * (sum(pipeline.forward_ms) + sum(pipeline.backward_ms))
    assert sum(timeline.busy_ms.values()) == steps * work
    forwards = [task.micro_batch for task in timeline.tasks if task[:2] == (0, "forward")]
    assert forwards == list(range(steps * chunks))


def test_a_device_begins_the_next_step_after_its_own_optimizer():
    """The first stage is through after 1 + 1 ms, its optimizer after 3 more; the second stage is
    slower."""
    pipeline = Pipeline((0, 1), (1, 5), (0, 5), (0, 0), (Transfer(0, 1, 0),), (3, 0))
    timeline = simulate(pipeline, planned(pipeline, "1f1b", 1), steps=2)
    starts = [task.start_ms for task in timeline.tasks if task[:2] == (0, "forward")]
    backward = next(task for task in timeline.tasks if task[:2] == (0, "backward"))
    assert starts == [0, backward.end_ms + 3] and timeline.ends_ms[0] == 11


def test_no_step_at_all_is_refused():
    pipeline = Pipeline.chain([1], [1])
    with pytest.raises(InputError, match="steps is 0"):
        simulate(pipeline, planned(pipeline, "1f1b", 1), steps=0)


@given(
    schedule=SIMPLE,
    stages=SIZES,
    chunks=SIZES,
    forward=st.integers(1, 5),
    backward=st.integers(1, 5),
)
def test_equal_stages_take_chunks_plus_stages_less_one_rounds(
    schedule, stages, chunks, forward, backward
):
    pipeline = Pipeline.chain([forward] * stages, [backward] * stages)
    assert step_ms(pipeline, planned(pipeline, schedule, chunks)) == (chunks + stages - 1) * (
        forward + backward
    )


@given(schedule=SIMPLE, stages=SIZES, chunks=SIZES)
def test_equal_stages_idle_for_stages_less_one_rounds(schedule, stages, chunks):
    pipeline = Pipeline.chain([1.0] * stages, [2.0] * stages)
    timeline = simulate(pipeline, planned(pipeline, schedule, chunks))
    assert timeline.bubble == pytest.approx((stages - 1) / (chunks + stages - 1))


@given(
    devices=st.integers(2, 5),
    each=st.integers(2, 4),
    rounds=st.integers(1, 4),
    time=st.integers(1, 3),
)
def test_interleaving_divides_the_time_to_fill_by_the_stages_of_a_device(
    devices, each, rounds, time
):
    pipeline = Pipeline.chain(
        [time] * devices * each, [2 * time] * devices * each, places=[*range(devices)] * each
    )
    chunks = rounds * devices
    timeline = simulate(pipeline, planned(pipeline, "interleaved", chunks))
    assert timeline.step_ms == 3 * time * (chunks * each + devices - 1)
    busy = 3 * time * chunks * each
    assert timeline.idle_ms == dict.fromkeys(
        range(devices), pytest.approx(busy * (devices - 1) / (each * chunks))
    )


@pytest.mark.parametrize(("stages", "chunks"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_zero_bubble_loses_no_more_than_filling_the_pipeline(stages, chunks):
    """With room for 2 S - 1 the last stage waits for S - 1 forward passes and then for nothing."""
    pipeline = Pipeline.chain([1.0] * stages, [2.0] * stages)
    assert step_ms(pipeline, planned(pipeline, "zero-bubble", chunks)) == 3 * chunks + stages - 1


@given(stages=SIZES, chunks=SIZES, data=st.data())
def test_forward_only_is_a_permutation_flow_shop(stages, chunks, data):
    times = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    pipeline = Pipeline.chain(times, times)
    # equal jobs in a flow shop: one job's way, and the slowest machine for every further job
    wanted = sum(times) + (chunks - 1) * max(times)
    assert step_ms(pipeline, planned(pipeline, "1f1b", chunks, training=False)) == wanted


@given(stages=SIZES, chunks=SIZES, data=st.data())
def test_fill_drain_is_a_flow_shop_each_way(stages, chunks, data):
    times = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    forward, backward = data.draw(times), data.draw(times)
    pipeline = Pipeline.chain(forward, backward)
    found = step_ms(pipeline, planned(pipeline, "fill-drain", chunks))
    assert found <= sum(forward) + sum(backward) + (chunks - 1) * (max(forward) + max(backward))
    assert found >= sum(forward) + sum(backward) + (chunks - 1) * max(*forward, *backward)


@given(schedule=SCHEDULES, stages=SIZES, transfer=st.integers(0, 5), gradient=st.integers(0, 5))
def test_one_micro_batch_waits_for_every_transfer(schedule, stages, transfer, gradient):
    pipeline = Pipeline.chain(
        [1] * stages, [2] * stages, transfer_ms=transfer, gradient_ms=gradient
    )
    # nobody waits for the weight halves before the first stage's
    last_half = 1 if schedule == "zero-bubble" else 2
    wanted = stages + last_half * (stages - 1) + 2 + (transfer + gradient) * (stages - 1)
    assert step_ms(pipeline, planned(pipeline, schedule, 1)) == wanted


def test_a_lane_carries_one_transfer_at_a_time():
    """Forward passes of 1 ms, transfers of 5: the second stage gets a micro-batch every 5 ms."""
    pipeline = Pipeline((0, 1), (1, 1), (0, 0), (0, 0), (Transfer(0, 1, 5),))
    timeline = simulate(pipeline, planned(pipeline, "fill-drain", 3))
    assert [t.start_ms for t in timeline.transfers] == [1, 6, 11]


def test_what_arrives_waits_until_a_buffer_is_free():
    """The last stage of 1f1b has room for one: what is sent to it waits for its backward pass."""
    pipeline = Pipeline((0, 1), (1, 1), (1, 3), (0, 0), (Transfer(0, 1, 2, 0),))
    timeline = simulate(pipeline, planned(pipeline, "1f1b", 2))
    first = next(task for task in timeline.tasks if task[:3] == (1, "backward", 0))
    second = next(t for t in timeline.transfers if t.phase == "forward" and t.micro_batch == 1)
    assert second.start_ms == first.end_ms == 7


@given(schedule=SCHEDULES, chunks=SIZES, data=st.data())
def test_a_device_runs_one_pass_at_a_time(schedule, chunks, data, strategies):
    pipeline = data.draw(strategies.pipelines())
    timeline = simulate(pipeline, planned(pipeline, schedule, chunks))
    for device in set(pipeline.places):
        mine = sorted((t.start_ms, t.end_ms) for t in timeline.tasks if t.device == device)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))


@given(schedule=SCHEDULES, chunks=SIZES, data=st.data())
def test_the_timeline_holds_the_work_and_the_step(schedule, chunks, data, strategies):
    pipeline = data.draw(strategies.pipelines())
    found = planned(pipeline, schedule, chunks)
    timeline = simulate(pipeline, found)
    work = chunks * (sum(pipeline.forward_ms) + sum(pipeline.backward_ms))
    assert sum(timeline.busy_ms.values()) == work
    assert (
        timeline.step_ms == step_ms(pipeline, found) == max(task.end_ms for task in timeline.tasks)
    )
    assert all(held <= room for held, room in zip(timeline.in_flight, found.in_flight, strict=True))


@pytest.mark.parametrize(
    ("schedule", "places"),
    [
        ("fill-drain", (0, 1, 2)),
        ("1f1b", (0, 1, 2)),
        ("zero-bubble", (0, 1, 2)),
        ("interleaved", (0, 1, 0, 1)),
    ],
)
def test_the_tables_of_the_docstring_are_what_the_simulation_gives(schedule, places):
    count = len(places)
    pipeline = Pipeline.chain(
        [1] * count, [2 if schedule == "zero-bubble" else 1] * count, places=places
    )
    timeline = simulate(pipeline, planned(pipeline, schedule, 4))
    signs = {"forward": "0123", "backward": "abcd", "weights": "ABCD"}
    for stage in range(count):
        row = ["."] * int(timeline.step_ms)
        for task in timeline.tasks:
            if task.stage == stage:
                row[int(task.start_ms)] = signs[task.phase][task.micro_batch]
        assert f"stage {stage}   {' '.join(row)}" in placer.schedule.__doc__


def test_the_table_of_steps_in_a_row_is_what_the_simulation_gives():
    pipeline = Pipeline.chain([1, 1], [2, 2], optimizer_ms=[1, 1])
    timeline = simulate(pipeline, planned(pipeline, "zero-bubble", 3), steps=2)
    signs = {"forward": "012", "backward": "abc", "weights": "ABC"}
    for stage in range(2):
        row = ["."] * int(timeline.ends_ms[-1])
        mine = [task for task in timeline.tasks if task.stage == stage]
        for task in mine:
            row[int(task.start_ms)] = signs[task.phase][task.micro_batch % 3]
        for last in (mine[8], mine[17]):
            row[int(last.end_ms)] = "o"
        assert f"stage {stage}   {' '.join(row)}" in placer.schedule.__doc__


def test_times_of_another_number_of_stages_are_refused():
    with pytest.raises(InputError, match="backward_ms has 1 entries for 2 stages"):
        Pipeline((0, 1), (1, 1), (1,), (0, 0))


def test_optimizer_times_of_another_number_of_stages_are_refused():
    with pytest.raises(InputError, match="optimizer_ms has 1 entries for 2 stages"):
        Pipeline((0, 1), (1, 1), (1, 1), (0, 0), (), (1,))


def test_a_transfer_that_runs_backwards_is_refused():
    with pytest.raises(InputError, match="does not run forwards"):
        Pipeline((0, 1), (1, 1), (1, 1), (0, 0), (Transfer(1, 0, 1),))
