"""Assignments to try under objective ``step``: rounds through the devices, and small changes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from random import Random

from placer.solver import costs
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

KICKS = 3
"""Random small changes before a further climb."""

Value = Callable[[list[int]], float]
"""The step of an assignment of layers, infinite if it breaks a requirement."""

Change = Callable[[], list[int]]
"""Makes an assignment."""


def rounds(problem: Problem, nodes: Reduction, devices: Sequence[int], times: int) -> list[int]:
    """Return the layers dealt out to the devices in several rounds, in proportion to their speed.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        devices: in the order of a round.
        times: the number of rounds.

    Returns:
        By layer, its device.
    """
    whole = [
        sum(problem.compute_ms(layer, d) for layer in range(len(problem.layers))) or 1.0
        for d in devices
    ]
    #     devices   a    b  a    b      two rounds; b is half as fast and gets half as much
    #     nodes     0 1 2|3 |4 5 6|7
    ends = list(accumulate([1 / time_ms for time_ms in whole] * times))
    order = sorted(range(len(nodes.nodes)), key=lambda node: nodes.nodes[node])
    device_of = [devices[0]] * len(nodes.nodes)
    done = 0.0
    for node in order:
        work = problem.work_ms(nodes.nodes[node], devices[0]) / whole[0]
        middle = (done + work / 2) * ends[-1]
        turn = min(bisect(ends, middle), len(ends) - 1)
        device_of[node] = devices[turn % len(devices)]
        done += work
    return nodes.spread(device_of)


def climb(
    problem: Problem, nodes: Reduction, start: list[int], value: Value, over: Callable[[], bool]
) -> list[int]:
    """Return the best assignment on a way of small changes, each of which shortens the step.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        start: by layer, its device.
        value: of an assignment.
        over: asked before each change is tried; ends the climb.

    Returns:
        By layer, its device.
    """
    best, least = start, value(start)
    # Changes are tried in a ring: after an improvement, the search goes on with the next kind of
    # change instead of starting again with the first.
    options, place, idle = list(changes(problem, nodes, start)), 0, 0
    while idle < len(options):
        if over():
            return best
        tried = options[place % len(options)]()
        place, idle = place + 1, idle + 1
        found = value(tried)
        # what comes next is tried of the better one: what came before was of no use
        if found < least * (1 - 1e-9):
            best, least, idle = tried, found, 0
            options = list(changes(problem, nodes, best))
    return best


def kicked(
    problem: Problem, nodes: Reduction, assignment: Sequence[int], random: Random
) -> list[int]:
    """Return an assignment a few small changes away, whatever they cost."""
    found = list(assignment)
    for _ in range(KICKS):
        options = list(changes(problem, nodes, found))
        if not options:
            break
        found = random.choice(options)()
    return found


def changes(problem: Problem, nodes: Reduction, assignment: Sequence[int]) -> Iterator[Change]:
    """Yield the changes that make the neighbours: copies of thousands of maps would be large."""
    device_of = [assignment[layers[0]] for layers in nodes.nodes]
    runs = _runs(problem, nodes, assignment, device_of)
    # 1, 2, 4, ... nodes change sides between two neighbouring stages at once
    for count in (2**power for power in range(max(map(len, runs)).bit_length())):
        for left, right in pairwise(runs):
            if count <= len(left):
                yield partial(_moved, nodes, device_of, left[-count:], device_of[right[0]])
            if count <= len(right):
                yield partial(_moved, nodes, device_of, right[:count], device_of[left[0]])
    for one, other in _unlike(problem, device_of):
        yield partial(_swapped, nodes, device_of, one, other)


def _runs(
    problem: Problem, nodes: Reduction, assignment: Sequence[int], device_of: Sequence[int]
) -> list[list[int]]:
    """Return the nodes stage by stage.

    By device in pipeline order, or, where placements are free, by segment.
    """
    # Segments follow the profile's order; stages follow the pipeline's.
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


def _moved(
    nodes: Reduction, device_of: Sequence[int], moved: Sequence[int], device: int
) -> list[int]:
    changed = list(device_of)
    for node in moved:
        changed[node] = device
    return nodes.spread(changed)


def _swapped(nodes: Reduction, device_of: Sequence[int], one: int, other: int) -> list[int]:
    swap = {one: other, other: one}
    return nodes.spread([swap.get(device, device) for device in device_of])


def _unlike(problem: Problem, device_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of devices that are not interchangeable, at least one of them used."""
    used = set(device_of)
    for one in sorted(used):
        for other in range(len(problem.devices)):
            if (
                (other not in used or one < other)
                and one != other
                and not problem.alike(one, other)
            ):
                yield one, other
