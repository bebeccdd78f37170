"""Local search for free placements: nodes move to another device, one or a few together.

A move is judged by a high norm of the loads, which falls with the busiest device's load and depends
on the others too. Worse moves are accepted with a probability that falls to zero (simulated
annealing), round after round, warmer and cooler in turn. It serves problems with limited numbers of
devices or of layers per device, where ``pair_search.py`` does not apply.

Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", 1983.

**Large neighbourhoods.** The nodes on a few devices, the busiest among them, may move among these;
all others stay. The integer program makes the busiest of the few less busy, and keeps the others
within the known bottleneck. An assignment is accepted if its loads, the largest first, are smaller
than before. So freeing one of two equally busy devices is a step too. It serves problems whose
loads do not add up, as with overlapped transfers, where ``pair_search.py`` does not apply.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import exp, inf
from random import Random
from typing import NamedTuple

from ortools.sat.python import cp_model

from placer.schema.base import PROVEN_GAP
from placer.solver import costs
from placer.solver.cpsat.model import PlacementModel, worth_building
from placer.solver.cpsat.runner import Limits
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.free.loads import Loads
from placer.solver.problem import SAME, Problem
from placer.solver.reduce import Reduction, reduced


class _Round(NamedTuple):
    """Effort of annealing rounds.

    Attributes:
        most_moves: the most moves, a fraction of a second.
        moves_per_option: moves per node and device.
        moves_per_look: moves between two looks at the clock.
        work: work of so many moves, in the measure of ``cpsat.runner.Meter``.
        norm: exponent of the norm of the loads.
        cool: rounds, of each cycle of temperatures, that begin with the best so far, as does the
            next, hot one; the others go on.
        temperatures: by round in turn, increases of the norm first accepted with probability 1/e.
        patience: rounds without improvement that end the search, of few nodes and of many.
    """

    most_moves: int = 40_000
    moves_per_option: int = 100
    moves_per_look: int = 512
    work: float = 0.05
    norm: int = 16
    cool: int = 4
    temperatures: tuple[float, ...] = (0.03, 0.01, 0.003, 0.001, 0.3, 0.1, 0.03, 0.01)
    patience: tuple[int, int] = (8, 64)


ROUND = _Round()

GROUP_SIZES = (1, 1, 1, 1, 2, 3, 4, 8)
"""Numbers of neighbouring nodes that move at once, drawn at random: mostly one."""


def improved(
    problem: Problem,
    nodes: Reduction,
    start: Sequence[int],
    over: Callable[[], bool],
    enough: float = 0.0,
) -> list[int]:
    """Return the best assignment found from a start.

    Args:
        problem: the placement problem, of the kind that ``loads_add_up`` names.
        nodes: its layers, joined where they must be together.
        start: by layer, its device; it meets all requirements.
        over: asked from time to time; ends the search.
        enough: a bottleneck that ends the search, as no smaller one exists.

    Returns:
        By layer, its device.
    """
    random, capacity = Random(problem.request.seed), DeviceCapacity(problem, nodes)
    best = [start[layers[0]] for layers in nodes.nodes]
    if not capacity.holds(best):  # without recomputing
        return list(start)
    loads = Loads(problem, nodes)
    state = _State(problem, nodes, loads, capacity, list(best))
    load, idle, turn, ended = max(state.load), 0, 0, False
    patience = min(ROUND.patience[0] + len(best) // 4, ROUND.patience[1])
    while idle < patience and load > enough and not ended:
        if turn % len(ROUND.temperatures) <= ROUND.cool:
            state = _State(problem, nodes, loads, capacity, list(best))
        found, found_load, ended = _anneal(
            state, random, ROUND.temperatures[turn % len(ROUND.temperatures)], over
        )
        idle, turn = idle + 1, turn + 1
        if found_load < load * (1 - SAME):
            best, load, idle = found, found_load, 0
    return nodes.spread(best)


def _anneal(
    state: _State, random: Random, warm: float, over: Callable[[], bool]
) -> tuple[list[int], float, bool]:
    """Run one round; return the best devices, their busiest load, and whether time is over."""
    best, best_load = list(state.device), max(state.load) if state.fits() else inf
    moves = min(ROUND.most_moves, ROUND.moves_per_option * len(state.device) * len(state.load))
    for move in range(moves):
        if move % ROUND.moves_per_look == 0 and over():
            return best, best_load, True
        node, device = state.pick(random)
        if device is None:
            continue
        before, old = state.norm(), state.device[node]
        together = state.together(node, device, random.choice(GROUP_SIZES))
        if not state.has_room(together, device) or not state.may_hold(together, device):
            continue
        for moved in together:
            state.move(moved, device)
        # Metropolis' rule: a worse state is kept with probability exp(-worse / temperature), and
        # the temperature falls with the square of the moves that are left.
        worse = state.norm() / before - 1 if before else 0.0
        if worse > 0 and random.random() >= exp(-worse / (warm * (1 - move / moves) ** 2 + 1e-9)):
            for moved in together:
                state.move(moved, old)
        elif max(state.load) < best_load * (1 - SAME) and state.fits():
            best, best_load = list(state.device), max(state.load)
    return best, best_load, False


class _State:
    """An assignment of nodes with its loads, updated move by move."""

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        loads: Loads,
        capacity: DeviceCapacity,
        device: list[int],
    ) -> None:
        self.device = device
        self._untaxed = problem.untaxed
        self._able = [sorted(devices) for devices in nodes.allowed]
        self._loads, self._capacity = loads, capacity
        self._of = loads.nets_of
        self._ends = [(net.source, *net.readers) for net in loads.nets]
        self.load = loads.by_device(device)
        self._held, self._layers = [0] * len(self.load), [0] * len(self.load)
        self._layers_of = [len(layers) for layers in nodes.nodes]
        for node, place in enumerate(device):
            self._held[place] += capacity.size_bytes[node]
            self._layers[place] += self._layers_of[node]
        self._numbers = range(problem.least_devices, problem.most_devices + 1)
        self._most_layers = problem.most_layers or sum(self._layers)

    def norm(self) -> float:
        """Return a high norm of the loads."""
        top = max(self.load)
        return (
            float(top * sum((load / top) ** ROUND.norm for load in self.load) ** (1 / ROUND.norm))
            if top > 0
            else 0.0
        )

    def pick(self, random: Random) -> tuple[int, int | None]:
        """Return a random node and a device for it, mostly the device of a neighbour."""
        node = random.randrange(len(self.device))
        able = self._able[node]
        if self._of[node] and random.random() < 0.8:
            device = self.device[random.choice(self._ends[random.choice(self._of[node])])]
        else:
            device = random.choice(able)
        return node, device if device != self.device[node] and device in able else None

    def together(self, node: int, device: int, most: int) -> list[int]:
        """Return a node with neighbours on its device that may be on the other device too."""
        found, old = [node], self.device[node]
        for one in found:
            for net in self._of[one] if len(found) < most else ():
                for other in self._ends[net]:
                    near = self.device[other] == old and other not in found
                    if near and len(found) < most and device in self._able[other]:
                        found.append(other)
        return found

    def may_hold(self, nodes: Sequence[int], device: int) -> bool:
        """Return whether the numbers of devices and layers allow a device some more nodes."""
        more = sum(self._layers_of[node] for node in nodes)
        opened, emptied = not self._layers[device], self._layers[self.device[nodes[0]]] == more
        used = len(self._layers) - self._layers.count(0) + opened - emptied
        return used in self._numbers and self._layers[device] + more <= self._most_layers

    def has_room(self, nodes: Sequence[int], device: int) -> bool:
        """Return whether a device has memory for some more nodes, as far as is known."""
        size_bytes = sum(self._capacity.size_bytes[node] for node in nodes)
        return not self._capacity.limited or self._held[
            device
        ] + size_bytes <= self._capacity.capacity_bytes(device)

    def fits(self) -> bool:
        """Return whether all devices have memory for their nodes."""
        if not self._capacity.limited:
            return True
        known = all(
            held <= self._capacity.capacity_bytes(device) for device, held in enumerate(self._held)
        )
        return known and self._capacity.holds(self.device)

    def move(self, node: int, device: int) -> None:
        """Move a node to a device."""
        for net in self._of[node]:
            self._add(net, -1.0)
        self._held[self.device[node]] -= self._capacity.size_bytes[node]
        self._held[device] += self._capacity.size_bytes[node]
        self._layers[self.device[node]] -= self._layers_of[node]
        self._layers[device] += self._layers_of[node]
        self.load[self.device[node]] -= self._loads.work_ms[node][self.device[node]]
        self.device[node] = device
        self.load[device] += self._loads.work_ms[node][device]
        for net in self._of[node]:
            self._add(net, 1.0)

    def _add(self, net: int, sign: float) -> None:
        """Add a net's transfers, or subtract them."""
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


