r"""The cost model of placements, which execution follows and the integer program states.

Layers are numbered in the profile's order, l = 0, 1, ...; m(l) is the device of layer l, t(v, d, e)
the time of the link from d to e for the bytes of value v, and g(v, e, d) that for the bytes of its
gradient. A value is sent once to every device R(v) that reads it, other than its source's; in
training its gradient, if it has bytes, comes back from each.

**Loads**, in milliseconds, for one micro-batch::

    compute(d) = sum of forward(l) (+ backward(l) in training) over l with m(l) = d, for d's type
    send(d)    = sum of t(v, d, e) over v made on d and e in R(v)
                 + sum of g(v, d, e) over v made on e with d in R(v)
    receive(e) = sum of t(v, d, e) over v made on d with e in R(v)
                 + sum of g(v, d, e) over v made on e with d in R(v)
    load(d)    = compute(d) + send(d) + receive(d)         transfers "added"
               = max(compute(d), send(d), receive(d))      transfers "overlapped"

Objective ``throughput``: the largest load.

**Memory**, in bytes, at a device's worst moment: see the formulas of ``memory.py``.

A device that recomputes runs forwards once more before each backward pass: its layers' backward
times are backward(l) + forward(l) everywhere above and below. With ``recompute = "always"`` all
devices that hold layers do so; with ``"auto"`` those that would be over their limits otherwise
(under objective ``memory``: all) and for which that is less; none where micro-batches are counted
segment by segment.

Stages are the S devices that hold layers, numbered from 0 in pipeline order: an order in which
every value runs forwards. Where there are several such orders, it is the one that leaves the
smallest largest excess over the limits (under objective ``memory``: the smallest largest use),
recomputed where that is less, and of those the one that follows the stages' first layers. Excess
and use are those with the fewest micro-batches in flight that the schedule allows.

**Room**: the micro-batches in flight that a stage has memory for. ``memory.py`` says which numbers
a schedule allows. Only zero-bubble leaves a choice: there a stage takes the largest number with
which its device stays within its limit (under objective ``memory``: the smallest number), as more
room makes steps shorter and costs nothing else. So a map fits if it fits with the smallest numbers.

Objective ``memory``: the largest use. Objective ``devices``: how many devices hold layers, where no
load is over ``bottleneck_ms`` (but for rounding).

**Step**, in milliseconds: what ``placer.schedule.simulate`` takes for all chunks by the plan of the
schedule, each stage with the sums of its layers' times, between each two stages the sums of the t
and g that go between them, on lanes of their own, parallel to computations; plus, in training, the
longest time that a device takes for its layers' optimizer_ms. Stages are the devices in pipeline
order, or, where placements need not be contiguous, segments: maximal runs of layers on one device
in the profile's order. Objective ``step``: that; for steady-state steps
``placer.schedule.steady_state_ms``, where each device has its optimizer behind its last pass. Of
the orders of segments under ``interleaved`` it is the shortest for whose micro-batches in flight
every device has memory.

**Replicas**: ``replicas/replication.py`` and ``replicas/gradient_exchange.py`` say what several
pipelines add that share each batch.

**Latency**: see the formulas of ``pass_times.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

from placer import schedule
from placer.schedule import Pipeline, Plan
from placer.schema import MemoryUse
from placer.solver import pipelines
from placer.solver.components import topological_order
from placer.solver.memory import Footprint, SegmentMemory, footprint, held_by_device
from placer.solver.pass_times import Assignment, latency_ms
from placer.solver.problem import ROUNDING, Problem
from placer.solver.replicas import gradient_exchange
from placer.solver.replicas.gradient_exchange import Exchange

Footprints = Callable[[int], Footprint]
"""By device, its memory."""


@dataclass(frozen=True)
class Costs:
    """What an assignment costs, by device; times in milliseconds.

    Attributes:
        compute_ms: forward and backward of its layers.
        send_ms: of the values and gradients that it sends.
        receive_ms: of those that it receives.
        load_ms: the three as the request joins them.
        stages: the devices that hold layers, in pipeline order.
        objective_value: in the objective's unit.
        use: tells ``memory``.
        rooms: tells ``in_flight``.
        least_use: tells ``least_memory``.
        recompute: the devices that recompute.
        pipeline: the stages, and what passes between them; under objective ``step`` alone.
        plan: the order of their passes; under objective ``step`` alone.
        exchanges: what each device exchanges with its replicas; under objective ``step`` alone.
    """

    compute_ms: tuple[float, ...]
    send_ms: tuple[float, ...]
    receive_ms: tuple[float, ...]
    load_ms: tuple[float, ...]
    stages: tuple[int, ...]
    objective_value: float
    use: Callable[[], tuple[MemoryUse, ...]] = field(repr=False, compare=False)
    rooms: Callable[[], tuple[int, ...]] = field(repr=False, compare=False)
    least_use: Callable[[], tuple[MemoryUse, ...]] = field(repr=False, compare=False)
    recompute: frozenset[int] = frozenset()
    pipeline: Pipeline | None = field(default=None, repr=False)
    plan: Plan | None = field(default=None, repr=False)
    exchanges: Mapping[int, Exchange] = field(default_factory=dict, repr=False)

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """The memory of each device at its worst moment, computed on first use.

        It takes longer than times.
        """
        return self.use()

    @cached_property
    def least_memory(self) -> tuple[MemoryUse, ...]:
        """The same with the fewest micro-batches in flight that the schedule allows."""
        return self.least_use()

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The micro-batches in flight of each stage in training; empty without stages."""
        return self.rooms()


