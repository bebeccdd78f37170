"""Dynamic programming over ideals, where they are few: exact for any graph, not for one linear order alone.

An ideal is a set of nodes that holds all that its nodes depend on. What the first stages of a contiguous placement hold
is an ideal, so a placement is a chain of ideals, and a stage is what one has more than the one before::

    {} < {0, 1} < {0, 1, 2, 4} < all        best(devices, J) = min over ideals I within J and a class c of devices of
     stage  a         b         c                              max(best(devices less one of c, I), load_c(J less I))

The load of J less I grows node by node: where v joins J, the k-th pin of a net to do so, the net becomes touched
if I has all the others that J has, and is no longer cut if v was its last and I has none of its pins.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, section 5.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from placer.solver import memory_rules
from placer.solver.exact import Counts, Cut, kinds_left, one_less
from placer.solver.nets import Net, joined_nets
from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction
from placer.solver.windows import members

Table = NDArray[np.float64]

MOST_IDEALS = 1_500
MOST_STATES = 64
"""The most numbers of devices that a placement may take from their classes."""

ROUNDING = 1e-9


def applies(problem: Problem) -> bool:
    """Whether a stage's load follows from what it holds, or is at least so much."""
    return (
        problem.contiguous
        and problem.request.objective == "throughput"
        and problem.request.transfers == "added"
        and problem.one_link is not None
        and problem.least_devices == 1
        and problem.most_layers is None
        and prod(len(members) + 1 for members in problem.alike_devices()) <= MOST_STATES
    )


def best_chain(problem: Problem, nodes: Reduction) -> Cut | None:
    """The best chain of ideals; None where they are too many.

    Args:
        problem: what is asked, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.

    Returns:
        The placement of the best chain, and a bound that holds for all: it counts of memory the state alone, and a
        value once for all stages that read it.
    """
    lattice = _lattice(problem, nodes)
    return None if lattice is None else _Chains(problem, nodes, lattice).best()


@dataclass(frozen=True)
class _Lattice:
    """All ideals, smaller ones first.

    Attributes:
        ideals: their nodes as bits.
        steps: for each but the first, the ideals that it comes from by one node more, and that node.
    """

    ideals: list[int]
    steps: list[list[tuple[int, int]]]


def _lattice(problem: Problem, nodes: Reduction) -> _Lattice | None:
    count = len(nodes.nodes)
    needs, readers = [0] * count, [0] * count
    for source, reader in nodes.arcs(arcs_of(problem.values)):
        needs[reader] |= 1 << source
        readers[source] |= 1 << reader
    ideals, steps = [0], [list[tuple[int, int]]()]
    place = {0: 0}
    ready = [sum(1 << node for node in range(count) if not needs[node])]
    for index, ideal in enumerate(ideals):  # grows as it goes
        for node in members(ready[index]):
            larger = ideal | 1 << node
            if larger not in place:
                if len(ideals) == MOST_IDEALS:
                    return None
                place[larger] = len(ideals)
                ideals.append(larger)
                steps.append([])
                freed = sum(1 << reader for reader in members(readers[node]) if not needs[reader] & ~larger)
                ready.append(ready[index] & ~(1 << node) | freed)
            steps[place[larger]].append((index, node))
    return _Lattice(ideals, steps)


