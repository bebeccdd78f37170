"""The order of passes under each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from placer.errors import InputError
from placer.schedule.greedy import greedy
from placer.schedule.passes import Pass, Phase, Pipeline, Plan, Transfer, most_held
from placer.schedule.simulate import step_ms
from placer.schema import Schedule, ScheduleChoice

SHORTER = 1e-6
"""An order must save this share of a step: sums in another order, as the referee's, choose the
same."""


def in_flight(schedule: ScheduleChoice, stages: int, stage: int, chunks: int) -> int:
    """Return the most micro-batches that a stage has a use for at once in training, where each
    device has one stage.

    Args:
        schedule: the schedule; ``auto`` counts as ``1f1b``.
        stages: the number of stages.
        stage: counted from 0 in pipeline order.
        chunks: micro-batches in a batch.
    """
    if schedule == "zero-bubble":
        # A step alone would do with one less. In steady state the last stage waits until its last
        # gradients have gone all the way back and the first micro-batch of the next step has come:
        # it needs weight-gradient passes to fill that time.
        return min(chunks, 2 * stages if stages > 1 else 1)
    return least_in_flight(schedule, stages, stage, chunks)


def least_in_flight(schedule: ScheduleChoice, stages: int, stage: int, chunks: int) -> int:
    """Return the fewest micro-batches for which a stage must have room at once; see ``in_flight``.

    Only ``zero-bubble`` runs with fewer than ``in_flight`` says: each micro-batch less lengthens
    the step and saves memory, down to the number of ``1f1b``. With fewer still, no stage could work
    while its gradients are on their way.

    Args:
        schedule: the schedule; ``auto`` counts as ``1f1b``.
        stages: the number of stages.
        stage: counted from 0 in pipeline order.
        chunks: micro-batches in a batch.
    """
    return chunks if schedule == "fill-drain" else min(chunks, stages - stage)


def sharing(schedule: ScheduleChoice, stages: int, stage: int, chunks: int, room: int) -> int:
    """Return how many of the micro-batches in flight at a stage share the memory in which a
    backward pass works.

    All share one, as a backward pass leaves nothing there, but under ``zero-bubble``: the
    input-gradient pass leaves to the weight-gradient pass what that needs. With the least room a
    weight-gradient pass runs before the next input-gradient pass anyway, so that all share one.
    Each further micro-batch in the room lets one more weight-gradient pass be put off, for which
    there is memory as well.

    Args:
        schedule: the schedule.
        stages: the number of stages.
        stage: counted from 0 in pipeline order.
        chunks: micro-batches in a batch.
        room: for how many micro-batches at once the stage has room.
    """
    if schedule != "zero-bubble":
        return room
    put_off = room - least_in_flight(schedule, stages, stage, chunks) + 1
    return room // max(1, put_off)


def plan(
    schedule: Schedule,
    places: Sequence[int],
    chunks: int,
    *,
    forward_ms: Sequence[float] | None = None,
    backward_ms: Sequence[float] | None = None,
    weights_ms: Sequence[float] | None = None,
    transfers: Sequence[Transfer] = (),
    room: Sequence[int] | None = None,
    training: bool = True,
) -> Plan:
    """Which pass follows which on each device.

    Where a device has several stages, ``1f1b`` and ``zero-bubble`` do not apply, and ``fill-drain``
    is planned. ``interleaved`` is Megatron's order where the stages go round the devices equally
    often and the micro-batches come in whole rounds; else devices take what is ready (see
    ``greedy``). Where no device has several it is ``1f1b``.

    With ``transfers`` ``zero-bubble`` and ``interleaved`` are the shortest of that order and of
    those in which devices take what is ready, and what has come; ``interleaved`` also of the one in
    which passes with the longest way to the end of the step go first.

    Args:
        schedule: the schedule.
        places: by stage in pipeline order, the index of its device.
        chunks: micro-batches in a batch, at least 1.
        forward_ms: by stage; asked by ``zero-bubble`` and ``interleaved``, whose orders follow
            unlike stages. All equal if left out.
        backward_ms: by stage, both halves; twice the forward pass if left out.
        weights_ms: by stage, the weight half; half of the backward pass if left out.
        transfers: between the stages, for ``zero-bubble`` and ``interleaved``; none if left out.
        room: by stage, for how many micro-batches at once: for ``zero-bubble``, and for
            ``interleaved`` where a device has several stages. If left out, as many as ``in_flight``
            says, or as the order needs.
        training: without it there are forward passes alone, in the order of micro-batches.

    Raises:
        InputError: no stages, no micro-batches, times or room for another number of stages, or what
            is no time or no room.

    Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019; Narayanan
    et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2;
    Qi et al., ICLR 2024.
    """
    places = tuple(places)
    if not places or chunks < 1:
        raise InputError(
            f"a schedule needs a stage and a micro-batch; got stages={len(places)}, chunks={chunks}"
        )
    count = len(places)
    forward = [1.0] * count if forward_ms is None else forward_ms
    backward = [2 * time for time in forward] if backward_ms is None else backward_ms
    weights = [time / 2 for time in backward] if weights_ms is None else weights_ms
    for name, times in (
        ("forward_ms", forward),
        ("backward_ms", backward),
        ("weights_ms", weights),
    ):
        if len(times) != count:
            raise InputError(f"{name} has {len(times)} entries for {count} stages")
        _refuse_no_times(name, times)
    _refuse_no_times(
        "transfers", [time for one in transfers for time in one[2:] if time is not None]
    )
    if room is not None and (
        len(room) != count or not all(isinstance(one, int) and one >= 1 for one in room)
    ):
        raise InputError(
            f"room is {list(room)}: give a number of micro-batches, 1 or more, for each of {count} "
            "stages"
        )
    if not training:
        passes = [Pass(s, "forward", m) for s, m in _clock(count, chunks)]
        return Plan(places, chunks, tuple(passes), (1,) * count, training=False)
    alone = len(set(places)) == count
    pipeline = Pipeline(places, tuple(forward), tuple(backward), tuple(weights), tuple(transfers))
    if schedule == "zero-bubble" and alone:
        return _zero_bubble(pipeline, chunks, room)
    if schedule == "interleaved" and not alone:
        return _interleaved(pipeline, chunks, room)
    if schedule == "fill-drain" or not alone:
        passes = [Pass(s, "forward", m) for s, m in _clock(count, chunks)]
        passes += [Pass(count - 1 - s, "backward", m) for s, m in _clock(count, chunks)]
        return Plan(places, chunks, tuple(passes), (chunks,) * count)
    return _one_forward_one_backward(places, chunks)


def _refuse_no_times(name: str, times: Sequence[float]) -> None:
    for time in times:
        if not 0 <= time < inf:
            raise InputError(f"{name} has {time}: give finite times of 0 or more, in milliseconds")


def _zero_bubble(pipeline: Pipeline, chunks: int, given: Sequence[int] | None) -> Plan:
    """Return the shorter of two orders in which devices take what is ready: with and without regard
    to transfers.
    """
    count = len(pipeline.places)
    room = given or [in_flight("zero-bubble", count, stage, chunks) for stage in range(count)]
    shared = [sharing("zero-bubble", count, stage, chunks, held) for stage, held in enumerate(room)]
    inputs = [
        whole - half for whole, half in zip(pipeline.backward_ms, pipeline.weights_ms, strict=True)
    ]
    times: dict[Phase, Sequence[float]] = {
        "forward": pipeline.forward_ms,
        "backward": inputs,
        "weights": pipeline.weights_ms,
    }
    # Micro-batches that share a memory follow one another after at least so many others: see
    # Plan.backward_memory.
    put_off = [held // among for held, among in zip(room, shared, strict=True)]
    orders = _greedy(pipeline, times, chunks, room, put_off)
    plans = [
        Plan(pipeline.places, chunks, issue, tuple(room), split=True, sharing=tuple(shared))
        for issue in orders
    ]
    return _shortest(pipeline, plans)


def _greedy(
    pipeline: Pipeline,
    times: dict[Phase, Sequence[float]],
    chunks: int,
    room: Sequence[int],
    put_off: Sequence[int] | None = None,
) -> list[tuple[Pass, ...]]:
    """An order that does not know of transfers, and one that does."""
    known = [(), pipeline.transfers] if pipeline.transfers else [()]
    return [
        tuple(greedy(pipeline.places, times, chunks, room, transfers, put_off=put_off))
        for transfers in known
    ]


def _shortest(pipeline: Pipeline, plans: Sequence[Plan]) -> Plan:
    """The order with the shortest step; of those that are about as long, the first."""
    best = plans[0]
    least_ms = step_ms(pipeline, best) if len(plans) > 1 else 0.0
    for other in plans[1:]:
        if (time_ms := step_ms(pipeline, other)) < (1 - SHORTER) * least_ms:
            best, least_ms = other, time_ms
    return best


def _one_forward_one_backward(places: tuple[int, ...], chunks: int) -> Plan:
    room = tuple(in_flight("1f1b", len(places), stage, chunks) for stage in range(len(places)))
    return Plan(
        places,
        chunks,
        merged([list(_fill_turn_drain(s, held, chunks)) for s, held in enumerate(room)]),
        room,
    )


def _fill_turn_drain(stage: int, held: int, chunks: int) -> Iterator[Pass]:
    """Fill up to so many micro-batches, then one backward pass for every forward pass, then drain."""
    for micro_batch in range(held):
        yield Pass(stage, "forward", micro_batch)
    for micro_batch in range(chunks):
        yield Pass(stage, "backward", micro_batch)
        if micro_batch + held < chunks:
            yield Pass(stage, "forward", micro_batch + held)


def _clock(stages: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Stage and micro-batch, tick by tick, the latest stage first within a tick."""
    for tick in range(stages + chunks - 1):
        for stage in reversed(range(max(0, tick - chunks + 1), min(stages, tick + 1))):
            yield stage, tick - stage


