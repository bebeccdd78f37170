"""How much a device can hold at the most within a bottleneck: of work, of state, of anything that
nodes weigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from placer.solver.cpsat import memory_constraints
from placer.solver.problem import Problem
from placer.solver.reduce import SLACK, Reduction

Vector = NDArray[np.float64]


def work_on(problem: Problem, nodes: Reduction, device: int) -> Vector:
    """By node, its time on a device; infinite if it may not be there."""
    return np.array(
        [
            sum(problem.compute_ms(layer, device) for layer in layers) if device in allowed else inf
            for layers, allowed in zip(nodes.nodes, nodes.allowed, strict=True)
        ]
    )


def state_of(problem: Problem, nodes: Reduction) -> Vector:
    """By node, the bytes that it holds all the time."""
    return _by_node(_states(problem), nodes)


def least_held(problem: Problem, nodes: Reduction, device: int, flight: int) -> Vector:
    """By node, the bytes that a stage has on a device for it at the least: state, and of
    micro-batches what they keep.

    What a stage keeps of a value counts for the first of all layers that keep it, so that nothing
    counts twice.

    Args:
        problem: what is asked.
        nodes: its layers.
        device: where the stage is.
        flight: how many micro-batches are in flight there; 1 where it may recompute.
    """
    held = _states(problem)
    if not problem.training:
        return _by_node(held, nodes)
    recorded = problem.recorded and problem.recompute[device] == "never"
    for index, layer in enumerate(problem.layers):
        held[index] += flight * layer.saved_bytes
        if recorded:
            held[index] += (
                problem.backwards(flight) * problem.deferred_bytes[index]
                + problem.step_bytes[index]
            )
    for value in problem.values:
        if value.keepers:
            held[value.keepers[0]] += flight * value.held_bytes
    return _by_node(held, nodes)


def most_held(problem: Problem, nodes: Reduction, flight: int) -> Vector:
    """By node, bytes of which a stage has no more for it, with so many micro-batches in flight,
    recomputed or not.
    """
    apart = zip(problem.weights_workspace_bytes, problem.step_bytes, strict=True)
    held = [state + sum(more) for state, more in zip(_states(problem), apart, strict=True)]
    for index, layer in enumerate(problem.layers):
        backwards = max(layer.backward_workspace_bytes, problem.back_workspace_bytes[index])
        passing = (
            layer.saved_bytes
            + layer.forward_workspace_bytes
            + backwards
            + problem.deferred_bytes[index]
        )
        held[index] += flight * passing
    for value in problem.values:
        for index in {value.source, *value.readers}:
            # kept or waiting, and where it crosses; its gradient waiting, where it crosses, and
            # where it lands
            held[index] += (
                flight * (2 * value.held_bytes + 3 * value.gradient_bytes) + value.rest_bytes
            )
    for shared in problem.shared:
        for index in shared.others:
            held[index] += shared.total_bytes
    return _by_node(held, nodes)


def _states(problem: Problem) -> list[int]:
    return [memory_constraints.state_bytes(problem, layer) for layer in problem.layers]


def _by_node(sizes: Sequence[int], nodes: Reduction) -> Vector:
    return np.array([float(sum(sizes[layer] for layer in layers)) for layers in nodes.nodes])


def most_within(worth: Vector, work: Vector, upper: float) -> tuple[float, float]:
    """The most worth that takes no longer than ``upper``, parts of nodes allowed, and its slope
    there.

    Args:
        worth: by node, 0 or more.
        work: by node, its time; infinite if it may not be there.
        upper: the time of all, in milliseconds.
    """
    able = work <= upper * (1 + SLACK)
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
    """The most bytes of state that so many devices hold within a bottleneck: by their number, from
    none on.
    """
    state = state_of(problem, nodes)
    each: list[float] = []
    for alike in problem.alike_devices():
        within, _ = most_within(state, work_on(problem, nodes, alike[0]), upper)
        each += [min(float(problem.devices[alike[0]].usable_bytes), within)] * len(alike)
    return [0.0, *np.cumsum(sorted(each, reverse=True)).tolist()]
