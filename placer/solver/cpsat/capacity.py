"""The most that a device can hold within a bottleneck: work, state, or other weights of nodes."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from placer.solver.bounds.memory_bounds import state_of_nodes
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction

Vector = NDArray[np.float64]


def work_on(problem: Problem, nodes: Reduction, device: int) -> Vector:
    """Return, by node, its time on a device; infinite if it may not be there."""
    return np.array(
        [
            sum(problem.compute_ms(layer, device) for layer in layers) if device in allowed else inf
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
