r"""Lower bounds on a steady-state step, for one number of micro-batches and one schedule.

A device begins a step after its last pass of the step before and its optimizer. So a step takes at
least the time from a device's first pass to its last, and the optimizer. With n micro-batches, f
and b the passes of a stage, o its optimizer, c = f + b, and behind what a micro-batch passes
through in the stages behind it::

    any placement       n * c + o of every device, and what nothing hides of the exchange with its
                        replicas (see ``exchange_bounds.py``); the way from a layer that reads
                        nothing to any other, all micro-batches through that, and the way back,
                        after which the first one's device has its next step; if contiguous, what
                        filling the pipeline takes (see ``fill_bound.py``)
    a row of stages     n * c + o + wait, the stage's own passes
                        before + n * c + wait, without weight halves that run apart; the whole
                        way + (n - 1) * f, and the same with b: all of this between the first
                        pass of the first stage and its last
                        n * a transfer at a cut, which follow one another on a lane

A stage waits as in an isolated step (see ``step_bounds.py``) for what is behind it: wait(f) +
wait(b) under 1f1b and fill-drain, wait(f) under zero-bubble. In inference nothing comes back, and
stages wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import itemgetter

from placer.solver.bounds.simple_bounds import fastest_ms
from placer.solver.bounds.work_sharing import least_work
from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction
from placer.solver.replicas.exchange_bounds import SlotBound, slot_bounds
from placer.solver.step import fill_bound

Arcs = Sequence[tuple[int, int]]

MOST_STARTS = 8
"""Layers that read nothing from which ways are computed, each a pass over the graph."""


def any_placement(
    problem: Problem,
    nodes: Reduction,
    awaited_ms: Sequence[Sequence[float]],
    over: Callable[[], bool] = lambda: False,
) -> float:
    """Return a lower bound on every steady-state step, in milliseconds.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        awaited_ms: by layer and device, what others wait for of a backward pass.
        over: asked before the longer parts of this.
    """
    shared = [
        (least_work(problem, nodes, partial(_work_ms, problem, slot)) - slot.less_ms, slot)
        for slot in slot_bounds(problem)
    ]
    work_ms, slot = max(shared, key=itemgetter(0))
    least = max(work_ms, _way_and_back(problem, awaited_ms))
    if over():
        return least
    return fill_bound.filling_of_steady_state(problem, nodes, awaited_ms, slot, least)


def _work_ms(problem: Problem, slot: SlotBound, layer: int, device: int) -> float:
    """Return the time that a layer keeps a device busy in a step."""
    passes_ms = problem.request.chunks * problem.compute_ms(layer, device)
    return passes_ms + slot.layer_ms(layer, device)


def _way_and_back(problem: Problem, awaited_ms: Sequence[Sequence[float]]) -> float:
    """Return the longest way to a layer, through it with all micro-batches, and back."""
    forward, awaited = fastest_ms(problem, problem.forward_ms), fastest_ms(problem, awaited_ms)
    there, back = arcs_of(problem.values), fill_bound.gradient_arcs(problem)
    read = {reader for _, reader in there}
    starts = [layer for layer in range(len(problem.layers)) if layer not in read][:MOST_STARTS]
    #     way to l    F F F .. F  B .. B   way back     n micro-batches pass through l one by one;
    #                 |-- n passes ------|              the ways above already contain one of them
    further = [
        (problem.request.chunks - 1) * (one + other)
        for one, other in zip(forward, awaited, strict=True)
    ]
    ways = [
        zip(_ways_from(s, forward, there), _ways_from(s, awaited, back), further, strict=True)
        for s in starts
    ]
    return max(sum(way) for by_layer in ways for way in by_layer)


def _ways_from(start: int, time_ms: Sequence[float], arcs: Arcs) -> list[float]:
    """Return, by layer, the longest path to it from one layer, both included.

    Every arc runs with the layers' order.
    """
    way = [-inf] * len(time_ms)
    way[start] = time_ms[start]
    for source, reader in sorted(arcs):
        way[reader] = max(way[reader], way[source] + time_ms[reader])
    return way
