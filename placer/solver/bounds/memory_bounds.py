"""Bounds of the memory in ``memory.py``: sums over layers that need no placement, in bytes.

    least <= use(d) <= most

A device with a given set of layers uses at least what the layers keep all the time and for each
micro-batch in flight, and at most that with everything that may wait or cross at the same moment.
Both are sums over nodes, so searches compare them first and compute a footprint only in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placer.schema import Layer
from placer.solver import memory
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

Vector = NDArray[np.float64]


def state_bytes(problem: Problem, layer: Layer) -> int:
    """Return the bytes that a layer holds all the time."""
    held = layer.param_bytes + layer.buffer_bytes
    return held + layer.grad_bytes + layer.optimizer_bytes if problem.training else held


def can_bind(problem: Problem) -> bool:
    """Return whether some device could exceed its limit: it cannot where all layers fit at once."""
    limit = min(device.usable_bytes for device in problem.devices)
    if sum(state_bytes(problem, layer) for layer in problem.layers) > limit:
        return True
    return most_use_bytes(problem) > limit


def holds_state_alone(problem: Problem) -> bool:
    """Return whether the layers' state is all that takes memory."""
    layers = problem.layers
    passing = sum(
        la.saved_bytes + la.forward_workspace_bytes + la.backward_workspace_bytes for la in layers
    )
    waiting = sum(value.held_bytes + value.waiting_bytes for value in problem.values)
    apart = (
        sum(problem.step_bytes)
        + sum(problem.deferred_bytes)
        + sum(problem.back_workspace_bytes)
        + sum(problem.weight_grad_workspace_bytes)
    )
    return passing + waiting + apart == 0


def most_use_bytes(problem: Problem) -> int:
    """Return what no device exceeds with any layers, with all micro-batches in flight."""
    if holds_state_alone(problem):
        return sum(state_bytes(problem, layer) for layer in problem.layers)
    # One device that holds all layers needs at least as much as a device with some of them.
    everything = memory.held_with(problem, range(len(problem.layers)))
    chunks = problem.request.chunks
    use = memory.footprint(problem, everything)
    total = use.total_bytes(chunks, backwards=problem.backwards(chunks))
    # Crossing and landing bytes of recorded passes occur only where some layers are elsewhere, so
    # they are not in the total.
    if problem.recorded:
        crossing = sum(value.held_bytes + value.gradient_bytes for value in problem.values)
        total += 2 * chunks * crossing
    return total


def least_of_nodes(problem: Problem, nodes: Reduction) -> list[int]:
    """Return, by node, the least bytes of the device that holds it."""
    if holds_state_alone(problem):
        return state_of_nodes(problem, nodes)
    return [_least_alone(problem, memory.held_with(problem, layers)) for layers in nodes.nodes]


def _least_alone(problem: Problem, held: memory.Held) -> int:
    """Return the least bytes of a device that holds these layers, and maybe more."""
    flight, use = _least_flight(problem), memory.footprint(problem, held)
    backwards = problem.backwards(flight)
    # Bytes of values that cross occur only if a neighbouring layer is on another device. The device
    # may hold that layer too, so the bound leaves these bytes out.
    crossing = 0
    if problem.recorded:
        crossing = memory.crossing_bytes(held) + memory.sent_bytes(held)
        crossing += memory.landing_bytes(held) if flight > backwards else 0
    least = use.total_bytes(flight, backwards=backwards) - flight * crossing
    return min(least, use.total_bytes(flight, again=True)) if problem.may_recompute else least


def least_of_all(problem: Problem) -> int:
    """Return the least bytes that all devices hold together."""
    need = sum(_states(problem))
    if problem.training:
        flight = _least_flight(problem)
        need += flight * sum(_kept(problem))
        need += (
            0 if problem.may_recompute else problem.backwards(flight) * sum(problem.deferred_bytes)
        )
    return need


def _least_flight(problem: Problem) -> int:
    """Return the fewest micro-batches in flight that a device may have."""
    request = problem.request
    # 1F1B and zero-bubble let the last stage hold one micro-batch. Fill-drain, and devices with
    # several segments, hold all of them at the end of the forward passes.
    few = request.schedule != "fill-drain" and problem.one_stage_each
    return 1 if few or problem.may_recompute else request.chunks


def state_of_nodes(problem: Problem, nodes: Reduction) -> list[int]:
    """Return, by node, the bytes that it holds all the time."""
    return _by_node(_states(problem), nodes)


def kept_of_nodes(problem: Problem, nodes: Reduction, flight: int) -> list[int]:
    """Return, by node, its state and what so many micro-batches in flight keep there."""
    kept = zip(_states(problem), _kept(problem), strict=True)
    return _by_node([state + flight * each for state, each in kept], nodes)


def least_by_node(problem: Problem, nodes: Reduction, device: int, flight: int) -> Vector:
    """Return, by node, the least bytes that a device uses for it: its state and what it keeps.

    Args:
        problem: the placement problem.
        nodes: its layers.
        device: the device that holds the nodes.
        flight: the micro-batches in flight there; 1 where it may recompute.
    """
    if not problem.training:
        return np.array(state_of_nodes(problem, nodes), np.float64)
    least = np.array(kept_of_nodes(problem, nodes, flight), np.float64)
    # Recorded passes keep separate memory for deferred weight gradients and for the optimizer step.
    # A device that recomputes runs eager passes, which share their memory.
    if problem.recorded and problem.recompute[device] == "never":
        backwards = problem.backwards(flight)
        apart = zip(problem.deferred_bytes, problem.step_bytes, strict=True)
        least += _by_node([backwards * deferred + step for deferred, step in apart], nodes)
    return least


def most_by_node(problem: Problem, nodes: Reduction, flight: int) -> Vector:
    """Return, by node, the most bytes that a stage uses for it, recomputed or not.

    Args:
        problem: the placement problem.
        nodes: its layers.
        flight: the micro-batches in flight.
    """
    apart = zip(problem.weight_grad_workspace_bytes, problem.step_bytes, strict=True)
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
            # A value may be kept or wait, and cross. Its gradient may wait, cross and land.
            held[index] += (
                flight * (2 * value.held_bytes + 3 * value.gradient_bytes) + value.retained_bytes
            )
    # Any stage without the first owner of a shared parameter holds its own copy.
    for shared in problem.shared:
        for index in shared.others:
            held[index] += shared.total_bytes
    return np.array(_by_node(held, nodes), np.float64)


def _states(problem: Problem) -> list[int]:
    return [state_bytes(problem, layer) for layer in problem.layers]


def _kept(problem: Problem) -> list[int]:
    """Return, by layer, the bytes that one micro-batch leaves there for its backward pass.

    A value counts once, at the first of the layers that keep it.
    """
    kept = [layer.saved_bytes for layer in problem.layers]
    for value in problem.values:
        if value.keepers:
            kept[value.keepers[0]] += value.held_bytes
    return kept


def _by_node(sizes: Sequence[int], nodes: Reduction) -> list[int]:
    return [sum(sizes[layer] for layer in layers) for layers in nodes.nodes]
