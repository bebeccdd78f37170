"""Placements to start from, each found without a search of the whole space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from placer.solver import exact
from placer.solver.components import topological_order
from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction, reduced

MOST_ORDERS = 8
MOST_WORK = 20_000_000
"""Numbers that the cuts of random orders may look at, all together: a fraction of a second."""


@dataclass(frozen=True)
class Start:
    """An assignment and what is proven on the way.

    Attributes:
        devices: by layer, its device; None if none was found. It may break requirements.
        bound: a proven lower bound on the objective.
        method: what found it.
    """

    devices: list[int] | None
    bound: float
    method: str


def starts(problem: Problem, nodes: Reduction) -> Iterator[Start]:
    """Starts for the search, the likely best first."""
    if problem.contiguous:
        cut = exact.best_cut(problem, nodes)
        yield Start(cut.devices, cut.bound, "linear order")
        yield from _other_orders(problem, nodes)
    else:
        yield from _free_starts(problem)
    for device in range(len(problem.devices)):
        yield Start([device] * len(problem.layers), 0.0, "one device")


def _other_orders(problem: Problem, nodes: Reduction) -> Iterator[Start]:
    """Cuts of random topological orders, as many as take little time."""
    if exact.is_only_order(problem, nodes):
        return
    count = len(nodes.nodes)
    arcs = {(nodes.node_of[source], nodes.node_of[reader]) for source, reader in arcs_of(problem.values)}
    arcs = {(source, reader) for source, reader in arcs if source != reader}
    random = Random(problem.request.seed)
    for _ in range(min(MOST_ORDERS, MOST_WORK // exact.work_of_cut(problem, nodes))):
        order = topological_order(count, arcs, [random.random() for _ in range(count)])
        yield Start(exact.best_cut(problem, nodes, order).devices, 0.0, "linear order")


def _free_starts(problem: Problem) -> Iterator[Start]:
    """Contiguous placements are free ones too; without colocation, its groups are brought together afterwards."""
    contiguous = replace(problem, contiguous=True)
    nodes = reduced(contiguous)
    if all(nodes.allowed):
        yield Start(exact.best_cut(contiguous, nodes).devices, 0.0, "linear order")
    if problem.groups:
        apart = replace(contiguous, groups=())
        cut = exact.best_cut(apart, reduced(apart)).devices
        for member in range(max(len(group) for group in problem.groups)) if cut is not None else ():
            devices = list(cut or ())
            for group in problem.groups:
                for layer in group:
                    devices[layer] = (cut or ())[group[min(member, len(group) - 1)]]
            yield Start(devices, 0.0, "linear order")
