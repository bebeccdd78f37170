"""What must be held whatever the placement: lower bounds of memory, in bytes.

But for what crosses to other devices, what a device holds grows with its layers and with the
micro-batches in flight. So no device holds less than a node of its alone would with as few
micro-batches as there may be, and all devices together hold at least the state and what those
micro-batches keep, each value once.
"""

from __future__ import annotations

from placer.solver import memory
from placer.solver.cpsat import memory_constraints
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction


def least_of_nodes(problem: Problem, nodes: Reduction) -> list[int]:
    """By node, what its device holds at the least."""
    if memory_constraints.holds_state_alone(problem):
        sizes = [memory_constraints.state_bytes(problem, layer) for layer in problem.layers]
        return [sum(sizes[layer] for layer in layers) for layers in nodes.nodes]
    return [_least_alone(problem, memory.held_with(problem, layers)) for layers in nodes.nodes]


def _least_alone(problem: Problem, held: memory.Held) -> int:
    """What a device that holds this, and maybe more, has at the least."""
    flight, use = _least_flight(problem), memory.footprint(problem, held)
    backwards = problem.backwards(flight)
    crossing = 0
    if problem.recorded:
        crossing = memory.crossing_bytes(held) + memory.sent_bytes(held)
        crossing += memory.landing_bytes(held) if flight > backwards else 0
    least = use.total_bytes(flight, backwards=backwards) - flight * crossing
    return min(least, use.total_bytes(flight, again=True)) if problem.may_recompute else least


def least_of_all(problem: Problem) -> int:
    """What all devices hold together at the least."""
    need = sum(memory_constraints.state_bytes(problem, layer) for layer in problem.layers)
    if problem.training:
        flight = _least_flight(problem)
        need += flight * sum(layer.saved_bytes for layer in problem.layers)
        need += flight * sum(value.held_bytes for value in problem.values if value.keepers)
        need += (
            0 if problem.may_recompute else problem.backwards(flight) * sum(problem.deferred_bytes)
        )
    return need


def _least_flight(problem: Problem) -> int:
    """The fewest micro-batches in flight that a device may have."""
    request = problem.request
    few = request.schedule != "fill-drain" and problem.one_stage_each
    return 1 if few or problem.may_recompute else request.chunks
