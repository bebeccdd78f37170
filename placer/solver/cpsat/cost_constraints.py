"""The costs of ``costs.py`` as constraints of the integer program, one function a rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ortools.sat.python import cp_model

from placer.solver.cpsat.variables import PlacementVariables, Term
from placer.solver.values import Value

LoadParts: TypeAlias = tuple[list[list[Term]], list[list[Term]], list[list[Term]]]
"""By device, the terms of its compute, of what it sends, and of what it receives."""

PAIRS_PER_LAYER = 8
"""Independent pairs of layers per layer above which rules by device are fewer than by pair."""


def values_need_links(model: PlacementVariables) -> None:
    """Require a link wherever a value, or its gradient, crosses."""
    problem, nodes = model.problem, model.nodes
    refused = set()
    missing = [
        (a, b) for a, b in _pairs(model) if None in (problem.links[a][b], problem.links[b][a])
    ]
    # Without a link, the pair of places is excluded. Values with the same ends exclude the same
    # pairs, so a set avoids repeated rules.
    for value in problem.values if missing else ():
        source = nodes.node_of[value.source]
        for reader in nodes.holding(value.readers) - {source}:
            for device, other in missing:
                if not problem.linked(value, device, other):
                    refused.add((source, reader, device, other))
    for source, reader, device, other in sorted(refused):
        if device in model.x[source] and other in model.x[reader]:
            model.cp.add_bool_or(~model.x[source][device], ~model.x[reader][other])


# Loads


def loads(model: PlacementVariables, parts: LoadParts) -> None:
    """Require the objective to be at least every device's load.

    Args:
        model: the variables.
        parts: as ``load_parts`` returns them.
    """
    compute, send, receive = parts
    for device in model.devices:
        most = model.most_busy(device)
        if model.problem.request.transfers == "overlapped":
            for part in (compute, send, receive):
                model.cp.add(sum(part[device]) <= most)
        else:
            model.cp.add(sum(compute[device] + send[device] + receive[device]) <= most)


def load_parts(model: PlacementVariables) -> LoadParts:
    """Return, by device, the terms of its compute, of what it sends, and of what it receives."""
    compute = _compute(model)
    send, receive = _transfers(model)
    for device in model.problem.untaxed:
        send[device], receive[device] = [], []
    return compute, send, receive


def _compute(model: PlacementVariables) -> list[list[Term]]:
    terms: list[list[Term]] = [[] for _ in model.devices]
    for node, layers in enumerate(model.nodes.nodes):
        for device, literal in model.x[node].items():
            time_ms = model.problem.work_ms(layers, device)
            terms[device].append(model.steps(time_ms) * literal)
    return terms


def _transfers(model: PlacementVariables) -> tuple[list[list[Term]], list[list[Term]]]:
    """Return, by device, the terms of what it sends and of what it receives.

    A value is sent once to each device that reads it, and its gradient comes back. Values with the
    same ends share their terms.
    """
    send: list[list[Term]] = [[] for _ in model.devices]
    receive: list[list[Term]] = [[] for _ in model.devices]
    one_link = model.problem.one_link
    for (source, readers), values in _values_by_ends(model).items():
        if one_link is not None:
            # Equal links: a count of receivers is enough, and pairs of devices need no literals.
            there = model.steps(
                sum(value.repeats * one_link.transfer_ms(value.bytes) for value in values)
            )
            sizes = [value.gradient_bytes for value in values if value.gradient_bytes]
            back = model.steps(sum(one_link.transfer_ms(size) for size in sizes))
            if there + back:
                taken = {device: _taken(model, source, readers, device) for device in model.placed}
                for device in model.placed:
                    given = _given(model, source, readers, device, sum(taken.values()))
                    send[device] += [there * given, back * taken[device]]
                    receive[device] += [there * taken[device], back * given]
        else:
            _transfers_by_pair(model, source, readers, values, send, receive)
    return send, receive


def _taken(model: PlacementVariables, source: int, readers: frozenset[int], device: int) -> Term:
    """1 if a reader is on the device and the source is not."""
    able = [model.x[reader][device] for reader in readers if device in model.x[reader]]
    if not able:
        return 0
    # One direction of the equivalence is enough: the objective pushes the literal down to 0.
    taken = model.cp.new_bool_var("")
    own = [model.x[source][device]] if device in model.x[source] else []
    for reader in able:
        model.cp.add_bool_or(~reader, *own, taken)
    return taken


def _given(
    model: PlacementVariables, source: int, readers: frozenset[int], device: int, takers: Term
) -> Term:
    """Return the number of other devices that read the value, if the source is on the device."""
    if device not in model.x[source]:
        return 0
    here = model.x[source][device]
    cut = model.cp.new_bool_var("")
    for reader in readers:
        model.cp.add_bool_or(
            ~here, *([model.x[reader][device]] if device in model.x[reader] else []), cut
        )
    most = min(len(readers), len(model.stages) - 1)
    if most < 2 or model.problem.multicast:
        return cut
    given = model.cp.new_int_var(0, most, "")
    model.cp.add(given >= cut)
    # The source sends one copy to each device that reads the value.
    model.cp.add(given >= takers).only_enforce_if(here)
    return given


def _transfers_by_pair(
    model: PlacementVariables,
    source: int,
    readers: frozenset[int],
    values: Sequence[Value],
    send: list[list[Term]],
    receive: list[list[Term]],
) -> None:
    """Add transfers where links differ: a literal for every pair of devices."""
    for device, other in _pairs(model):
        if not all(model.problem.linked(value, device, other) for value in values):
            continue
        there = model.steps(sum(model.problem.send_ms(value, device, other) for value in values))
        back = model.steps(sum(model.problem.gradient_ms(value, device, other) for value in values))
        if there + back:
            sent = _sent(model, source, readers, device, other)
            if sent is not None:
                send[device].append(there * sent)
                receive[other].append(there * sent)
                send[other].append(back * sent)
                receive[device].append(back * sent)


def _values_by_ends(model: PlacementVariables) -> dict[tuple[int, frozenset[int]], list[Value]]:
    by_ends: dict[tuple[int, frozenset[int]], list[Value]] = defaultdict(list)
    for value in model.problem.values:
        source = model.nodes.node_of[value.source]
        readers = model.nodes.holding(value.readers) - {source}
        if readers:
            by_ends[source, readers].append(value)
    return by_ends


def _sent(
    model: PlacementVariables, source: int, readers: frozenset[int], device: int, other: int
) -> cp_model.IntVar | None:
    """Return a literal that holds if the source is on one device and a reader on the other."""
    read = model.any_on(readers, other)
    if device not in model.x[source] or read is None:
        return None
    sent = model.cp.new_bool_var("")
    model.cp.add_bool_or(~model.x[source][device], ~read, sent)
    return sent


def _pairs(model: PlacementVariables) -> Iterator[tuple[int, int]]:
    """Ordered pairs of devices over which a value may pass."""
    for device in model.devices:
        for other in model.devices:
            if device < other or (device > other and not model.stage_is_device):
                yield device, other


# Latency

_Delay = Callable[[Value, int, int], float | None]
"""The time that a value, or its gradient, takes between two devices; None where it may not pass."""


def latency(model: PlacementVariables) -> None:
    """Require the objective to be at least the last finish forwards plus the last one backwards."""
    problem = model.problem
    count = len(problem.layers)
    waits = [(value.source, reader, value) for value in problem.values for reader in value.readers]

    def forwards(value: Value, device: int, other: int) -> float | None:
        return (
            problem.send_ms(value, device, other) if problem.linked(value, device, other) else None
        )

    def backwards(value: Value, device: int, other: int) -> float | None:
        return (
            problem.gradient_ms(value, other, device)
            if problem.linked(value, other, device)
            else None
        )

    ends: list[Term] = [_makespan(model, range(count), problem.forward_ms, waits, forwards)]
    if problem.training:
        back = [(reader, source, value) for source, reader, value in waits if value.gradient_bytes]
        ends.append(
            _makespan(model, range(count - 1, -1, -1), problem.backward_ms, back, backwards)
        )
    model.cp.add(sum(ends) <= model.makespan)


def _makespan(
    model: PlacementVariables,
    order: Sequence[int],
    time_ms: Sequence[Sequence[float]],
    waits: Sequence[tuple[int, int, Value]],
    delay_ms: _Delay,
) -> Term:
    """Return the last finish of layers in a fixed order.

    One waits for another, with a delay if they are apart.
    """
    inputs: dict[int, list[tuple[int, Value]]] = defaultdict(list)
    for before, after, value in waits:
        inputs[after].append((before, value))
    start: dict[int, Term] = {}
    finish: dict[int, Term] = {}
    end = model.cp.new_int_var(0, model.upper, "end")
    for layer in order:
        node = model.nodes.node_of[layer]
        start[layer] = model.cp.new_int_var(0, model.upper, f"start{layer}")
        finish[layer] = start[layer] + sum(
            model.steps(time_ms[layer][d]) * x for d, x in model.x[node].items()
        )
        model.cp.add(finish[layer] <= end)
        for before, value in inputs[layer]:
            delay = _delay(model, model.nodes.node_of[before], node, value, delay_ms)
            model.cp.add(start[layer] >= finish[before] + delay)
    _one_at_a_time(model, order, [(before, after) for before, after, _ in waits], start, finish)
    return end


def _one_at_a_time(
    model: PlacementVariables,
    order: Sequence[int],
    waits: Sequence[tuple[int, int]],
    start: dict[int, Term],
    finish: dict[int, Term],
) -> None:
    """Require a device to run one layer at a time, in the profile's order.

    Layers that wait for each other anyway need no rule.
    """
    pairs = _independent(order, waits)
    if len(pairs) <= PAIRS_PER_LAYER * len(order):
        for before, after in pairs:
            first, second = (
                model.x[model.nodes.node_of[before]],
                model.x[model.nodes.node_of[after]],
            )
            #     before ████             both on one device: the later one in the profile's order
            #     after       ░░░░        starts when the earlier one has finished
            for device in first.keys() & second.keys():
                model.cp.add(start[after] >= finish[before]).only_enforce_if(
                    first[device], second[device]
                )
        return
    # free[d]: when device d has finished the layers so far. A chain of maxima replaces the pairs:
    #    free[d] ──layer on d──▶ max(free[d], finish) ──next layer──▶ ...
    free: list[Term] = [0] * len(model.devices)
    for layer in order:
        for device, here in model.x[model.nodes.node_of[layer]].items():
            model.cp.add(start[layer] >= free[device]).only_enforce_if(here)
            after_it = model.cp.new_int_var(0, model.upper, "free")
            model.cp.add(after_it >= finish[layer]).only_enforce_if(here)
            model.cp.add(after_it >= free[device])
            free[device] = after_it


def _independent(order: Sequence[int], waits: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of layers, the earlier first, that do not wait for each other in any way."""
    inputs: dict[int, list[int]] = defaultdict(list)
    for before, after in waits:
        inputs[after].append(before)
    ancestors: dict[int, int] = {}
    pairs = []
    for place, layer in enumerate(order):
        ancestors[layer] = 0
        for before in inputs[layer]:
            # Sets of layers are bits of integers: a union is one operation, whatever the model's
            # size.
            ancestors[layer] |= ancestors[before] | 1 << before
        pairs += [(before, layer) for before in order[:place] if not ancestors[layer] >> before & 1]
    return pairs


def _delay(
    model: PlacementVariables, before: int, after: int, value: Value, delay_ms: _Delay
) -> Term:
    if before == after:
        return 0
    delay: Term = 0
    for device in model.x[before]:
        for other in model.x[after]:
            if device != other:
                time_ms = delay_ms(value, device, other)
                if time_ms is not None and model.steps(time_ms):
                    delay += model.steps(time_ms) * model.both(before, device, after, other)
    return delay
