"""Orders against what a schedule must be."""

import re
from collections import defaultdict
from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placer import schedule as schedules
from placer.errors import InputError
from placer.schedule import (
    Pass,
    Pipeline,
    Plan,
    Transfer,
    in_flight,
    least_in_flight,
    merged,
    plan,
    roomy_plans,
    simulate,
    step_ms,
)
from placer.schedule.greedy import greedy

SCHEDULES = st.sampled_from(["fill-drain", "1f1b", "zero-bubble", "interleaved"])
ONE_EACH = st.sampled_from(["fill-drain", "1f1b", "zero-bubble"])
SIZES = st.integers(1, 7)
PLACES = st.lists(st.integers(0, 3), min_size=1, max_size=7)


@given(schedule=SCHEDULES, places=PLACES, chunks=SIZES)
def test_every_stage_runs_every_micro_batch_once_each_way(schedule, places, chunks):
    found = plan(schedule, places, chunks)
    phases = ["forward", "backward", "weights"] if found.split else ["forward", "backward"]
    wanted = {
        Pass(s, phase, m) for s in range(len(places)) for phase in phases for m in range(chunks)
    }
    assert len(found.issue) == len(wanted) and set(found.issue) == wanted


@given(schedule=SCHEDULES, places=PLACES, chunks=SIZES, data=st.data())
def test_a_pass_is_issued_after_all_that_it_waits_for(schedule, places, chunks, data):
    times = data.draw(st.lists(st.integers(0, 9), min_size=len(places), max_size=len(places)))
    place = {
        item: number
        for number, item in enumerate(plan(schedule, places, chunks, forward_ms=times).issue)
    }
    for stage, phase, m in place:
        if phase == "forward" and stage:
            assert place[stage - 1, "forward", m] < place[stage, "forward", m]
        if phase == "backward":
            before = (
                (stage + 1, "backward", m) if stage + 1 < len(places) else (stage, "forward", m)
            )
            assert place[before] < place[stage, "backward", m]
        if phase == "weights":
            assert place[stage, "backward", m] < place[stage, "weights", m]


@given(schedule=SCHEDULES, places=PLACES, chunks=SIZES)
def test_no_stage_begins_a_micro_batch_that_it_has_no_room_for(schedule, places, chunks):
    found = plan(schedule, places, chunks)
    last = "weights" if found.split else "backward"
    held = [0] * len(places)
    for stage, phase, _ in found.issue:
        held[stage] += {"forward": 1, last: -1}.get(phase, 0)
        assert held[stage] <= found.in_flight[stage] <= chunks


@given(schedule=ONE_EACH, stages=SIZES, chunks=SIZES)
def test_with_one_stage_a_device_there_is_the_room_that_memory_is_reckoned_by(
    schedule, stages, chunks
):
    wanted = tuple(in_flight(schedule, stages, stage, chunks) for stage in range(stages))
    assert plan(schedule, range(stages), chunks).in_flight == wanted


@settings(max_examples=80, deadline=None)
@given(chunks=st.integers(1, 7), data=st.data())
def test_an_interleaved_order_that_knows_of_transfers_runs_all_after_what_it_waits_for(
    chunks, data, strategies, clock
):
    """Values that pass from a stage to another of the same device are no transfers: those go in the
    stages' order."""
    pipeline = data.draw(strategies.pipelines())
    count = len(pipeline.places)
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    given_room = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=count, max_size=count))
    found = plan(
        "interleaved",
        pipeline.places,
        chunks,
        **times,
        transfers=pipeline.transfers,
        room=given_room,
    )
    place = {item: number for number, item in enumerate(found.issue)}
    pairs = {(one.source, one.target): one.gradient_ms is not None for one in pipeline.transfers}
    together = [
        (a, b) for b in range(count) for a in range(b) if pipeline.places[a] == pipeline.places[b]
    ]
    for m in range(chunks):
        for source, target in (*pairs, *together):
            assert place[source, "forward", m] < place[target, "forward", m]
            if pairs.get((source, target), True):
                assert place[target, "backward", m] < place[source, "backward", m]
        for stage in range(count):
            assert place[stage, "forward", m] < place[stage, "backward", m]
            if not any(source == stage and back for (source, _), back in pairs.items()):
                assert place[count - 1, "forward", m] < place[stage, "backward", m]
    held = [0] * count
    for stage, phase, _ in found.issue:
        held[stage] += 1 if phase == "forward" else -1
        assert held[stage] <= found.in_flight[stage]
    if given_room is not None and len(set(pipeline.places)) < count:
        assert list(found.in_flight) == given_room
    assert clock(pipeline, found) < inf


