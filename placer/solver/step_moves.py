"""Assignments to try under objective ``step``: rounds through the devices, and small changes of a good one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from placer.solver import costs
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

SHIFTS = (1, 2, 4, 8, 16, 32)
"""How many nodes may change sides between two neighbouring stages at once."""

Value = Callable[[list[int]], float]
"""The step of an assignment of layers, infinite if it breaks a requirement."""


def rounds(problem: Problem, nodes: Reduction, devices: Sequence[int], times: int) -> list[int]:
    """The layers in their order dealt out to the devices, so many times round, by how fast each device is.

    Returns:
        By layer, its device.
    """
    layers = range(len(problem.layers))
    speed = [1.0 / max(sum(problem.compute_ms(layer, device) for layer in layers), 1e-9) for device in devices]
    total = sum(speed) * times
    ends = [
        sum(speed[: index % len(devices)]) + index // len(devices) * sum(speed) for index in _stages(devices, times)
    ]
    first = devices[0]
    whole = sum(problem.compute_ms(layer, first) for layer in layers) or 1.0
    done, placed = 0.0, []
    for group in sorted(nodes.nodes):
        share = (done + sum(problem.compute_ms(layer, first) for layer in group) / 2) / whole * total
        turn = max(index for index, end in enumerate(ends) if end <= share)
        placed.append((group, devices[turn % len(devices)]))
        done += sum(problem.compute_ms(layer, first) for layer in group)
    found = [first] * len(problem.layers)
    for group, device in placed:
        for layer in group:
            found[layer] = device
    return found


def _stages(devices: Sequence[int], times: int) -> range:
    return range(len(devices) * times)


def climb(problem: Problem, nodes: Reduction, start: list[int], value: Value, over: Callable[[], bool]) -> list[int]:
    """The best assignment on a way of small changes, each of which shortens the step.

    Args:
        problem: what is asked.
        nodes: its layers in nodes.
        start: by layer, its device.
        value: of an assignment.
        over: asked before each change is tried; ends the climb.

    Returns:
        By layer, its device.
    """
    best, least = start, value(start)
    better = True
    while better:
        better = False
        for tried in neighbours(problem, nodes, best):
            if over():
                return best
            found = value(tried)
            if found < least * (1 - 1e-9):
                best, least, better = tried, found, True
                break
    return best


def neighbours(problem: Problem, nodes: Reduction, assignment: Sequence[int]) -> Iterator[list[int]]:
    """Assignments a small change away: some nodes on the other side of a cut, or two devices swapped."""
    device_of = [assignment[layers[0]] for layers in nodes.nodes]
    runs = _runs(problem, nodes, assignment, device_of)
    for count in SHIFTS:
        for left, right in pairwise(runs):
            if count <= len(left):
                yield _moved(nodes, device_of, left[-count:], device_of[right[0]])
            if count <= len(right):
                yield _moved(nodes, device_of, right[:count], device_of[left[0]])
    for one, other in _unlike(problem, device_of):
        swap = {one: other, other: one}
        yield nodes.spread([swap.get(device, device) for device in device_of])


def _runs(problem: Problem, nodes: Reduction, assignment: Sequence[int], device_of: Sequence[int]) -> list[list[int]]:
    """The nodes stage by stage: by device in pipeline order, or, where placements are free, by segment."""
    if not problem.contiguous:
        order = sorted(range(len(device_of)), key=lambda node: nodes.nodes[node])
    else:
        result = costs.evaluate(problem, assignment)
        place = {device: stage for stage, device in enumerate(result.stages if result else ())}
        order = sorted(range(len(device_of)), key=lambda node: place.get(device_of[node], 0))
    runs: list[list[int]] = []
    for node in order:
        if not runs or device_of[runs[-1][0]] != device_of[node]:
            runs.append([])
        runs[-1].append(node)
    return runs


def _moved(nodes: Reduction, device_of: Sequence[int], moved: Sequence[int], device: int) -> list[int]:
    changed = list(device_of)
    for node in moved:
        changed[node] = device
    return nodes.spread(changed)


def _unlike(problem: Problem, device_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of devices that cannot be swapped for nothing, at least one of them used."""
    used = set(device_of)
    for one in sorted(used):
        for other in range(len(problem.devices)):
            if (other not in used or one < other) and one != other and not problem.alike(one, other):
                yield one, other
