"""Local search for placements that need not be contiguous: one node moves to another device at a time.

A move is judged by the eighth norm of the loads, which falls with the busiest device's load and sees the others too;
worse ones are taken with a chance that falls to nothing (simulated annealing).

Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from random import Random

from placer.solver import memory_rules
from placer.solver.nets import Net, joined_nets
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MOVES = 60_000
"""How many moves are looked at: some seconds."""

MOVES_A_LOOK = 512
WORK = 0.05
"""Of so many moves, in the measure of ``cpsat.Meter``."""

NORM = 8
WARM = 0.03
"""At first a move that makes the norm worse by this share is taken with a chance of 1/e."""


def applies(problem: Problem) -> bool:
    """Whether moves can be judged by loads alone: transfers added, links alike, and no limit in the way."""
    request = problem.request
    return (
        not problem.contiguous
        and request.objective == "throughput"
        and request.transfers == "added"
        and problem.one_link is not None
        and problem.most_devices == len(problem.devices)
        and problem.least_devices == 1
        and problem.most_layers is None
        and not memory_rules.can_bind(problem)
    )


def improved(problem: Problem, nodes: Reduction, start: Sequence[int], over: Callable[[], bool]) -> list[int]:
    """The best assignment met on the way from one.

    Args:
        problem: what is asked, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.
        start: by layer, its device.
        over: asked now and then; ends the search.

    Returns:
        By layer, its device.
    """
    state = _State(problem, nodes, [start[layers[0]] for layers in nodes.nodes])
    random = Random(problem.request.seed)
    best, best_load = list(state.device), max(state.load)
    for move in range(MOVES):
        if move % MOVES_A_LOOK == 0 and over():
            break
        node, device = state.pick(random)
        if device is None:
            continue
        before, old = state.norm(), state.device[node]
        state.move(node, device)
        worse = state.norm() / before - 1 if before else 0.0
        heat = WARM * (1 - move / MOVES) ** 2 + 1e-9
        if worse > 0 and random.random() >= exp(-worse / heat):
            state.move(node, old)
        elif max(state.load) < best_load * (1 - 1e-12):
            best, best_load = list(state.device), max(state.load)
    return nodes.spread(best)


class _State:
    """An assignment of nodes and the loads that it makes, kept up to date move by move."""

    def __init__(self, problem: Problem, nodes: Reduction, device: list[int]) -> None:
        self.device = device
        self._problem = problem
        self._devices = range(len(problem.devices))
        self._able = [sorted(devices) for devices in nodes.allowed]
        self._work = [
            [sum(problem.compute_ms(layer, d) for layer in layers) for d in self._devices] for layers in nodes.nodes
        ]
        self._nets = joined_nets(problem, nodes)
        self._of: list[list[Net]] = [[] for _ in nodes.nodes]
        for net in self._nets:
            for node in (net.source, *net.readers):
                self._of[node].append(net)
        self.load = [0.0] * len(self._devices)
        for node, place in enumerate(device):
            self.load[place] += self._work[node][place]
        for net in self._nets:
            self._add(net, 1.0)

    def norm(self) -> float:
        """The eighth norm of the loads."""
        top = max(self.load)
        return float(top * sum((load / top) ** NORM for load in self.load) ** (1 / NORM)) if top > 0 else 0.0

    def pick(self, random: Random) -> tuple[int, int | None]:
        """A node, and a device for it: mostly that of a node that it exchanges values with."""
        node = random.randrange(len(self.device))
        able = self._able[node]
        if self._of[node] and random.random() < 0.8:
            net = random.choice(self._of[node])
            device = self.device[random.choice((net.source, *net.readers))]
        else:
            device = random.choice(able)
        return node, device if device != self.device[node] and device in able else None

    def move(self, node: int, device: int) -> None:
        """Bring a node to a device."""
        for net in self._of[node]:
            self._add(net, -1.0)
        self.load[self.device[node]] -= self._work[node][self.device[node]]
        self.device[node] = device
        self.load[device] += self._work[node][device]
        for net in self._of[node]:
            self._add(net, 1.0)

    def _add(self, net: Net, sign: float) -> None:
        """Count a net's transfers, or take them off."""
        source = self.device[net.source]
        takers = {self.device[reader] for reader in net.readers}
        takers.discard(source)
        if not takers:
            return
        untaxed = self._problem.untaxed
        each = sign * (net.there_ms + net.back_ms)
        for device in takers:
            if device not in untaxed:
                self.load[device] += each
        if source not in untaxed:
            sends = 1 if self._problem.multicast else len(takers)
            self.load[source] += sign * (net.there_ms * sends + net.back_ms * len(takers))
