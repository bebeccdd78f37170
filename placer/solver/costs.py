r"""What a placement costs: the one cost model, which execution follows and the integer program states.

Layers are numbered in the profile's order, l = 0, 1, ...; m(l) is the device of layer l, t(v, d, e) the time of the
link from d to e for the bytes of value v, and g(v, e, d) that for the bytes of its gradient. A value is sent once to
every device R(v) that reads it, other than its source's; in training its gradient, if it has bytes, comes back from
each.

**Loads**, in milliseconds, for one micro-batch::

    compute(d) = sum of forward(l) (+ backward(l) in training) over l with m(l) = d, for d's type
    send(d)    = sum of t(v, d, e) over v made on d and e in R(v)  +  sum of g(v, d, e) over v made on e with d in R(v)
    receive(e) = sum of t(v, d, e) over v made on d with e in R(v) +  sum of g(v, d, e) over v made on e with d in R(v)
    load(d)    = compute(d) + send(d) + receive(d)         transfers "added"
               = max(compute(d), send(d), receive(d))      transfers "overlapped"

Objective ``throughput``: the largest load.

**Memory in inference**, in bytes. Value v, made by layer s, is live on d at step l if s <= l and some reader on d is l
or later, or if l = s and m(s) = d: it is received as soon as it is made, and freed after its last reader::

    use(d) = params(d) + buffers(d) + max over steps l of
             (sum of bytes(v) live on d at l  +  forward_workspace(l) if m(l) = d)

**Memory in training**, in bytes. A value is kept on d if a layer that saves it is on d; it counts once per device::

    use(d) = params(d) + gradients(d) + optimizer(d) + buffers(d)
             + in_flight(d) * (sum of saved(l) over l on d  +  sum of bytes(v) kept on d)
             + max over l on d of max(forward_workspace(l), backward_workspace(l))

    in_flight(d) = chunks                               fill-drain, and placements that need not be contiguous
                 = min(chunks, stages - stage(d))       1F1B, contiguous

Stages are the S devices that hold layers, numbered from 0 in pipeline order: an order in which every value runs
forwards. Where there are several such orders, it is the one that leaves the smallest largest excess over the limits
(under objective ``memory``: the smallest largest use), and of those the one that follows the stages' first layers.
Objective ``memory``: the largest use.

**Latency**, in milliseconds. Each device runs its layers in the profile's order, one at a time. A layer starts when its
device is free and every value that it reads is there::

    start(l)  = max of finish(k) over the layers k < l on m(l), and of finish(s) + [m(s) != m(l)] * t(v, m(s), m(l))
                over the values v that l reads, made by s
    finish(l) = start(l) + forward(l)

Objective ``latency`` in inference: the last finish. In training the backward pass starts when the last forward has
finished, and is the mirror image: the layers in reverse order, backward times, and for each value that has a gradient,
from each reader r to the source s, the time g(v, m(r), m(s)). The objective is the two added. Links are never waited
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placer import schedule
from placer.schema import MemoryUse
from placer.solver.components import topological_order
from placer.solver.problem import Problem, Value, arcs_of

Assignment = Sequence[int]
"""By layer, the index of its device."""


@dataclass(frozen=True)
class Costs:
    """What an assignment costs, by device; times in milliseconds.

    Attributes:
        compute_ms: forward and backward of its layers.
        send_ms: of the values and gradients that it sends.
        receive_ms: of those that it receives.
        load_ms: the three as the request joins them.
        memory: at the worst moment, by kind.
        stages: the devices that hold layers, in pipeline order.
        objective_value: in the objective's unit.
    """

    compute_ms: tuple[float, ...]
    send_ms: tuple[float, ...]
    receive_ms: tuple[float, ...]
    load_ms: tuple[float, ...]
    memory: tuple[MemoryUse, ...]
    stages: tuple[int, ...]
    objective_value: float


def evaluate(problem: Problem, assignment: Assignment) -> Costs | None:
    """All costs of an assignment; None if a value would have to pass where there is no link, or stages form a cycle.

    Pins, colocation and limits are not looked at.
    """
    if not passable(problem, assignment):
        return None
    held = held_by_device(problem, assignment)
    stages = pipeline_order(problem, assignment, held)
    if stages is None:
        return None
    compute, send, receive = loads(problem, assignment)
    join = _overlapped if problem.request.transfers == "overlapped" else _added
    load = tuple(join(*parts) for parts in zip(compute, send, receive, strict=True))
    memory = tuple(
        memory_use(problem, held[device], in_flight(problem, stages, device)) for device in range(len(problem.devices))
    )
    return Costs(
        tuple(compute), tuple(send), tuple(receive), load, memory, stages, _objective(problem, assignment, load, memory)
    )


def fits(problem: Problem, costs: Costs) -> bool:
    """Whether every device stays within its limit."""
    return all(
        use.total_bytes <= device.usable_bytes for use, device in zip(costs.memory, problem.devices, strict=True)
    )


def allowed(problem: Problem, assignment: Assignment) -> bool:
    """Whether pins, forbidden devices, colocation and the number of devices are respected."""
    return (
        all(device in problem.allowed[layer] for layer, device in enumerate(assignment))
        and all(len({assignment[layer] for layer in group}) == 1 for group in problem.groups)
        and len(set(assignment)) <= problem.most_devices
    )


def passable(problem: Problem, assignment: Assignment) -> bool:
    """Whether every value that crosses has a link."""
    return all(
        problem.linked(value, assignment[value.source], target)
        for value in problem.values
        for target in receivers(value.readers, assignment, assignment[value.source])
    )


def receivers(readers: Sequence[int], assignment: Assignment, source: int) -> list[int]:
    """The devices that a value is sent to, ascending."""
    return sorted({assignment[reader] for reader in readers} - {source})


@dataclass
class Held:
    """What is on one device.

    Attributes:
        layers: ascending.
        values: those that a layer there makes or reads.
    """

    layers: list[int]
    values: list[Value]


def held_by_device(problem: Problem, assignment: Assignment) -> list[Held]:
    """By device, what it holds."""
    held = [Held([], []) for _ in problem.devices]
    for layer, device in enumerate(assignment):
        held[device].layers.append(layer)
    for value in problem.values:
        for device in {assignment[layer] for layer in (value.source, *value.readers)}:
            held[device].values.append(value)
    return held


def loads(problem: Problem, assignment: Assignment) -> tuple[list[float], list[float], list[float]]:
    """Compute, send and receive time of each device, in milliseconds."""
    compute, send, receive = ([0.0] * len(problem.devices) for _ in range(3))
    for layer, device in enumerate(assignment):
        compute[device] += problem.compute_ms(layer, device)
    for value in problem.values:
        source, sent = assignment[value.source], False
        for target in receivers(value.readers, assignment, source):
            there, back = problem.send_ms(value, source, target), problem.gradient_ms(value, source, target)
            send[source] += 0.0 if problem.multicast and sent else there
            sent = True
            receive[target] += there
            send[target] += back
            receive[source] += back
    for device in problem.untaxed:
        send[device] = receive[device] = 0.0
    return compute, send, receive


def memory_use(problem: Problem, held: Held, flight: int) -> MemoryUse:
    """What one device holds at its worst moment.

    Args:
        problem: the problem.
        held: what is on the device.
        flight: micro-batches in flight there, in training.
    """
    layers = [problem.layers[layer] for layer in held.layers]
    params = sum(layer.param_bytes for layer in layers)
    buffers = sum(layer.buffer_bytes for layer in layers)
    if not problem.training:
        live, workspace = _worst_step(problem, held)
        return MemoryUse(param_bytes=params, buffer_bytes=buffers, activation_bytes=live, workspace_bytes=workspace)
    here = set(held.layers)
    kept = sum(value.bytes for value in held.values if not here.isdisjoint(value.keepers))
    return MemoryUse(
        param_bytes=params,
        buffer_bytes=buffers,
        grad_bytes=sum(layer.grad_bytes for layer in layers),
        optimizer_bytes=sum(layer.optimizer_bytes for layer in layers),
        activation_bytes=flight * (sum(layer.saved_bytes for layer in layers) + kept),
        workspace_bytes=max(
            (max(layer.forward_workspace_bytes, layer.backward_workspace_bytes) for layer in layers), default=0
        ),
    )


def _worst_step(problem: Problem, held: Held) -> tuple[int, int]:
    """Live and workspace bytes of a device at the step where their sum is largest, in inference."""
    here = set(held.layers)
    workspace = {layer: problem.layers[layer].forward_workspace_bytes for layer in held.layers}
    change = dict.fromkeys(held.layers, 0)
    for value in held.values:
        last = max(layer for layer in (value.source, *value.readers) if layer in here)
        change[value.source] = change.get(value.source, 0) + value.bytes
        change[last + 1] = change.get(last + 1, 0) - value.bytes
    worst, live = (0, 0), 0
    for step in sorted(change):
        live += change[step]
        if live + workspace.get(step, 0) > sum(worst):
            worst = (live, workspace.get(step, 0))
    return worst


def in_flight(problem: Problem, stages: Sequence[int], device: int) -> int:
    """Micro-batches that a device holds at once in training."""
    request = problem.request
    if problem.contiguous and device in stages:
        return schedule.in_flight(request.schedule, len(stages), stages.index(device), request.chunks)
    return request.chunks


def pipeline_order(problem: Problem, assignment: Assignment, held: Sequence[Held]) -> tuple[int, ...] | None:
    """The devices that hold layers, in pipeline order; None if they must be contiguous and values form a cycle."""
    used = sorted((d for d, on_it in enumerate(held) if on_it.layers), key=lambda d: held[d].layers[0])
    if not problem.contiguous:
        return tuple(used)
    number = {device: index for index, device in enumerate(used)}
    arcs = {
        (number[assignment[source]], number[assignment[reader]])
        for source, reader in arcs_of(problem.values)
        if assignment[source] != assignment[reader]
    }
    order = topological_order(len(used), arcs)
    if len(order) < len(used):
        return None
    stages = tuple(used[index] for index in order)
    if not problem.training or problem.request.schedule != "1f1b" or problem.request.chunks == 1:
        return stages
    return _roomiest_order(problem, held, used, arcs)


def _roomiest_order(
    problem: Problem,
    held: Sequence[Held],
    used: Sequence[int],
    arcs: set[tuple[int, int]],
) -> tuple[int, ...]:
    """Of the orders in which values run forwards, one with the smallest largest excess over the limits.

    A stage needs the more, the earlier it stands. So the first place goes, of the stages that wait for no other, to the
    one that needs the least there, and so on.

    Source: Lawler, "Optimal sequencing of a single machine subject to precedence constraints", 1973.
    """
    stages: list[int] = []
    waiting = set(range(len(used)))

    def excess(stage: int) -> tuple[int, int]:
        device, flight = used[stage], min(problem.request.chunks, len(waiting))
        use = memory_use(problem, held[device], flight).total_bytes
        over = max(0, use - problem.devices[device].usable_bytes)
        return over, use if problem.request.objective == "memory" else 0

    while waiting:
        ready = [stage for stage in sorted(waiting) if not any((before, stage) in arcs for before in waiting)]
        chosen = min(ready, key=excess)
        stages.append(used[chosen])
        waiting.remove(chosen)
    return tuple(stages)


def latency_ms(problem: Problem, assignment: Assignment) -> float:
    """One micro-batch's way through the model, forwards and, in training, backwards, in milliseconds."""
    count = len(problem.layers)
    forwards: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    backwards: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for value in problem.values:
        source = assignment[value.source]
        for reader in value.readers:
            target = assignment[reader]
            apart = source != target
            forwards[reader].append((value.source, problem.send_ms(value, source, target) if apart else 0.0))
            if value.gradient_bytes:
                backwards[value.source].append((reader, problem.gradient_ms(value, source, target) if apart else 0.0))
    total = _makespan(range(count), assignment, problem.forward_ms, forwards)
    if problem.training:
        total += _makespan(range(count - 1, -1, -1), assignment, problem.backward_ms, backwards)
    return total


def _makespan(
    order: Sequence[int],
    assignment: Assignment,
    time_ms: Sequence[Sequence[float]],
    inputs: Sequence[Sequence[tuple[int, float]]],
) -> float:
    """The last finish of layers that run in this order; ``inputs`` are pairs of a layer waited for and a delay."""
    finish = [0.0] * len(order)
    free: dict[int, float] = {}
    for layer in order:
        device = assignment[layer]
        start = max([free.get(device, 0.0), *(finish[source] + delay for source, delay in inputs[layer])])
        finish[layer] = free[device] = start + time_ms[layer][device]
    return max(finish)


def _added(compute: float, send: float, receive: float) -> float:
    return compute + send + receive


def _overlapped(compute: float, send: float, receive: float) -> float:
    return max(compute, send, receive)


def _objective(problem: Problem, assignment: Assignment, load: Sequence[float], memory: Sequence[MemoryUse]) -> float:
    objective = problem.request.objective
    if objective == "latency":
        return latency_ms(problem, assignment)
    if objective == "memory":
        return float(max(use.total_bytes for use in memory))
    return max(load)