def costs_of(problem: Problem, assignment: Assignment) -> Costs:
    """Return all costs of an assignment that has all links and no cycle of stages."""
    found = evaluate(problem, assignment)
    assert found is not None
    return found


def evaluate(problem: Problem, assignment: Assignment) -> Costs | None:
    """Return all costs of an assignment.

    The result is None if a value would have to pass where there is no link, or stages form a cycle.

    Pins, colocation and limits are not looked at.
    """
    if not passable(problem, assignment):
        return None
    footprints = _footprints(problem, tuple(assignment))
    stages = pipeline_order(problem, assignment, footprints)
    if stages is None:
        return None
    # Recomputation depends on memory, and times depend on recomputation: this order avoids a cycle.
    again = recomputed(problem, footprints, stages)
    compute, send, receive = loads(problem, assignment, again)
    overlapped = problem.request.transfers == "overlapped"
    load = tuple(
        max(computing, sending, receiving) if overlapped else computing + sending + receiving
        for computing, sending, receiving in zip(compute, send, receive, strict=True)
    )
    pipeline = plan = None
    exchanged: dict[int, Exchange] = {}
    rooms: Callable[[], tuple[int, ...]] = cache(
        partial(rooms_of, problem, stages, footprints, again)
    )
    use = partial(memory_of, problem, stages, footprints, again, rooms)
    least_use = partial(
        memory_of, problem, stages, footprints, again, lambda: _least_rooms(problem, stages)
    )
    # Only this objective simulates the schedule. All others need the loads, the memory or the
    # number of devices alone.
    if problem.request.objective == "step":
        pipeline = pipelines.pipeline_of(problem, assignment, stages, again)
        if by_segment(problem):
            held = SegmentMemory(problem, tuple(assignment), footprints)
            plan = pipelines.plan_of(
                problem, pipeline, lambda flight: within_limits(problem, held.use(flight))
            )
            use = least_use = partial(held.use, plan.in_flight)
        else:
            plan = pipelines.plan_of(
                problem, pipeline, room=rooms() or None if problem.weights_apart else None
            )
        rooms = partial(getattr, plan, "in_flight")
        if problem.replication is not None:
            stage_of, _ = pipelines.staged(problem, assignment, stages)
            exchanged = gradient_exchange.exchanges(problem, pipeline, plan, stage_of)
            pipeline = gradient_exchange.with_exchanges(pipeline, exchanged)
        value = pipelines.step_ms(problem, pipeline, plan)
    else:
        value = _objective(problem, assignment, load, use, again)
    measures = use, rooms, least_use
    return Costs(
        tuple(compute),
        tuple(send),
        tuple(receive),
        load,
        stages,
        value,
        *measures,
        again,
        pipeline,
        plan,
        exchanged,
    )


def _footprints(problem: Problem, assignment: Assignment) -> Footprints:
    """Return the memory of each device, worked out when it is first asked for."""
    held = cache(partial(held_by_device, problem, assignment))
    return cache(lambda device: footprint(problem, held()[device]))


def recomputed(problem: Problem, footprints: Footprints, stages: Sequence[int]) -> frozenset[int]:
    """Return the devices that recompute.

    Those that must, and of those that may the ones over their limit, if it helps.

    Over their limit are those that are with the fewest micro-batches in flight. For small memory,
    all recompute that may and that it helps.

    Args:
        problem: the placement problem.
        footprints: by device.
        stages: the devices that hold layers, in pipeline order.
    """
    if not problem.may_recompute or by_segment(problem):
        return frozenset()
    for_memory = problem.request.objective == "memory"

    def helps(device: int) -> bool:
        one, flight = footprints(device), problem.flight(len(stages) - stages.index(device))
        kept = one.total_bytes(flight, backwards=problem.backwards(flight))
        short = for_memory or kept > problem.devices[device].usable_bytes
        return short and one.total_bytes(flight, again=True) < kept

    rule = problem.recompute
    return frozenset(d for d in stages if rule[d] == "always" or (rule[d] == "auto" and helps(d)))