def _interleaved(pipeline: Pipeline, chunks: int, given: Sequence[int] | None) -> Plan:
    """Megatron's order, if it applies, or one that devices find for themselves: the shortest."""
    return _shortest(pipeline, _interleaved_plans(pipeline, chunks, given))


def roomy_plans(pipeline: Pipeline, chunks: int) -> list[Plan]:
    """The orders of ``interleaved`` where devices have several stages: as ``plan`` tries them, and
    one for much memory.

    In that one a stage may hold all micro-batches at once, so that nothing waits for room: passes
    with the longest way to the end of the step go first.

    Args:
        pipeline: the stages, of which a device has several.
        chunks: micro-batches in a batch.
    """
    plans = _interleaved_plans(pipeline, chunks, None)
    count = len(pipeline.places)
    issue = tuple(
        greedy(
            pipeline.places, _whole(pipeline), chunks, [chunks] * count, pipeline.transfers, True
        )
    )
    return [*plans, Plan(pipeline.places, chunks, issue, most_held(issue, count, "backward"))]


def _interleaved_plans(pipeline: Pipeline, chunks: int, given: Sequence[int] | None) -> list[Plan]:
    places, count = pipeline.places, len(pipeline.places)
    devices = len(set(places))
    room = given or [in_flight("interleaved", count, stage, chunks) for stage in range(count)]
    found: list[Plan] = []
    if places == places[:devices] * (count // devices) and chunks % devices == 0:
        passes = merged(
            [list(_megatron(rank, devices, count // devices, chunks)) for rank in range(devices)]
        )
        held = most_held(passes, count, "backward")
        if given is None or all(one <= most for one, most in zip(held, given, strict=True)):
            found.append(Plan(places, chunks, passes, tuple(given or held)))
    if not found or pipeline.transfers:
        issues = _greedy(pipeline, _whole(pipeline), chunks, room)
        if pipeline.transfers:
            issues.append(
                tuple(greedy(places, _whole(pipeline), chunks, room, pipeline.transfers, True))
            )
        for issue in issues:
            found.append(
                Plan(places, chunks, issue, tuple(given or most_held(issue, count, "backward")))
            )
    return found


def _whole(pipeline: Pipeline) -> dict[Phase, Sequence[float]]:
    """The times of passes whose backward passes are not in halves."""
    return {"forward": pipeline.forward_ms, "backward": pipeline.backward_ms}


def _megatron(rank: int, devices: int, per_device: int, chunks: int) -> Iterator[Pass]:
    """The passes of one device: rounds of as many micro-batches as devices go through its stages in
    turn.

    Before the first backward pass it runs two forward passes for each device behind it and a round
    for each further stage of its own, then one forward and one backward in turn.
    """
    total = chunks * per_device

    def nth(number: int, phase: Phase) -> Pass:
        turn, place = divmod(number, devices * per_device)
        nth_stage, within = divmod(place, devices)
        if phase == "backward":
            nth_stage = per_device - 1 - nth_stage
        return Pass(nth_stage * devices + rank, phase, turn * devices + within)

    ahead = min(2 * (devices - rank - 1) + (per_device - 1) * devices, total)
    for number in range(ahead):
        yield nth(number, "forward")
    for number in range(total):
        if ahead + number < total:
            yield nth(ahead + number, "forward")
        yield nth(number, "backward")


def merged(orders: Sequence[Sequence[Pass]]) -> tuple[Pass, ...]:
    """One order of all passes, each after what it waits for, from the order on each device.

    A forward pass waits for that of the stage before, a backward pass for that of the stage behind,
    the last stage's for its own forward pass.

    Raises:
        InputError: some wait for each other for ever.
    """
    stages = 1 + max((item.stage for order in orders for item in order), default=0)
    done: set[Pass] = set()
    issue: list[Pass] = []
    place = [0] * len(orders)
    while len(issue) < sum(map(len, orders)):
        heads = [
            (index, order[place[index]])
            for index, order in enumerate(orders)
            if place[index] < len(order)
        ]
        ready = [(index, item) for index, item in heads if _is_ready(item, stages, done)]
        if not ready:
            stage, phase, micro_batch = heads[0][1]
            raise InputError(
                f"stage {stage} waits for ever: the input of {phase} {micro_batch} is never made"
            )
        for index, item in ready:
            done.add(item)
            issue.append(item)
            place[index] += 1
    return tuple(issue)


def _is_ready(item: Pass, stages: int, done: set[Pass]) -> bool:
    stage, phase, micro_batch = item
    if phase == "forward":
        return not stage or Pass(stage - 1, "forward", micro_batch) in done
    if stage == stages - 1:
        return Pass(stage, "forward", micro_batch) in done
    return Pass(stage + 1, "backward", micro_batch) in done