@settings(max_examples=40, deadline=None)
@given(
    times=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    wait=st.integers(0, 9),
    rounds=st.integers(1, 2),
)
def test_of_megatrons_order_and_one_that_knows_of_transfers_the_shorter_is_taken(
    times, wait, rounds, clock
):
    pipeline = Pipeline.chain(
        times,
        [2 * time for time in times],
        places=(0, 1, 2) * 2,
        transfer_ms=wait,
        gradient_ms=wait,
    )
    asked = {"forward_ms": pipeline.forward_ms, "backward_ms": pipeline.backward_ms}
    megatron = plan("interleaved", pipeline.places, 3 * rounds, **asked)
    told = plan("interleaved", pipeline.places, 3 * rounds, **asked, transfers=pipeline.transfers)
    assert clock(pipeline, told) <= clock(pipeline, megatron)


def test_an_interleaved_order_that_knows_of_slow_transfers_does_something_else_meanwhile(clock):
    forward = [2, 1, 1, 1, 1, 1]
    pipeline = Pipeline.chain(
        forward,
        [2 * time for time in forward],
        places=(0, 1, 0, 2, 0, 1),
        transfer_ms=4,
        gradient_ms=4,
    )
    asked = {"forward_ms": pipeline.forward_ms, "backward_ms": pipeline.backward_ms}
    blind = plan("interleaved", pipeline.places, 8, **asked)
    told = plan("interleaved", pipeline.places, 8, **asked, transfers=pipeline.transfers)
    assert clock(pipeline, told) < 0.7 * clock(pipeline, blind)


@pytest.mark.parametrize("room", [[2], [1, 0, 1], [1, 1.5, 1], [1, None, 1]])
def test_what_is_no_room_for_each_stage_is_refused(room):
    with pytest.raises(
        InputError,
        match=r"room is \[.*\]: give a number of micro-batches, 1 or more, for each of 3",
    ):
        plan("interleaved", [0, 1, 0], 4, room=room)


@settings(max_examples=80, deadline=None)
@given(chunks=st.integers(1, 9), data=st.data())
def test_zero_bubble_runs_every_pass_in_whatever_room_it_is_given(chunks, data, strategies, clock):
    pipeline = data.draw(strategies.pipelines(alone=True))
    count = len(pipeline.places)
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    room = data.draw(st.lists(st.integers(1, chunks), min_size=count, max_size=count))
    found = plan(
        "zero-bubble", pipeline.places, chunks, **times, transfers=pipeline.transfers, room=room
    )
    phases = ("forward", "backward", "weights")
    assert set(found.issue) == {
        Pass(s, phase, m) for s in range(count) for phase in phases for m in range(chunks)
    }
    assert list(found.in_flight) == room
    held = [0] * count
    for stage, phase, _ in found.issue:
        held[stage] += {"forward": 1, "backward": 0, "weights": -1}[phase]
        assert held[stage] <= room[stage]
    assert step_ms(pipeline, found) == pytest.approx(clock(pipeline, found))


