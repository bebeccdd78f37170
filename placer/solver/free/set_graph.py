"""Free placement as choice of sets: each device holds a set of nodes and pays for cut nets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from placer.schema import Link
from placer.solver.free.subset_sweep import Pins, Step, sweep
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, best_link, cut_costs, joined_nets

MANY = 100
"""Pairs of a node and a device from which proofs by sets beat the integer program."""

MOST_NODES = 1_500
"""Nodes above which sweeps take too long."""


@dataclass(frozen=True)
class Kind:
    """Devices that a set loads alike, at the least.

    Attributes:
        devices: how many.
        steps: the sweep.
        nets: by pins, what it costs to cut.
        work_ms: by node; infinite where it may not be.
    """

    devices: int
    steps: list[Step]
    nets: dict[Pins, float]
    work_ms: list[float]

    def load(self, nodes: frozenset[int]) -> float:
        """Return the load of a set on a device of this kind, in milliseconds."""
        cut = sum(
            cost
            for pins, cost in self.nets.items()
            if 0 < sum(pin in nodes for pin in pins) < len(pins)
        )
        return cut + sum(self.work_ms[node] for node in nodes)


@dataclass(frozen=True)
class SetGraph:
    """What a device's load is at the least, by the set that it holds.

    Limits of memory are left out of account, and so is that links of a device differ: these are
    more sets than there are.

    Attributes:
        kinds: the devices that pay for transfers.
        free_ms: by device that pays for no transfer, by node.
    """

    kinds: list[Kind]
    free_ms: list[list[float]]


def applies(problem: Problem) -> bool:
    """Return whether a device's load is its work and its transfers, as for sets."""
    request = problem.request
    return (
        not problem.contiguous
        and request.objective == "throughput"
        and request.transfers == "added"
    )


def worth_looking(problem: Problem, nodes: Reduction) -> bool:
    """Return whether the integer program would not prove as much in no time."""
    return len(nodes.nodes) * len(problem.devices) >= MANY


def set_graph(problem: Problem, nodes: Reduction) -> SetGraph | None:
    """Return the sets of a problem that ``applies`` names.

    The result is None if there are too many nodes, or none does any work.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
    """
    paying = [device for device in range(len(problem.devices)) if device not in problem.untaxed]
    links = {device: _best_link(problem, [device]) for device in paying}
    best = _best_link(problem, paying)
    if best is None or len(nodes.nodes) > MOST_NODES:
        return None
    work = _work_ms(problem, nodes)
    least = [min(work[device][node] for device in paying) for node in range(len(nodes.nodes))]
    if not any(least):
        return None
    free = [work[device] for device in sorted(problem.untaxed)]
    # If some devices must stay unused, it is open how many of each kind are used. Then all of them
    # count as good as the best for every node and net.
    if len(paying) > problem.most_devices:
        return SetGraph([Kind(problem.most_devices, *_cuts(problem, nodes, best), least)], free)
    cuts = {link: _cuts(problem, nodes, link) for link in set(links.values())}
    alike = Counter((links[device], _able_ms(nodes, work, device)) for device in paying)
    kinds = [Kind(count, *cuts[link], list(able)) for (link, able), count in alike.items()]
    return SetGraph(kinds, free)


def _work_ms(problem: Problem, nodes: Reduction) -> list[list[float]]:
    """Return, by device, the time of each node in milliseconds."""
    devices = range(len(problem.devices))
    return [[problem.work_ms(layers, device) for layers in nodes.nodes] for device in devices]


def _able_ms(nodes: Reduction, work: list[list[float]], device: int) -> tuple[float, ...]:
    """Return, by node, its time on a device; infinite if it may not be there."""
    return tuple(
        time if device in may else inf
        for time, may in zip(work[device], nodes.allowed, strict=True)
    )


def _best_link(problem: Problem, devices: Sequence[int]) -> Link | None:
    """Return a link as good as any from or to these devices, or None if there is no link."""
    links = [
        link
        for source, target in permutations(range(len(problem.devices)), 2)
        if (source in devices or target in devices)
        and (link := problem.links[source][target]) is not None
    ]
    return best_link(links) if links else None


def _cuts(
    problem: Problem, nodes: Reduction, link: Link | None
) -> tuple[list[Step], dict[Pins, float]]:
    """Return the sweep, and by pins what it costs to cut nets over a link.

    The result is None where they have too many states.
    """
    nets = cut_costs(joined_nets(problem, nodes, link) if link is not None else ())
    steps = sweep(len(nodes.nodes), nets)
    return (steps, nets) if steps is not None else (sweep(len(nodes.nodes), {}) or [], {})