SIZES = (2, 3)
"""Numbers of devices that redivide their nodes: pairs first, as their programs are small."""

WORK = 0.3
"""Work of one program, in the measure of ``cpsat.runner.Meter``: a third of a second."""


def redivided(
    problem: Problem,
    start: Sequence[int],
    limits: Callable[[float], Limits],
    over: Callable[[], bool],
) -> list[int]:
    """Return the best assignment found from a start.

    Args:
        problem: the placement problem, of the kind that ``can_redivide`` names.
        start: by layer, its device; it meets all requirements.
        limits: makes the limits of a search of some work.
        over: ends the search.

    Returns:
        By layer, its device.
    """
    random = Random(problem.request.seed)
    best, loads = list(start), _loads(problem, start)
    untried = _choices(loads, random)
    while not over():
        few = next(untried, None)
        if few is None:
            break
        found = _redivided(problem, best, few, loads, limits(WORK))
        if found is not None and sorted(_loads(problem, found), reverse=True) < sorted(
            loads, reverse=True
        ):
            best, loads = found, _loads(problem, found)
            untried = _choices(loads, random)
    return best


def _choices(loads: Sequence[float], random: Random) -> Iterator[frozenset[int]]:
    """Yield sets of devices: the busiest with one other, then with two, in random order."""
    busiest = max(range(len(loads)), key=lambda device: loads[device])
    others = [device for device in range(len(loads)) if device != busiest]
    for size in SIZES:
        every = list(combinations(others, size - 1))
        random.shuffle(every)
        for few in every:
            yield frozenset({busiest, *few})


