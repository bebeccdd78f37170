"""Schedules against closed forms, and against what a schedule must be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import InputError
from placer.schedule import Task, in_flight, orders, simulate

SCHEDULES = st.sampled_from(["fill-drain", "1f1b"])
SIZES = st.integers(1, 7)


@given(schedule=SCHEDULES, stages=SIZES, chunks=SIZES)
def test_every_stage_runs_every_micro_batch_once_each_way(schedule, stages, chunks):
    for order in orders(schedule, stages, chunks):
        wanted = {(phase, micro_batch) for phase in ("forward", "backward") for micro_batch in range(chunks)}
        assert len(order) == 2 * chunks and set(order) == wanted


@given(schedule=SCHEDULES, stages=SIZES, chunks=SIZES, forward=st.integers(1, 5), backward=st.integers(1, 5))
def test_equal_stages_take_chunks_plus_stages_less_one_rounds(schedule, stages, chunks, forward, backward):
    timeline = simulate(orders(schedule, stages, chunks), [forward] * stages, [backward] * stages)
    assert timeline.step_ms == (chunks + stages - 1) * (forward + backward)


@given(schedule=SCHEDULES, stages=SIZES, chunks=SIZES)
def test_equal_stages_idle_for_stages_less_one_rounds(schedule, stages, chunks):
    timeline = simulate(orders(schedule, stages, chunks), [1.0] * stages, [2.0] * stages)
    assert timeline.bubble == pytest.approx((stages - 1) / (chunks + stages - 1))


@given(schedule=SCHEDULES, stages=SIZES, chunks=SIZES, data=st.data())
def test_no_stage_holds_more_than_in_flight_says(schedule, stages, chunks, data):
    times = st.lists(st.floats(0.1, 9), min_size=stages, max_size=stages)
    timeline = simulate(orders(schedule, stages, chunks), data.draw(times), data.draw(times))
    assert list(timeline.in_flight) == [in_flight(schedule, stages, stage, chunks) for stage in range(stages)]


def test_1f1b_holds_fewer_micro_batches_the_later_the_stage():
    assert [in_flight("1f1b", 4, stage, 8) for stage in range(4)] == [4, 3, 2, 1]


def test_fill_drain_holds_all_micro_batches_everywhere():
    assert [in_flight("fill-drain", 4, stage, 8) for stage in range(4)] == [8, 8, 8, 8]


@given(stages=SIZES, chunks=SIZES, data=st.data())
def test_forward_only_is_a_permutation_flow_shop(stages, chunks, data):
    times = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    order = orders("1f1b", stages, chunks, training=False)
    # equal jobs in a flow shop: one job's way, and the slowest machine for every further job
    assert simulate(order, times, times).step_ms == sum(times) + (chunks - 1) * max(times)


@given(schedule=SCHEDULES, stages=SIZES, transfer=st.integers(0, 5), gradient=st.integers(0, 5))
def test_one_micro_batch_waits_for_every_transfer(schedule, stages, transfer, gradient):
    timeline = simulate(
        orders(schedule, stages, 1), [1] * stages, [2] * stages, [transfer] * (stages - 1), [gradient] * (stages - 1)
    )
    assert timeline.step_ms == 3 * stages + (transfer + gradient) * (stages - 1)


@given(schedule=SCHEDULES, stages=SIZES, chunks=SIZES, data=st.data())
def test_no_task_starts_before_its_input_is_there(schedule, stages, chunks, data):
    times = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    forward, backward, transfer, gradient = (data.draw(times) for _ in range(4))
    timeline = simulate(orders(schedule, stages, chunks), forward, backward, transfer[:-1], gradient[:-1])
    start = {task[:3]: task.start_ms for task in timeline.tasks}
    end = {task[:3]: task.end_ms for task in timeline.tasks}
    for stage, phase, micro_batch in start:
        if phase == "forward" and stage > 0:
            assert start[stage, phase, micro_batch] >= end[stage - 1, phase, micro_batch] + transfer[stage - 1]
        if phase == "backward":
            assert start[stage, phase, micro_batch] >= end[stage, "forward", micro_batch]
            if stage < stages - 1:
                assert start[stage, phase, micro_batch] >= end[stage + 1, phase, micro_batch] + gradient[stage]


@given(schedule=SCHEDULES, stages=SIZES, chunks=SIZES)
def test_a_stage_runs_one_task_at_a_time(schedule, stages, chunks):
    timeline = simulate(orders(schedule, stages, chunks), [1.0] * stages, [2.0] * stages)
    for stage in range(stages):
        mine = [task for task in timeline.tasks if task.stage == stage]
        assert all(before.end_ms <= after.start_ms for before, after in pairwise(mine))


def test_the_tables_of_the_docstring_are_what_the_simulation_gives():
    import placer.schedule as module

    for schedule in ("fill-drain", "1f1b"):
        timeline = simulate(orders(schedule, 3, 4), [1] * 3, [1] * 3)
        for stage in range(3):
            row = ["."] * int(timeline.step_ms)
            for task in timeline.tasks:
                if task.stage == stage:
                    row[int(task.start_ms)] = ("0123" if task.phase == "forward" else "abcd")[task.micro_batch]
            assert " ".join(row) in module.__doc__, (schedule, " ".join(row))


def test_a_schedule_without_stages_is_refused():
    with pytest.raises(InputError, match="stages=0, chunks=4"):
        orders("1f1b", 0, 4)


def test_tasks_that_wait_for_each_other_are_refused():
    first, second = [Task("backward", 0), Task("forward", 0)], [Task("forward", 0), Task("backward", 0)]
    with pytest.raises(InputError, match="stage 0 waits for ever"):
        simulate([first, second], [1, 1], [1, 1])


def test_times_of_another_number_of_stages_are_refused():
    with pytest.raises(InputError, match="forward_ms has 1 entries for 2 stages"):
        simulate(orders("1f1b", 2, 2), [1], [1, 1])
