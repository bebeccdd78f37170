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
"""Minimum relative gain of another order. Sums in another order, as the referee's, then select the
same one."""


def in_flight(schedule: ScheduleChoice, stages: int, stage: int, chunks: int) -> int:
    """Return the largest useful number of micro-batches in flight at a stage in training.

    This applies where each device has one stage.

    Args:
        schedule: the schedule; ``auto`` counts as ``1f1b``.
        stages: the number of stages.
        stage: from 0, in pipeline order.
        chunks: micro-batches in a batch.
    """
    if schedule == "zero-bubble":
        # An isolated step would need one fewer. In steady state, the last stage waits until its
        # last gradients have reached the first stage and the first micro-batch of the next step has
        # come. It needs weight-gradient passes to fill that time.
        return min(chunks, 2 * stages if stages > 1 else 1)
    return least_in_flight(schedule, stages, stage, chunks)


def least_in_flight(schedule: ScheduleChoice, stages: int, stage: int, chunks: int) -> int:
    """Return the smallest feasible number of micro-batches in flight; see ``in_flight``.

    Only ``zero-bubble`` works with fewer than ``in_flight``: each micro-batch fewer lengthens the
    step and saves memory, down to the number of ``1f1b``. With even fewer, no stage could work
    while its gradients are on their way.

    Args:
        schedule: the schedule; ``auto`` counts as ``1f1b``.
        stages: the number of stages.
        stage: from 0, in pipeline order.
        chunks: micro-batches in a batch.
    """
    return chunks if schedule == "fill-drain" else min(chunks, stages - stage)


def sharing(schedule: ScheduleChoice, stages: int, stage: int, chunks: int, room: int) -> int:
    """Return how many micro-batches in flight share the memory of one backward pass.

    Usually all of them, because a backward pass leaves nothing behind. Under ``zero-bubble``, the
    input-gradient pass leaves data for the weight-gradient pass. With the least room, a
    weight-gradient pass runs before the next input-gradient pass, so all still share one. Each
    further micro-batch lets one more weight-gradient pass be deferred, which takes its own memory.

    Args:
        schedule: the schedule.
        stages: the number of stages.
        stage: from 0, in pipeline order.
        chunks: micro-batches in a batch.
        room: the maximum number of micro-batches in flight at the stage.
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
    weight_grad_ms: Sequence[float] | None = None,
    transfers: Sequence[Transfer] = (),
    room: Sequence[int] | None = None,
    training: bool = True,
) -> Plan:
    """Return the order of passes on each device.

    ``1f1b`` and ``zero-bubble`` require one stage per device; otherwise ``fill-drain`` is used.
    ``interleaved`` is Megatron's order if all devices have equally many stages in round-robin order
    and the micro-batches come in whole rounds. Otherwise it is the greedy order (see ``greedy``),
    and with one stage per device ``1f1b``.

    With ``transfers``, ``zero-bubble`` and ``interleaved`` are the shortest of these orders and of
    greedy orders that account for transfers. ``interleaved`` also tries the greedy order by longest
    path.

    Args:
        schedule: the schedule.
        places: the device index of each stage, in pipeline order.
        chunks: micro-batches in a batch, at least 1.
        forward_ms: for each stage; ``zero-bubble`` and ``interleaved`` depend on it. Equal by
            default.
        backward_ms: for each stage, the whole backward pass; twice ``forward_ms`` by default.
        weight_grad_ms: for each stage, the weight-gradient pass; half of ``backward_ms`` by
            default.
        transfers: between stages, for ``zero-bubble`` and ``interleaved``; none by default.
        room: for each stage, the maximum number of micro-batches in flight, for ``zero-bubble``,
            and for ``interleaved`` with several stages per device. By default ``in_flight``, or
            what the order needs.
        training: whether there are backward passes (default); otherwise micro-batches run in order.

    Raises:
        InputError: if there are no stages or micro-batches, or a list has the wrong length or an
            invalid entry.

    Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019; Narayanan
    et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2;
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    places = tuple(places)
    if not places or chunks < 1:
        raise InputError(
            f"a schedule needs a stage and a micro-batch; got stages={len(places)}, chunks={chunks}"
        )
    count = len(places)
    forward, backward, weights = _pass_times(count, forward_ms, backward_ms, weight_grad_ms)
    _refuse_no_times(
        "transfers", [time for one in transfers for time in one[2:] if time is not None]
    )
    _refuse_bad_room(room, count)
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
        return _fill_drain(places, chunks)
    return _one_forward_one_backward(places, chunks)