@settings(max_examples=80, deadline=None)
@given(chunks=st.integers(1, 12), data=st.data())
def test_no_input_half_works_in_a_memory_that_a_weight_half_still_reads(chunks, data, strategies):
    """Micro-batch m has slot m modulo the room; slots that share a memory must not be between
    halves at once."""
    pipeline = data.draw(strategies.pipelines(alone=True))
    count = len(pipeline.places)
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    room = data.draw(st.none() | st.lists(st.integers(1, chunks), min_size=count, max_size=count))
    found = plan(
        "zero-bubble", pipeline.places, chunks, **times, transfers=pipeline.transfers, room=room
    )
    memories = [found.backward_memory(stage) for stage in range(count)]
    for stage, (held, numbers) in enumerate(zip(found.in_flight, memories, strict=True)):
        assert len(numbers) == held and max(numbers) + 1 == -(-held // found.sharing[stage])
    reading = [set() for _ in range(count)]
    for stage, phase, m in found.issue:
        memory = memories[stage][m % found.in_flight[stage]]
        if phase == "backward":
            assert memory not in reading[stage]
            reading[stage].add(memory)
        elif phase == "weights":
            reading[stage].remove(memory)


def test_with_the_room_of_1f1b_one_memory_does_for_the_input_halves_of_all_micro_batches():
    found = plan("zero-bubble", range(4), 8, room=[4, 3, 2, 1])
    assert [set(found.backward_memory(stage)) for stage in range(4)] == [{0}] * 4
    wide = plan("zero-bubble", range(4), 8, room=[5, 6, 4, 4])
    assert [wide.backward_memory(stage) for stage in range(4)] == [
        # two weight halves may be put off: two of 5 micro-batches share
        [0, 1, 0, 1, 2],
        [0, 1, 2, 3, 4, 5],  # four: no two of 6 are so far apart, round and round
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_less_room_zero_bubble_has_the_longer_it_waits(stages, rounds):
    """Passes of 1 ms each. 1F1B waits 3 (S - 1) ms, room S - p 2 (S - 1), ZB-H1's S about (S - 1),
    2 S just that."""
    chunks, pipeline = rounds * stages, Pipeline.chain([1] * stages, [2] * stages)
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    least = [least_in_flight("zero-bubble", stages, stage, chunks) for stage in range(stages)]
    assert least == [in_flight("1f1b", stages, stage, chunks) for stage in range(stages)]
    waits = [
        step_ms(pipeline, plan("zero-bubble", pipeline.places, chunks, room=room, **times))
        - 3 * chunks
        for room in (least, [min(stages, chunks)] * stages, None)
    ]
    assert step_ms(pipeline, plan("1f1b", pipeline.places, chunks)) - 3 * chunks == 3 * (stages - 1)
    assert waits[0] == 2 * (stages - 1) and waits[2] == stages - 1
    assert stages - 1 <= waits[1] <= stages


def test_the_timelines_that_the_documentation_draws_are_those_that_are_simulated():
    """Three stages, 4 micro-batches; of 1F1B beside zero-bubble, too, whose backward passes take
    twice as long."""
    row = r" +stage {} +((?:\S )+\S)(?:  .*)?$\n?"
    drawn = re.findall(
        r"^    (\S.*?)" + "".join(map(row.format, range(3))), schedules.__doc__, re.M
    )
    played = [*((order, [1] * 3, None) for order in ("fill-drain", "1f1b"))]
    played += [("zero-bubble", [2] * 3, room) for room in ((4, 4, 4), (3, 3, 3), (3, 2, 1))] + [
        ("1f1b", [2] * 3, None)
    ]
    assert [title for title, *_ in drawn[2:5]] == ["room 2 S", "room S", "room S - p"]
    # interleaved has 4 stages
    for (title, *rows), (order, backward, room) in zip(drawn, played, strict=False):
        pipeline = Pipeline.chain([1] * 3, backward)
        times = {
            name: getattr(pipeline, name)
            for name in ("forward_ms", "backward_ms", "weight_grad_ms")
        }
        found = simulate(pipeline, plan(order, pipeline.places, 4, room=room, **times))
        for stage, row in enumerate(rows):
            assert row.replace(" ", "").rstrip(".") == _drawn(found, stage), (title, stage)


def _drawn(timeline, stage):
    """Draw digits for forward, letters for backward, capitals for weight-gradient passes."""
    row = ["."] * int(timeline.step_ms)
    for task in timeline.tasks:
        for tick in range(int(task.start_ms), int(task.end_ms)) if task.stage == stage else ():
            row[tick] = {"forward": "0123", "backward": "abcd", "weights": "ABCD"}[task.phase][
                task.micro_batch
            ]
    return "".join(row).rstrip(".")


@settings(max_examples=80, deadline=None)
@given(chunks=st.integers(1, 9), data=st.data())
def test_an_order_that_knows_of_transfers_makes_no_step_longer(chunks, data, strategies, clock):
    pipeline = data.draw(strategies.pipelines(alone=True))
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    blind = plan("zero-bubble", pipeline.places, chunks, **times)
    told = plan("zero-bubble", pipeline.places, chunks, **times, transfers=pipeline.transfers)
    assert clock(pipeline, told) <= clock(pipeline, blind)
    assert told.in_flight == blind.in_flight


@settings(max_examples=80, deadline=None)
@given(chunks=st.integers(1, 7), data=st.data())
def test_an_interleaved_order_that_knows_of_transfers_makes_no_step_longer(
    chunks, data, strategies, clock
):
    pipeline = data.draw(strategies.pipelines())
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    blind = plan("interleaved", pipeline.places, chunks, **times)
    told = plan("interleaved", pipeline.places, chunks, **times, transfers=pipeline.transfers)
    assert clock(pipeline, told) <= clock(pipeline, blind)


def test_an_order_that_knows_of_transfers_hides_them(clock):
    # Buffers are few: values can leave for one only when the weight half of the micro-batch that
    # had it is done.
    halves = (2.7, 2.8), (0.8, 0.72)
    backward = tuple(map(sum, zip(*halves, strict=True)))
    pipeline = Pipeline((0, 1), (1.9, 1.9), backward, halves[1], (Transfer(0, 1, 0.3, 0.3),))
    times = {
        name: getattr(pipeline, name) for name in ("forward_ms", "backward_ms", "weight_grad_ms")
    }
    blind, told = (
        clock(pipeline, plan("zero-bubble", (0, 1), 8, **times, transfers=known))
        for known in ((), pipeline.transfers)
    )
    assert told < 0.98 * blind


@settings(max_examples=80, deadline=None)
@given(chunks=st.integers(1, 6), data=st.data())
def test_no_pass_begins_where_one_that_somebody_waits_for_is_ready(chunks, data, strategies):
    drawn = data.draw(strategies.pipelines(alone=True))
    longer = {
        name: tuple(time + 1 for time in getattr(drawn, name))
        for name in ("forward_ms", "weight_grad_ms")
    }
    longer["transfers"] = tuple(
        one._replace(forward_ms=one.forward_ms + 1) for one in drawn.transfers
    )
    pipeline = replace(drawn, backward_ms=tuple(time + 2 for time in drawn.backward_ms), **longer)
    count = len(pipeline.places)
    assume(pipeline.transfers)
    room = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    inputs = [
        whole - half
        for whole, half in zip(pipeline.backward_ms, pipeline.weight_grad_ms, strict=True)
    ]
    times = {"forward": pipeline.forward_ms, "backward": inputs, "weights": pipeline.weight_grad_ms}
    order = greedy(pipeline.places, times, chunks, room, pipeline.transfers)
    shown = simulate(pipeline, Plan(pipeline.places, chunks, tuple(order), tuple(room), split=True))
    ends = {(task.stage, task.phase, task.micro_batch): task.end_ms for task in shown.tasks}
    came = defaultdict(list)
    for one in shown.transfers:
        came[one.target, one.phase, one.micro_batch].append(one.end_ms)

    def ready(stage, phase, m):
        times = list(came[stage, phase, m])
        if phase == "weights":
            return ends[stage, "backward", m]
        if phase == "backward":
            return max(times or [ends[count - 1, "forward", m]])
        if m >= room[stage]:
            times.append(ends[stage, "weights", m - room[stage]])
        return max(times, default=0)

    for task in shown.tasks:
        waited_for = any(
            one.target == task.stage and one.gradient_ms is not None for one in pipeline.transfers
        )
        urgency = (
            ["backward", "forward", "weights"] if waited_for else ["forward", "weights", "backward"]
        )
        for phase in urgency[: urgency.index(task.phase)]:
            later = [
                t
                for t in shown.tasks
                if (t.stage, t.phase) == (task.stage, phase) and t.start_ms >= task.end_ms
            ]
            if later:
                number = min(other.micro_batch for other in later)
                assert ready(task.stage, phase, number) > task.start_ms


def test_a_device_with_the_first_stage_and_the_last_leaves_to_the_end_what_nobody_waits_for():
    """It waits 3 ms for the last stage's first micro-batch, and then no more: as short as any order
    can be."""
    forward, backward = (1.0, 4.0, 4.0, 10.0), (8.0, 8.0, 8.0, 20.0)
    transfers = tuple(Transfer(stage, stage + 1, 0.0, 0.0) for stage in range(3))
    pipeline = Pipeline(
        (0, 1, 2, 0), forward, backward, tuple(time / 2 for time in backward), transfers
    )
    *narrow, roomy = roomy_plans(pipeline, 6)
    assert simulate(pipeline, roomy).step_ms == 3 + 6 * (1 + 10 + 8 + 20)
    assert all(simulate(pipeline, other).step_ms > 237 for other in narrow)
    assert {other.in_flight for other in narrow} == {(4, 3, 2, 1)} and roomy.in_flight == (
        6,
        6,
        6,
        6,
    )


@settings(max_examples=80, deadline=None)
@given(chunks=SIZES, data=st.data())
def test_every_interleaved_order_runs_every_pass_once_after_what_it_waits_for(
    chunks, data, strategies
):
    pipeline = data.draw(strategies.pipelines(alone=False))
    assume(pipeline.transfers)
    for found in roomy_plans(pipeline, chunks):
        wanted = {
            Pass(s, way, m)
            for s in range(len(pipeline.places))
            for way in ("forward", "backward")
            for m in range(chunks)
        }
        assert len(found.issue) == len(wanted) and set(found.issue) == wanted
        simulate(pipeline, found)


def test_1f1b_holds_fewer_micro_batches_the_later_the_stage():
    assert [in_flight("1f1b", 4, stage, 8) for stage in range(4)] == [4, 3, 2, 1]


def test_fill_drain_holds_all_micro_batches_everywhere():
    assert [in_flight("fill-drain", 4, stage, 8) for stage in range(4)] == [8, 8, 8, 8]


def test_zero_bubble_holds_two_for_every_stage():
    assert [in_flight("zero-bubble", 4, stage, 12) for stage in range(4)] == [8, 8, 8, 8]


def test_under_zero_bubble_a_single_stage_waits_for_nobody_and_holds_one():
    assert in_flight("zero-bubble", 1, 0, 12) == 1


@given(stages=SIZES, chunks=SIZES)
def test_interleaving_one_stage_a_device_is_1f1b(stages, chunks):
    assert plan("interleaved", range(stages), chunks) == plan("1f1b", range(stages), chunks)


def test_interleaved_holds_what_megatron_does():
    """Of 4 devices with 2 stages each, device r runs 2 (3 - r) + 4 passes ahead, and one more
    before it goes back."""
    found = plan("interleaved", (0, 1, 2, 3) * 2, 8)
    for device, order in found.by_device().items():
        held = most = 0
        for _, phase, _ in order:
            held += 1 if phase == "forward" else -1
            most = max(most, held)
        assert most == 2 * (3 - device) + 4 + 1


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_schedules_for_one_stage_a_device_drain_where_a_device_has_several(schedule):
    assert plan(schedule, [0, 1, 0], 4) == plan("fill-drain", [0, 1, 0], 4)


@given(stages=SIZES, chunks=SIZES)
def test_without_training_there_are_forward_passes_alone(stages, chunks):
    found = plan("1f1b", range(stages), chunks, training=False)
    assert {item.phase for item in found.issue} == {"forward"} and len(
        found.issue
    ) == stages * chunks


def test_a_schedule_without_stages_is_refused():
    with pytest.raises(InputError, match="stages=0, chunks=4"):
        plan("1f1b", [], 4)


def test_times_of_another_number_of_stages_are_refused():
    with pytest.raises(InputError, match="weight_grad_ms has 1 entries for 2 stages"):
        plan("zero-bubble", [0, 1], 4, weight_grad_ms=[1.0])


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(time):
    for wrong in ({"forward_ms": [time, 1.0]}, {"transfers": [Transfer(0, 1, 1.0, time)]}):
        with pytest.raises(
            InputError, match=f"{next(iter(wrong))} has {time}: give finite times of 0 or more"
        ):
            plan("zero-bubble", [0, 1], 4, **wrong)


def test_passes_that_wait_for_each_other_are_refused():
    with pytest.raises(InputError, match="stage 0 waits for ever: the input of backward 0"):
        merged(
            [
                [Pass(0, "backward", 0), Pass(0, "forward", 0)],
                [Pass(1, "forward", 0), Pass(1, "backward", 0)],
            ]
        )


@given(
    places=PLACES,
    chunks=SIZES,
    schedule=st.sampled_from(["zero-bubble", "interleaved"]),
    data=st.data(),
)
def test_no_order_hangs_on_the_last_digit_of_a_sum(places, chunks, schedule, data):
    """0.1 + 0.2 is as long as 0.3, whoever adds it up in whichever order."""
    layers = st.lists(st.integers(1, 9), min_size=1, max_size=5)
    tenths = data.draw(st.lists(layers, min_size=len(places), max_size=len(places)))
    there = [sum(tenth / 10 for tenth in each) for each in tenths]
    back = [sum(tenth / 10 for tenth in reversed(each)) for each in tenths]
    assert plan(schedule, places, chunks, forward_ms=there) == plan(
        schedule, places, chunks, forward_ms=back
    )


@given(
    order=st.permutations(range(5)),
    times=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    chunks=st.integers(2, 7),
    schedule=st.sampled_from(["zero-bubble", "interleaved"]),
    turns=st.integers(1, 2),
)
def test_no_order_hangs_on_how_devices_are_numbered(order, times, chunks, schedule, turns):
    """Also where passes take no time and devices are ready at once: devices that are alike can be
    exchanged."""
    asked = {"chunks": chunks, "forward_ms": times * turns}
    assert (
        plan(schedule, order * turns, **asked).issue
        == plan(schedule, [*range(5)] * turns, **asked).issue
    )


def test_a_repeated_transfer_takes_as_long_as_all_of_them():
    assert Transfer(0, 1, 0.5, 0.25).repeated(3) == Transfer(0, 1, 1.5, 0.75)
    assert Transfer(0, 1, 0.5).repeated(3) == Transfer(0, 1, 1.5)