def fits(problem: Problem, costs: Costs) -> bool:
    """Return whether every device stays within its memory limit, and within ``bottleneck_ms``."""
    most_ms = problem.request.bottleneck_ms
    if most_ms is not None and max(costs.load_ms) > most_ms * (1 + ROUNDING):
        return False
    return within_limits(problem, costs.memory)


def judged(problem: Problem, assignment: Assignment) -> Costs | None:
    """Return the costs of an assignment, or None if it breaks a requirement."""
    if not allowed(problem, assignment):
        return None
    result = evaluate(problem, assignment)
    return result if result is not None and fits(problem, result) else None


def allowed(problem: Problem, assignment: Assignment) -> bool:
    """Return whether an assignment respects pins, colocation and numbers of devices and layers."""
    layers = Counter(assignment)
    return (
        all(device in problem.allowed[layer] for layer, device in enumerate(assignment))
        and all(len({assignment[layer] for layer in group}) == 1 for group in problem.groups)
        and problem.least_devices <= len(layers) <= problem.most_devices
        and (problem.most_layers is None or max(layers.values()) <= problem.most_layers)
    )


def passable(problem: Problem, assignment: Assignment) -> bool:
    """Return whether every value that crosses has a link."""
    return all(
        problem.linked(value, assignment[value.source], target)
        for value in problem.values
        for target in receivers(value.readers, assignment, assignment[value.source])
    )


def receivers(readers: Sequence[int], assignment: Assignment, source: int) -> list[int]:
    """Return the devices that a value is sent to, ascending."""
    return sorted({assignment[reader] for reader in readers} - {source})


def loads(
    problem: Problem, assignment: Assignment, again: frozenset[int] = frozenset()
) -> tuple[list[float], list[float], list[float]]:
    """Return the compute, send and receive time of each device, in milliseconds.

    ``again`` are those that recompute.
    """
    compute, send, receive = ([0.0] * len(problem.devices) for _ in range(3))
    for layer, device in enumerate(assignment):
        compute[device] += problem.compute_ms(layer, device)
        compute[device] += problem.again_ms(layer, device) if device in again else 0.0
    for value in problem.values:
        source, sent = assignment[value.source], False
        for target in receivers(value.readers, assignment, source):
            there, back = (
                problem.send_ms(value, source, target),
                problem.gradient_ms(value, source, target),
            )
            # A multicast link sends a value once for all readers, but each reader receives it.
            send[source] += 0.0 if problem.multicast and sent else there
            sent = True
            receive[target] += there
            send[target] += back
            receive[source] += back
    for device in problem.untaxed:
        send[device] = receive[device] = 0.0
    return compute, send, receive


def memory_of(
    problem: Problem,
    stages: Sequence[int],
    footprints: Footprints,
    again: frozenset[int],
    rooms: Callable[[], Sequence[int]],
) -> tuple[MemoryUse, ...]:
    """Return the memory of each device at its worst moment."""
    chunks = problem.request.chunks
    flights = dict.fromkeys(range(len(problem.devices)), (chunks, problem.backwards(chunks)))
    # placements that need not be contiguous have no stages' rooms
    for stage, room in enumerate(rooms()):
        flights[stages[stage]] = room, backwards_of(problem, len(stages), stage, room)
    return tuple(
        footprints(d).use(flight, d in again, backwards)
        for d, (flight, backwards) in flights.items()
    )


def rooms_of(
    problem: Problem, stages: Sequence[int], footprints: Footprints, again: frozenset[int]
) -> tuple[int, ...]:
    """Return by stage for how many micro-batches it has room.

    Of those that the schedule allows, the most that fit.
    """
    least = _least_rooms(problem, stages)
    request, count = problem.request, len(stages)
    if request.objective == "memory" or not problem.weights_apart:
        return least

    def most_that_fit(stage: int, fewest: int) -> int:
        device = stages[stage]
        limit, room = problem.devices[device].usable_bytes, fewest
        # Memory grows with the number of micro-batches in flight, so the first that does not fit
        # ends the search.
        for more in range(
            fewest + 1, schedule.in_flight(request.schedule, count, stage, request.chunks) + 1
        ):
            backwards = backwards_of(problem, count, stage, more)
            if footprints(device).total_bytes(more, device in again, backwards) > limit:
                break
            room = more
        return room

    return tuple(most_that_fit(stage, fewest) for stage, fewest in enumerate(least))


