"""The steps at which a device may reach its peak: only these have rules in an integer program.

Each function leaves out the steps that keep a device within ``limit_bytes`` with all layers on it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from placer.solver import memory
from placer.solver.bounds.memory_bounds import most_use_bytes
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction


@dataclass(frozen=True)
class PeakStep:
    """A step whose need may be the largest, forwards or backwards.

    Attributes:
        step: the layer.
        forwards: which of its two steps.
        workspace: the layer's, in bytes.
        waiting: whether something can wait there meanwhile.
    """

    step: int
    forwards: bool
    workspace: int
    waiting: bool


def recorded_peak_steps(problem: Problem, nodes: Reduction, limit_bytes: int) -> list[PeakStep]:
    """Return the steps that may need the most, in order, each of the two ways for itself."""
    # All layers on one device: the most that can be held at each step. Steps that fit even then
    # cannot exceed a limit and need no rule.
    everything = memory.held_with(problem, range(len(problem.layers)))
    moments, _ = memory.moments_recorded(problem, everything)
    chunks = problem.request.chunks
    all_bytes = most_use_bytes(problem)
    waits = _may_wait(problem)
    rows = []
    for forwards in (True, False):
        steps = [moment[not forwards] for moment in moments]
        often = chunks if forwards else problem.backwards(chunks)
        other_bytes = all_bytes - often * max(0, *map(sum, steps))
        # Dominance inside a node: its layers share a device, so a step with less need and no more
        # held bytes adds nothing.
        before = [-1 if forwards else 0] * len(nodes.nodes)
        # Of a node's steps the last one has kept the most forwards, the first one has the most to
        # leave backwards.
        for step in reversed(range(len(steps))) if forwards else range(len(steps)):
            node, need = nodes.node_of[step], steps[step][1]
            wait = waits[not forwards][step]
            if need + wait > before[node] and other_bytes + often * sum(steps[step]) > limit_bytes:
                rows.append(PeakStep(step, forwards, need, wait > 0))
            before[node] = max(before[node], need)
    return sorted(rows, key=lambda row: row.step)


def training_peak_steps(problem: Problem, nodes: Reduction, limit_bytes: int) -> list[PeakStep]:
    """Return the steps that may need the most, in order."""
    everything = memory.held_with(problem, range(len(problem.layers)))
    kept = memory.kept_by_step(problem, everything)
    moments = memory.moments_of_training(problem, everything, kept)
    use = memory.footprint(problem, everything)
    further = (problem.request.chunks - 1) * use.kept_bytes
    other_bytes = use.one.total_bytes + further - use.one.activation_bytes - use.one.workspace_bytes
    waits = _may_wait(problem)
    later = [0] * len(nodes.nodes)
    rows = []
    for step in reversed(range(len(problem.layers))):
        layer, node = problem.layers[step], nodes.node_of[step]
        backwards = layer.backward_workspace_bytes
        # a device that may recompute may also not, and run recorded passes
        if problem.recorded:
            backwards = min(backwards, problem.back_workspace_bytes[step])
        needs = (layer.forward_workspace_bytes, backwards)
        for forwards in (False, True):
            there, need, wait = (
                moments[step][not forwards],
                needs[not forwards],
                waits[not forwards][step],
            )
            # A later step of the same node, or the other one of this, keeps no less.
            if need + wait > later[node] and other_bytes + sum(there) > limit_bytes:
                rows.append(PeakStep(step, forwards, need, wait > 0))
            later[node] = max(later[node], need)
    return rows[::-1]


def inference_peak_steps(problem: Problem, limit_bytes: int) -> list[PeakStep]:
    """Return the steps that may need the most, in order."""
    values: Counter[int] = Counter()
    for value in problem.values:
        memory.between(values, value.source, value.readers[-1] + 1, value.held_bytes)
    live = memory.sums(values, range(len(problem.layers)))
    state = sum(layer.param_bytes + layer.buffer_bytes for layer in problem.layers)
    workspaces = [layer.forward_workspace_bytes for layer in problem.layers]
    return [
        PeakStep(step, True, workspace, held > 0)
        for step, (held, workspace) in enumerate(zip(live, workspaces, strict=True))
        if held + workspace and state + held + workspace > limit_bytes
    ]


def _may_wait(problem: Problem) -> tuple[list[int], list[int]]:
    """Return, by step, the most bytes of values that may wait there, and of gradients."""
    values: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    for value in problem.values:
        memory.between(values, value.source + 1, value.readers[-1], value.held_bytes)
        memory.between(gradients, value.source + 1, value.readers[-1], value.gradient_bytes)
        memory.between(gradients, value.retained_from, value.retained_until, value.retained_bytes)
    steps = range(len(problem.layers))
    return memory.sums(values, steps), memory.sums(gradients, steps)