def _pass_times(
    count: int,
    forward_ms: Sequence[float] | None,
    backward_ms: Sequence[float] | None,
    weight_grad_ms: Sequence[float] | None,
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the times of each stage's passes, with the defaults of ``plan``."""
    forward = [1.0] * count if forward_ms is None else forward_ms
    backward = [2 * time for time in forward] if backward_ms is None else backward_ms
    weights = [time / 2 for time in backward] if weight_grad_ms is None else weight_grad_ms
    _refuse_bad_times("forward_ms", forward, count)
    _refuse_bad_times("backward_ms", backward, count)
    _refuse_bad_times("weight_grad_ms", weights, count)
    return forward, backward, weights


def _refuse_bad_times(name: str, times: Sequence[float], count: int) -> None:
    if len(times) != count:
        raise InputError(f"{name} has {len(times)} entries for {count} stages")
    _refuse_no_times(name, times)


def _refuse_bad_room(room: Sequence[int] | None, count: int) -> None:
    if room is not None and (
        len(room) != count or not all(isinstance(one, int) and one >= 1 for one in room)
    ):
        raise InputError(
            f"room is {list(room)}: give a number of micro-batches, 1 or more, for each of {count} "
            "stages"
        )


def _fill_drain(places: tuple[int, ...], chunks: int) -> Plan:
    count = len(places)
    passes = [Pass(s, "forward", m) for s, m in _clock(count, chunks)]
    passes += [Pass(count - 1 - s, "backward", m) for s, m in _clock(count, chunks)]
    return Plan(places, chunks, tuple(passes), (chunks,) * count)


def _refuse_no_times(name: str, times: Sequence[float]) -> None:
    for time in times:
        if not 0 <= time < inf:
            raise InputError(f"{name} has {time}: give finite times of 0 or more, in milliseconds")


def _zero_bubble(pipeline: Pipeline, chunks: int, given: Sequence[int] | None) -> Plan:
    """Return the shorter of two greedy orders, with and without regard to transfers."""
    count = len(pipeline.places)
    room = given or [in_flight("zero-bubble", count, stage, chunks) for stage in range(count)]
    shared = [sharing("zero-bubble", count, stage, chunks, held) for stage, held in enumerate(room)]
    inputs = [
        whole - half
        for whole, half in zip(pipeline.backward_ms, pipeline.weight_grad_ms, strict=True)
    ]
    times: dict[Phase, Sequence[float]] = {
        "forward": pipeline.forward_ms,
        "backward": inputs,
        "weights": pipeline.weight_grad_ms,
    }
    # Micro-batches that share memory must be at least this far apart, see Plan.backward_memory.
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
    """Return a greedy order that ignores transfers, and one that includes them."""
    known = [(), pipeline.transfers] if pipeline.transfers else [()]
    return [
        tuple(greedy(pipeline.places, times, chunks, room, transfers, put_off=put_off))
        for transfers in known
    ]


def _shortest(pipeline: Pipeline, plans: Sequence[Plan]) -> Plan:
    """Return the plan with the shortest step; among similar ones the first."""
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
    """Yield ``held`` forward passes, then backward and forward in turn, then backward passes."""
    for micro_batch in range(held):
        yield Pass(stage, "forward", micro_batch)
    for micro_batch in range(chunks):
        yield Pass(stage, "backward", micro_batch)
        if micro_batch + held < chunks:
            yield Pass(stage, "forward", micro_batch + held)


def _clock(stages: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (stage, micro-batch) tick by tick, the latest stage first within a tick."""
    for tick in range(stages + chunks - 1):
        for stage in reversed(range(max(0, tick - chunks + 1), min(stages, tick + 1))):
            yield stage, tick - stage


def _interleaved(pipeline: Pipeline, chunks: int, given: Sequence[int] | None) -> Plan:
    """Return the shortest of Megatron's order, if it applies, and greedy orders."""
    return _shortest(pipeline, _interleaved_plans(pipeline, chunks, given))


def roomy_plans(pipeline: Pipeline, chunks: int) -> list[Plan]:
    """Return candidate orders of ``interleaved`` with several stages per device.

    These are the orders that ``plan`` tries, and one for ample memory: a stage may hold all
    micro-batches at once, and passes with the longest path to the end go first.

    Args:
        pipeline: the stages; a device has several.
        chunks: micro-batches in a batch.
    """
    plans = _interleaved_plans(pipeline, chunks, None)
    count = len(pipeline.places)
    # with room for all micro-batches, nothing is delayed for lack of memory
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
    # Megatron's order needs stages in round-robin order and whole rounds of micro-batches
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
    """Return the times of unsplit passes."""
    return {"forward": pipeline.forward_ms, "backward": pipeline.backward_ms}


def _megatron(rank: int, devices: int, per_device: int, chunks: int) -> Iterator[Pass]:
    """Yield the passes of one device in Megatron's interleaved order.

    A round of micro-batches, one for each device, goes through all stages of a device in turn.
    Before its first backward pass, a device runs two forward passes for each device after it, and a
    round for each further stage of its own. Then forward and backward passes alternate.
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
    """Merge the orders of all devices into one, in which every pass follows its inputs.

    A forward pass needs the previous stage's forward pass, a backward pass the next stage's
    backward pass, and the last stage's backward pass its own forward pass.

    Raises:
        InputError: if the orders deadlock.
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