def backwards_of(problem: Problem, stages: int, stage: int, room: int) -> int:
    """Return for how many micro-batches in flight backward passes have memory of their own."""
    request = problem.request
    return -(-room // schedule.sharing(request.schedule, stages, stage, request.chunks, room))


def _least_rooms(problem: Problem, stages: Sequence[int]) -> tuple[int, ...]:
    """Return by stage the fewest micro-batches for which it needs room.

    Nothing where devices hold all of them.
    """
    if not problem.training or not problem.one_stage_each:
        return ()
    return tuple(problem.flight(left) for left in range(len(stages), 0, -1))


def within_limits(problem: Problem, uses: Sequence[MemoryUse]) -> bool:
    """Return whether each device has memory for its use."""
    return all(
        use.total_bytes <= device.usable_bytes
        for use, device in zip(uses, problem.devices, strict=True)
    )


def by_segment(problem: Problem) -> bool:
    """Return whether micro-batches in flight are counted segment by segment."""
    kind = problem.request.objective, problem.request.schedule
    return problem.training and not problem.contiguous and kind == ("step", "interleaved")


def pipeline_order(
    problem: Problem, assignment: Assignment, footprints: Footprints
) -> tuple[int, ...] | None:
    """Return the devices that hold layers, in pipeline order.

    The result is None if they must be contiguous and values form a cycle.
    """
    # Devices by their first layer in the profile's order.
    used = list(dict.fromkeys(assignment))
    if not problem.contiguous:
        return tuple(used)
    number = {device: index for index, device in enumerate(used)}
    arcs = {
        (number[assignment[value.source]], number[target])
        for value in problem.values
        for target in receivers(value.bound_readers, assignment, assignment[value.source])
    }
    order = topological_order(len(used), arcs)
    if len(order) < len(used):
        return None
    if problem.loose:
        return tuple(used)
    stages = tuple(used[index] for index in order)
    # Every stage holds all micro-batches, or keeps nothing: memory does not depend on the order.
    request = problem.request
    if not problem.training or request.schedule == "fill-drain" or request.chunks == 1:
        return stages
    return _roomiest_order(problem, footprints, used, arcs)


def _roomiest_order(
    problem: Problem,
    footprints: Footprints,
    used: Sequence[int],
    arcs: set[tuple[int, int]],
) -> tuple[int, ...]:
    """Return the order of stages whose largest excess over the memory limits is smallest.

    A stage needs more the earlier it stands. So the first place goes to the stage, among those
    without open predecessors, that needs the least there, and so on.

    Source: Lawler, "Optimal sequencing of a single machine subject to precedence constraints",
    1973.
    """
    stages: list[int] = []
    waiting = set(range(len(used)))

    def excess(stage: int) -> tuple[int, int]:
        # 1F1B holds one micro-batch for the stage itself and for each stage behind it.
        flight = min(problem.request.chunks, len(waiting))
        use = _least_bytes(problem, footprints(used[stage]), used[stage], flight)
        over = max(0, use - problem.devices[used[stage]].usable_bytes)
        return over, use if problem.request.objective == "memory" else 0

    while waiting:
        # Only stages without open predecessors keep values running forwards.
        ready = [
            stage
            for stage in sorted(waiting)
            if not any((before, stage) in arcs for before in waiting)
        ]
        chosen = min(ready, key=excess) if len(ready) > 1 else ready[0]
        stages.append(used[chosen])
        waiting.remove(chosen)
    return tuple(stages)


def _least_bytes(problem: Problem, one: Footprint, device: int, flight: int) -> int:
    """Return a device's memory with some micro-batches in flight, recomputed if that is less."""
    rule = problem.recompute[device]
    if rule == "always":
        return one.total_bytes(flight, again=True)
    kept = one.total_bytes(flight, backwards=problem.backwards(flight))
    return min(kept, one.total_bytes(flight, again=True)) if rule == "auto" else kept


def _objective(
    problem: Problem,
    assignment: Assignment,
    load: Sequence[float],
    use: Callable[[], Sequence[MemoryUse]],
    again: frozenset[int],
) -> float:
    objective = problem.request.objective
    if objective == "latency":
        return latency_ms(problem, assignment, again)
    if objective == "devices":
        return float(len(set(assignment)))
    if objective == "memory":
        return float(max(one.total_bytes for one in use()))
    return max(load)