class _Chains:
    """The tables of the dynamic program."""

    def __init__(self, problem: Problem, nodes: Reduction, lattice: _Lattice) -> None:
        self.problem, self.nodes, self.lattice = problem, nodes, lattice
        self.classes = problem.alike_devices()
        self.transfers = self._transfers()
        self.load = [self._load(members[0]) for members in self.classes]
        self.reached: dict[Counts, Table] = {}

    def best(self) -> Cut:
        """The smallest bottleneck, and a placement that has it, or about it."""
        ideals = len(self.lattice.ideals)
        start = np.full(ideals, inf)
        start[0] = 0.0
        ranges = [range(len(members) + 1) for members in self.classes]
        for counts in sorted(itertools.product(*ranges), key=sum):
            if sum(counts) <= self.problem.most_devices:
                kinds = kinds_left(counts)
                self.reached[counts] = np.min([self._through(counts, kind).min(axis=1) for kind in kinds] or [start], 0)
        chosen = min(self.reached, key=lambda counts: (float(self.reached[counts][-1]), sum(counts)))
        value = float(self.reached[chosen][-1])
        if value == inf:
            return Cut(None, inf)
        return Cut(self._read(chosen), value * (1 - ROUNDING), value)

    def _through(self, counts: Counts, kind: int) -> Table:
        """By ideal and the one before it, the bottleneck where a device of a class holds what is between."""
        joined: Table = np.maximum(self.load[kind], self.reached[one_less(counts, kind)][None, :])
        return joined

    def _read(self, counts: Counts) -> list[int]:
        """By layer, its device, following the best choices from the last ideal."""
        left = [list(members) for members in self.classes]
        devices = [0] * len(self.nodes.nodes)
        ideal = len(self.lattice.ideals) - 1
        while ideal:
            options = [(self._through(counts, kind)[ideal], kind) for kind in kinds_left(counts)]
            row, kind = min(options, key=lambda option: float(option[0].min()))
            before = int(row.argmin())
            device = left[kind].pop()
            for node in members(self.lattice.ideals[ideal] & ~self.lattice.ideals[before]):
                devices[node] = device
            ideal, counts = before, one_less(counts, kind)
        return self.nodes.spread(devices)

    def _load(self, device: int) -> Table:
        """By ideal and one within it, the load of a device that holds what is between; infinite if it cannot."""
        problem = self.problem
        work = [sum(problem.compute_ms(layer, device) for layer in layers) for layers in self.nodes.nodes]
        load = np.where(self.transfers < inf, 0.0, inf) if device in problem.untaxed else self.transfers
        load = load + self._between(work)
        banned = self._between([float(device not in devices) for devices in self.nodes.allowed])
        state = [
            float(sum(memory_rules.state_bytes(problem, problem.layers[layer]) for layer in layers))
            for layers in self.nodes.nodes
        ]
        limit = problem.devices[device].usable_bytes * (1 + ROUNDING)
        return np.where((banned > 0.5) | (self._between(state) > limit), inf, load)

    def _between(self, weights: list[float]) -> Table:
        """By ideal and another, the weight of the one less that of the other."""
        total = np.zeros(len(self.lattice.ideals))
        for index, steps in enumerate(self.lattice.steps[1:], 1):
            before, node = steps[0]
            total[index] = total[before] + weights[node]
        return np.subtract.outer(total, total)

    def _transfers(self) -> Table:
        """By ideal and one within it, the transfers of a device that holds what is between; infinite elsewhere."""
        nets = joined_nets(self.problem, self.nodes)
        nets_of: list[list[int]] = [[] for _ in self.nodes.nodes]
        for index, net in enumerate(nets):
            for node in _pins(net):
                nets_of[node].append(index)
        pins = self._pins_within(nets_of)
        size = [len(_pins(net)) for net in nets]
        time_ms = [net.there_ms + net.back_ms for net in nets]
        table = np.full((len(self.lattice.ideals), len(self.lattice.ideals)), inf)
        table[0, 0] = 0.0
        for index, steps in enumerate(self.lattice.steps[1:], 1):
            for before, node in steps:
                row = table[before].copy()
                for place in nets_of[node]:
                    has = pins[place, before]
                    row += time_ms[place] * (pins[place] == has)
                    if has + 1 == size[place]:
                        row -= time_ms[place] * (pins[place] == 0)
                np.minimum(table[index], row, out=table[index])
            table[index, index] = 0.0
        return table

    def _pins_within(self, nets_of: list[list[int]]) -> NDArray[np.int32]:
        """By net and ideal, how many pins of the net the ideal has."""
        count = 1 + max((place for places in nets_of for place in places), default=-1)
        pins = np.zeros((count, len(self.lattice.ideals)), dtype=np.int32)
        for index, steps in enumerate(self.lattice.steps[1:], 1):
            before, node = steps[0]
            pins[:, index] = pins[:, before]
            pins[nets_of[node], index] += 1
        return pins


def _pins(net: Net) -> tuple[int, ...]:
    return (net.source, *net.readers)
