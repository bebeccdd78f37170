"""Lower bounds that need no search."""

from __future__ import annotations

from collections.abc import Sequence

from placer.solver.bounds.memory_bounds import least_of_all, least_of_nodes
from placer.solver.bounds.min_cut_bound import cut_bound
from placer.solver.bounds.work_sharing import least_work
from placer.solver.components import sources_and_readers
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.solver.values import arcs_of, gradient_arcs


def lower_bound(problem: Problem, nodes: Reduction) -> float:
    """Return a lower bound on the objective of every placement, in its unit."""
    objective = problem.request.objective
    if objective == "latency":
        return _least_latency(problem, nodes)
    if objective == "memory":
        return _fair_share_of_memory(problem, nodes)
    # `cut_bound` counts transfers but looks at one device; `least_work` counts all devices but no
    # transfers. Neither contains the other.
    return max(least_work(problem, nodes, problem.compute_ms), cut_bound(problem, nodes))


def _fair_share_of_memory(problem: Problem, nodes: Reduction) -> float:
    """Return the least bytes of the largest node, or the mean over all devices if that is more."""
    # The largest use is at least the mean over the devices, rounded up to a byte.
    shared = -(-least_of_all(problem) // problem.most_devices)
    return float(max(*least_of_nodes(problem, nodes), shared))


def _least_latency(problem: Problem, nodes: Reduction) -> float:
    """Return the longest path, and the work that devices share at best, with free transfers.

    Devices hold different layers. So the first layer of the second device waits for at least
    everything before some layer, and everything after some layer follows its last one.
    """
    passes = [(problem.forward_ms, arcs_of(problem.values))]
    if problem.training:  # the backward pass is looked at from its end
        passes.append((problem.backward_ms, gradient_arcs(problem.values)))
    longest, aside_ms = 0.0, [0.0] * len(problem.layers)
    for time_ms, arcs in passes:
        fastest = fastest_ms(problem, time_ms)
        heads, tails = longest_before(fastest, arcs), longest_behind(fastest, arcs)
        #     heads[l] ──▶ fastest[l] ──▶ tails[l]      the longest path through layer l
        longest += max(map(sum, zip(heads, fastest, tails, strict=True)))
        aside_ms = [
            sum(times) for times in zip(aside_ms, sorted(heads), sorted(tails), strict=True)
        ]
    # The factor covers rounding: the cost model adds the same numbers in another order.
    return max(longest * (1 - 1e-12), least_work(problem, nodes, problem.compute_ms, aside_ms))


def fastest_ms(problem: Problem, time_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return, by layer, its time on the fastest device that it may be on."""
    return [
        min(row[device] for device in problem.allowed[layer]) for layer, row in enumerate(time_ms)
    ]


def longest_before(weight: Sequence[float], arcs: Sequence[tuple[int, int]]) -> list[float]:
    """Return, by layer, the weight of the heaviest path that ends right before it.

    Every arc runs with the layers' order.
    """
    paths = longest_paths(range(len(weight)), weight, arcs)
    return [path - own for path, own in zip(paths, weight, strict=True)]


def longest_behind(weight: Sequence[float], arcs: Sequence[tuple[int, int]]) -> list[float]:
    """Return, by layer, the weight of the heaviest path that begins right behind it."""
    paths = longest_paths(
        range(len(weight) - 1, -1, -1), weight, [(target, source) for source, target in arcs]
    )
    return [path - own for path, own in zip(paths, weight, strict=True)]


def longest_paths(
    order: Sequence[int], weight: Sequence[float], arcs: Sequence[tuple[int, int]]
) -> list[float]:
    """Return, by layer, the weight of the heaviest path that ends with it.

    Every arc runs with the order.
    """
    inputs, _ = sources_and_readers(len(weight), arcs)
    finish = [0.0] * len(weight)
    for layer in order:
        finish[layer] = (
            max((finish[source] for source in inputs[layer]), default=0.0) + weight[layer]
        )
    return finish
