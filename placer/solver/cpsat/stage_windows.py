"""Windows of stages: where a node can be if no stage exceeds a known bottleneck.

They follow from the most work and state that a device can hold within the bottleneck.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress
from math import inf

import numpy as np
from numpy.typing import NDArray

from placer.solver.bounds.memory_bounds import can_bind, state_of_nodes
from placer.solver.components import sources_and_readers
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction
from placer.solver.values import arcs_of

Vector = NDArray[np.float64]


def work_on(problem: Problem, nodes: Reduction, device: int) -> Vector:
    """Return, by node, its time on a device; infinite if it may not be there."""
    return np.array(
        [
            problem.work_ms(layers, device) if device in allowed else inf
            for layers, allowed in zip(nodes.nodes, nodes.allowed, strict=True)
        ]
    )


def most_within(worth: Vector, work: Vector, upper: float) -> tuple[float, float]:
    """Return the largest worth within ``upper``, parts of nodes allowed, and its slope there.

    Args:
        worth: by node, 0 or more.
        work: by node, its time; infinite if it may not be there.
        upper: the time of all, in milliseconds.
    """
    # This is a fractional knapsack: take nodes by worth per millisecond, and cut the last one. The
    # value bounds every whole selection from above.
    #    worth ▲        ____·   slope: worth per ms of the node that is cut
    #          │   __/
    #          │_/
    #          └───────|────▶ time
    #                upper
    able = work <= upper * (1 + ROUNDING)
    value, time_ms = worth[able], work[able]
    share = np.divide(value, time_ms, out=np.full(len(value), inf), where=time_ms > 0)
    order = np.argsort(-share, kind="stable")
    done = np.cumsum(time_ms[order])
    fit = int(np.searchsorted(done, upper, side="right"))
    most = float(value[order[:fit]].sum())
    if fit == len(order):
        return most, 0.0
    left = upper - (float(done[fit - 1]) if fit else 0.0)
    slope = float(share[order[fit]])
    return most + left * slope, slope


def most_state(problem: Problem, nodes: Reduction, upper: float) -> list[float]:
    """Return the most bytes of state that so many devices hold within a bottleneck.

    By their number, from none on.
    """
    state = np.array(state_of_nodes(problem, nodes), np.float64)
    each: list[float] = []
    for alike in problem.alike_devices():
        within, _ = most_within(state, work_on(problem, nodes, alike[0]), upper)
        # Alike devices have the same capacity. Sorting puts the largest first, since the devices
        # that are used are unknown.
        each += [min(float(problem.devices[alike[0]].usable_bytes), within)] * len(alike)
    return [0.0, *np.cumsum(sorted(each, reverse=True)).tolist()]


MOST_NODES = 2_000
"""Nodes above which sets of predecessors, with a bit per node, take seconds."""


def stage_windows(problem: Problem, nodes: Reduction, upper_ms: float) -> list[tuple[int, int]]:
    """Return, by node, the first and the last stage that it can be at in a contiguous placement.

    All that a node depends on is at its stage or before, so it cannot be at stage p if that is more
    work than p + 1 stages do in ``upper_ms`` each, or more state than they hold; the same from the
    end. Work is reckoned on the fastest device.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes, in topological order.
        upper_ms: no stage may take longer.
    """
    count, stages = len(nodes.nodes), problem.most_devices
    anywhere = [(0, stages - 1)] * count
    if count > MOST_NODES or upper_ms <= 0:
        return anywhere
    devices = range(len(problem.devices))
    work = [min(problem.work_ms(layers, device) for device in devices) for layers in nodes.nodes]
    before, behind = neighbourhood(problem, nodes)
    most = upper_ms * (1 + ROUNDING)
    room = most_state(problem, nodes, upper_ms) if can_bind(problem) else [inf]
    state = state_of_nodes(problem, nodes)
    windows = []
    for node in range(count):
        #     stages of `most` ms   |  0  |  1  |  2  |  3  |
        #     work up to n          |===========n|             n cannot be at stage 0
        first = min(int(_total(work, before[node]) / most - ROUNDING), stages - 1)
        behind_it = int(_total(work, behind[node]) / most - ROUNDING)
        # The same for memory: the state before n needs that many stages to hold it.
        first = max(first, _stages_to_hold(_total(state, before[node]), room) - 1)
        behind_it = max(behind_it, _stages_to_hold(_total(state, behind[node]), room) - 1)
        windows.append((first, stages - 1 - behind_it))
    return windows


def _stages_to_hold(size: float, room: Sequence[float]) -> int:
    """Return how many stages it takes to hold so much state, by what so many can.

    One more than there are if none do.
    """
    return bisect_left(room, size * (1 - ROUNDING))


def neighbourhood(problem: Problem, nodes: Reduction) -> tuple[list[int], list[int]]:
    """Return, by node, what it depends on and what depends on it, itself included, as bits."""
    count = len(nodes.nodes)
    arcs = nodes.arcs(arcs_of(problem.values))
    before = _reached(count, [(reader, source) for source, reader in arcs], range(count))
    behind = _reached(count, list(arcs), range(count - 1, -1, -1))
    return before, behind


def _reached(count: int, arcs: Sequence[tuple[int, int]], order: Sequence[int]) -> list[int]:
    """Return, by node, itself and all that can be reached, as bits.

    ``order`` has the targets of arcs first.
    """
    _, targets = sources_and_readers(count, arcs)
    reached = [0] * count
    for node in order:
        reached[node] = 1 << node
        # The targets come first in the order, so their sets are complete.
        for target in targets[node]:
            reached[node] |= reached[target]
    return reached


def _total(work: Sequence[float], bits: int) -> float:
    total = 0.0
    for node in members(bits):
        total += work[node]
    return total


_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


def members(bits: int) -> list[int]:
    """Return the nodes that are set."""
    # Faster than testing bits one by one: `compress` selects the indices of ones in C.
    digits = bin(bits)[:1:-1].encode().translate(_DIGITS)
    return list(compress(range(len(digits)), digits))