def _redivided(
    problem: Problem,
    best: Sequence[int],
    few: frozenset[int],
    loads: Sequence[float],
    limits: Limits,
) -> list[int] | None:
    """Return an assignment in which the busiest of a few devices is less busy, or None."""
    allowed = tuple(
        devices & few if here in few else frozenset({here})
        for here, devices in zip(best, problem.allowed, strict=True)
    )
    part = replace(problem, allowed=allowed)
    nodes = reduced(part, max(loads))
    if not worth_building(part, nodes):
        return None
    model = _PartModel(
        part, nodes, max(loads), few, max(loads[device] for device in few) * (1 - PROVEN_GAP)
    )
    return model.solve(limits).devices


class _PartModel(PlacementModel):
    """Placements in which a few devices stay within a limit, and the others within the known one.

    Args:
        problem: the placement problem, with most nodes fixed.
        nodes: its layers, joined where they must be together.
        upper: the known bottleneck.
        few: the devices that are to be less busy.
        most_ms: their limit.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, upper: float, few: frozenset[int], most_ms: float
    ) -> None:
        self._few, self._most_ms = few, most_ms
        super().__init__(problem, nodes, upper=upper)

    def most_busy(self, device: int) -> cp_model.IntVar | int:
        """Return the most that a device's load may be: the goal for the few, else the known."""
        return self.makespan if device in self._few else self.upper

    def _set_goal(self) -> None:
        self.cp.add(self.makespan <= self.steps(self._most_ms))
        super()._set_goal()


def _loads(problem: Problem, devices: Sequence[int]) -> tuple[float, ...]:
    # it has no other links than the one before
    return costs.costs_of(problem, devices).load_ms
