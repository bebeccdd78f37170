"""Local search for placements that need not be contiguous: nodes move to another device, one or a
few together.

A move is judged by a high norm of the loads, which falls with the busiest device's load and sees
the others too; worse ones are taken with a chance that falls to nothing (simulated annealing),
round after round, warmer and cooler in turn.

Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", 1983.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf
from random import Random

from placer.solver.free.device_capacity import Room
from placer.solver.free.loads import Loads
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MOVES = 40_000
"""How many moves a round looks at, at the most: a fraction of a second."""

MOVES_AN_OPTION = 100
"""How many a round looks at for every node and device."""

MOVES_A_LOOK = 512
WORK = 0.05
"""Of so many moves, in the measure of ``cpsat.Meter``."""

PATIENCE = (8, 64)
"""So many rounds in a row that bring nothing better end the search, of few nodes and of many."""

NORM = 16
COOL = 4
"""The first so many rounds of ``WARM`` begin with the best so far, as does the next, hot one; the
others go on."""

WARM = (0.03, 0.01, 0.003, 0.001, 0.3, 0.1, 0.03, 0.01)
"""By round in turn: at first a move that makes the norm worse by this share is taken with a chance
of 1/e."""

TOGETHER = (1, 1, 1, 1, 2, 3, 4, 8)
"""How many nodes move at once: any of these, with those that they exchange values with."""


def applies(problem: Problem) -> bool:
    """Whether moves can be judged by loads, and by what devices may hold: transfers added, all
    linked.
    """
    request = problem.request
    numbers = range(len(problem.devices))
    linked = all(problem.links[a][b] is not None for a in numbers for b in numbers if a != b)
    return (
        not problem.contiguous
        and request.objective == "throughput"
        and request.transfers == "added"
        and linked
        and (problem.one_link is not None or not problem.multicast)
    )


def improved(
    problem: Problem,
    nodes: Reduction,
    start: Sequence[int],
    over: Callable[[], bool],
    enough: float = 0.0,
) -> list[int]:
    """The best assignment met on the way from one.

    Args:
        problem: what is asked, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.
        start: by layer, its device; it meets all requirements.
        over: asked now and then; ends the search.
        enough: a bottleneck that ends it too, as none is smaller.

    Returns:
        By layer, its device.
    """
    random, room = Random(problem.request.seed), Room(problem, nodes)
    best = [start[layers[0]] for layers in nodes.nodes]
    if not room.holds(best):  # without recomputing
        return list(start)
    loads = Loads(problem, nodes)
    state = _State(problem, nodes, loads, room, list(best))
    load, idle, turn, ended = max(state.load), 0, 0, False
    patience = min(PATIENCE[0] + len(best) // 4, PATIENCE[1])
    while idle < patience and load > enough and not ended:
        if turn % len(WARM) <= COOL:
            state = _State(problem, nodes, loads, room, list(best))
        found, found_load, ended = _anneal(state, random, WARM[turn % len(WARM)], over)
        idle, turn = idle + 1, turn + 1
        if found_load < load * (1 - 1e-12):
            best, load, idle = found, found_load, 0
    return nodes.spread(best)


def _anneal(
    state: _State, random: Random, warm: float, over: Callable[[], bool]
) -> tuple[list[int], float, bool]:
    """One round: the best devices met, the busiest load there, and whether time is over."""
    best, best_load = list(state.device), max(state.load) if state.fits() else inf
    moves = min(MOVES, MOVES_AN_OPTION * len(state.device) * len(state.load))
    for move in range(moves):
        if move % MOVES_A_LOOK == 0 and over():
            return best, best_load, True
        node, device = state.pick(random)
        if device is None:
            continue
        before, old = state.norm(), state.device[node]
        together = state.together(node, device, random.choice(TOGETHER))
        if not state.has_room(together, device) or not state.may_hold(together, device):
            continue
        for moved in together:
            state.move(moved, device)
        worse = state.norm() / before - 1 if before else 0.0
        if worse > 0 and random.random() >= exp(-worse / (warm * (1 - move / moves) ** 2 + 1e-9)):
            for moved in together:
                state.move(moved, old)
        elif max(state.load) < best_load * (1 - 1e-12) and state.fits():
            best, best_load = list(state.device), max(state.load)
    return best, best_load, False


class _State:
    """An assignment of nodes and the loads that it makes, kept up to date move by move."""

    def __init__(
        self, problem: Problem, nodes: Reduction, loads: Loads, room: Room, device: list[int]
    ) -> None:
        self.device = device
        self._untaxed = problem.untaxed
        self._able = [sorted(devices) for devices in nodes.allowed]
        self._loads, self._room = loads, room
        self._of = loads.nets_of
        self._ends = [(net.source, *net.readers) for net in loads.nets]
        self.load = loads.by_device(device)
        self._held, self._layers = [0] * len(self.load), [0] * len(self.load)
        self._layers_of = [len(layers) for layers in nodes.nodes]
        for node, place in enumerate(device):
            self._held[place] += room.size_bytes[node]
            self._layers[place] += self._layers_of[node]
        self._numbers = range(problem.least_devices, problem.most_devices + 1)
        self._most_layers = problem.most_layers or sum(self._layers)

    def norm(self) -> float:
        """A high norm of the loads."""
        top = max(self.load)
        return (
            float(top * sum((load / top) ** NORM for load in self.load) ** (1 / NORM))
            if top > 0
            else 0.0
        )

    def pick(self, random: Random) -> tuple[int, int | None]:
        """A node, and a device for it: mostly that of a node that it exchanges values with."""
        node = random.randrange(len(self.device))
        able = self._able[node]
        if self._of[node] and random.random() < 0.8:
            device = self.device[random.choice(self._ends[random.choice(self._of[node])])]
        else:
            device = random.choice(able)
        return node, device if device != self.device[node] and device in able else None

    def together(self, node: int, device: int, most: int) -> list[int]:
        """A node with others that are where it is, may be on a device too, and exchange values with
        it or with them.
        """
        found, old = [node], self.device[node]
        for one in found:
            for net in self._of[one] if len(found) < most else ():
                for other in self._ends[net]:
                    near = self.device[other] == old and other not in found
                    if near and len(found) < most and device in self._able[other]:
                        found.append(other)
        return found

    def may_hold(self, nodes: Sequence[int], device: int) -> bool:
        """Whether a device may hold some nodes of another one more, by the numbers of devices and
        of their layers.
        """
        more = sum(self._layers_of[node] for node in nodes)
        opened, emptied = not self._layers[device], self._layers[self.device[nodes[0]]] == more
        used = len(self._layers) - self._layers.count(0) + opened - emptied
        return used in self._numbers and self._layers[device] + more <= self._most_layers

    def has_room(self, nodes: Sequence[int], device: int) -> bool:
        """Whether a device can hold some nodes more, as far as is known."""
        size_bytes = sum(self._room.size_bytes[node] for node in nodes)
        return not self._room.limited or self._held[device] + size_bytes <= self._room.of(device)

    def fits(self) -> bool:
        """Whether all devices can hold what they do."""
        if not self._room.limited:
            return True
        known = all(held <= self._room.of(device) for device, held in enumerate(self._held))
        return known and self._room.holds(self.device)

    def move(self, node: int, device: int) -> None:
        """Bring a node to a device."""
        for net in self._of[node]:
            self._add(net, -1.0)
        self._held[self.device[node]] -= self._room.size_bytes[node]
        self._held[device] += self._room.size_bytes[node]
        self._layers[self.device[node]] -= self._layers_of[node]
        self._layers[device] += self._layers_of[node]
        self.load[self.device[node]] -= self._loads.work_ms[node][self.device[node]]
        self.device[node] = device
        self.load[device] += self._loads.work_ms[node][device]
        for net in self._of[node]:
            self._add(net, 1.0)

    def _add(self, net: int, sign: float) -> None:
        """Count a net's transfers, or take them off."""
        source, *readers = (self.device[node] for node in self._ends[net])
        takers = {*readers} - {source}
        if not takers:
            return
        each_ms = self._loads.each_ms[net][source]
        for device in takers:
            if device not in self._untaxed:
                self.load[device] += sign * each_ms[device]
        if source not in self._untaxed:
            self.load[source] += sign * self._loads.sent_ms(net, source, takers)
