"""A problem of free placements as one of sets: each device holds a set of nodes, and pays for the nets that it cuts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from placer.solver.contiguous.stage_links import stage_links
from placer.solver.free.sweeps import Pins, Step, sweep
from placer.solver.nets import joined_nets
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MANY = 100
"""So many pairs of a node and a device are many."""

MOST_NODES = 1_500


@dataclass(frozen=True)
class SetGraph:
    """What a device's load is at the least, by the set that it holds.

    Limits of memory and forbidden devices are left out of account: these are more sets than there are.

    Attributes:
        steps: the sweep.
        nets: by pins, what it costs to cut.
        work_ms: by node, on the fastest device that pays for transfers.
        free_ms: by device that pays for no transfer, by node.
        devices: how many others there are.
    """

    steps: list[Step]
    nets: dict[Pins, float]
    work_ms: list[float]
    free_ms: list[list[float]]
    devices: int


def applies(problem: Problem) -> bool:
    """Whether a device's load is what it holds and what it exchanges, as sets are reckoned."""
    request = problem.request
    return not problem.contiguous and request.objective == "throughput" and request.transfers == "added"


def worth_looking(problem: Problem, nodes: Reduction) -> bool:
    """Whether the integer program would not prove as much in no time."""
    return len(nodes.nodes) * len(problem.devices) >= MANY


def set_graph(problem: Problem, nodes: Reduction) -> SetGraph | None:
    """The sets of a problem that ``applies`` names; None if there are too many to go through, or none does any work.

    Args:
        problem: what is asked.
        nodes: its layers, joined where they must be together.
    """
    links = stage_links(problem)
    paying = [device for device in range(len(problem.devices)) if device not in problem.untaxed]
    if links is None or not paying or len(nodes.nodes) > MOST_NODES:
        return None
    nets: dict[Pins, float] = defaultdict(float)
    for net in joined_nets(problem, nodes, links.quickest):
        nets[tuple(sorted((net.source, *net.readers)))] += net.there_ms + net.back_ms
    steps = sweep(len(nodes.nodes), nets)
    work = [min(_work(problem, layers, device) for device in paying) for layers in nodes.nodes]
    if steps is None or not any(work):
        return None
    free = [[_work(problem, layers, device) for layers in nodes.nodes] for device in sorted(problem.untaxed)]
    return SetGraph(steps, nets, work, free, min(len(paying), problem.most_devices))


def _work(problem: Problem, layers: Sequence[int], device: int) -> float:
    return sum(problem.compute_ms(layer, device) for layer in layers)
