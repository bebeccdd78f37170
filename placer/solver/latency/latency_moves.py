"""Local search for a small latency: layers move, or swap devices, and both passes are recomputed.

Half of the moves begin at a layer on the critical path. Contiguous placements move layers with all
that reads from them on their device, or all that they read from, so that devices do not wait for
each other. Moves that make the latency longer are accepted with a probability that falls to zero
(simulated annealing), round after round.

Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", 1983; van Laarhoven,
Aarts and Lenstra, "Job shop scheduling by simulated annealing", 1992, for moves on the critical
path.

The graph of devices that wait for one another, ``Quotient``, must stay acyclic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf, log
from random import Random
from typing import NamedTuple

from placer.solver import costs
from placer.solver.components import sources_and_readers
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.latency.makespan import LinkTimes, Pass
from placer.solver.problem import SAME, Problem
from placer.solver.reduce import Reduction
from placer.solver.values import arcs_of


class Quotient:
    """The graph over devices that an assignment of nodes induces.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        device: by node; callers announce each move before they make it.

    Attributes:
        before: by node, the nodes that it reads from.
        after: by node, the nodes that read from it.
    """

    def __init__(self, problem: Problem, nodes: Reduction, device: list[int]) -> None:
        self._device = device
        arcs = sorted(nodes.arcs(arcs_of(problem.values)))
        self.before, self.after = sources_and_readers(len(nodes.nodes), arcs)
        self._arcs = [[0] * len(problem.devices) for _ in problem.devices]
        for source, reader in arcs:
            self._arcs[device[source]][device[reader]] += 1

    def move(self, node: int, device: int) -> None:
        """Bring a node to a device."""
        old, at, arcs = self._device[node], self._device, self._arcs
        for reader in self.after[node]:
            arcs[old][at[reader]] -= 1
            arcs[device][at[reader]] += 1
        for source in self.before[node]:
            arcs[at[source]][old] -= 1
            arcs[at[source]][device] += 1
        at[node] = device

    def is_acyclic(self) -> bool:
        """Return whether no device waits for itself by way of others."""
        waiting = [
            sum(1 << other for other, arcs in enumerate(row) if arcs and other != d)
            for d, row in enumerate(self._arcs)
        ]
        left, last = (1 << len(waiting)) - 1, -1
        while left != last:
            last = left
            for device, readers in enumerate(waiting):
                if not readers & left:
                    left &= ~(1 << device)
        return not left

    def closed(self, node: int, arcs: Sequence[Sequence[int]]) -> list[int]:
        """Return a node with all that follows it by such arcs and is where it is."""
        found, seen = [node], {node}
        for one in found:
            for other in arcs[one]:
                if other not in seen and self._device[other] == self._device[node]:
                    seen.add(other)
                    found.append(other)
        return found


class _Round(NamedTuple):
    """Effort of one annealing round; its unit is a layer whose finish time is recomputed.

    Attributes:
        moves_per_option: moves per node and device, if each recomputed all layers.
        most_layers: the most layers of a round, about a second.
        layers_per_move: the fixed cost of a move.
        layers_per_look: layers between two looks at the clock.
    """

    moves_per_option: int = 30
    most_layers: int = 1_000_000
    layers_per_move: int = 20
    layers_per_look: int = 20_000


ROUND = _Round()


TEMPERATURES = (0.003, 0.01, 0.001, 0.03)
"""Initial temperature of each round in turn: relative increases accepted with probability 1/e."""

GROUP_SIZES = (1, 1, 1, 1, 2, 3, 4, 8)
"""Numbers of neighbouring nodes that move at once, drawn at random: mostly one."""

MOVES_PER_TRACE = 32
"""Accepted moves after which the critical path is traced again, as tracing costs a pass."""


def improved(
    problem: Problem,
    nodes: Reduction,
    start: Sequence[int],
    over: Callable[[float], bool],
    enough: float = 0.0,
    patience: float = inf,
) -> Iterator[list[int]]:
    """Yield better and better assignments found from a start; by layer, its device.

    Args:
        problem: the placement problem, by objective ``latency``.
        nodes: its layers, joined where they must be together.
        start: by layer, its device; it meets all requirements.
        over: counts work from time to time; ends the search.
        enough: a latency that ends the search, as no smaller one exists.
        patience: consecutive rounds without improvement that end the search.
    """
    random, capacity = Random(problem.request.seed), DeviceCapacity(problem, nodes)
    best = [start[layers[0]] for layers in nodes.nodes]
    if len(problem.devices) == 1:
        return
    idle, turn, ended = 0, 0, False
    while idle < patience and not ended:
        state = _State(problem, nodes, capacity, list(best))
        if state.length_ms <= enough:
            return
        found, ended = _anneal(state, random, TEMPERATURES[turn % len(TEMPERATURES)], over)
        idle, turn = idle + 1, turn + 1
        if found is not None:
            best, idle = found, 0
            yield nodes.spread(best)


def _anneal(
    state: _State, random: Random, warm: float, over: Callable[[float], bool]
) -> tuple[list[int] | None, bool]:
    """Run one round; return the best devices by node, if better, and whether time is over."""
    best, wanted_ms = None, state.length_ms * (1 - SAME)
    most = min(
        ROUND.most_layers,
        ROUND.moves_per_option * state.options * (state.layers + ROUND.layers_per_move),
    )
    next_look = 0
    while state.looked_at < most:
        if state.looked_at >= next_look:
            if over(ROUND.layers_per_look / PER_WORK.layers):
                return best, True
            next_look += ROUND.layers_per_look
        # The temperature falls quadratically. Drawing the acceptance limit first lets `move` stop
        # as soon as a finish exceeds it.
        longer = warm * (1 - state.looked_at / most) ** 2 + 1e-9
        most_ms = state.length_ms * (1 - longer * log(1 - random.random()))
        if state.move(state.pick(random), most_ms) and state.length_ms < wanted_ms and state.fits():
            best, wanted_ms = list(state.device), state.length_ms * (1 - SAME)
    return best, False


class _State:
    """An assignment of nodes and its latency, kept up to date move by move.

    Attributes:
        device: by node.
        options: how many pairs of a node and a device there are.
        layers: how many layers.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, capacity: DeviceCapacity, device: list[int]
    ) -> None:
        self.device = device
        self._problem, self._nodes, self._capacity = problem, nodes, capacity
        self._quotient = Quotient(problem, nodes, device)
        self._able = [sorted(devices) for devices in nodes.allowed]
        self.options, self.layers = sum(map(len, self._able)), len(problem.layers)
        self._near = [
            [*before, *after]
            for before, after in zip(self._quotient.before, self._quotient.after, strict=True)
        ]
        self._bytes, self._layers = [0] * len(problem.devices), [0] * len(problem.devices)
        for node, place in enumerate(device):
            self._bytes[place] += capacity.size_bytes[node]
            self._layers[place] += len(nodes.nodes[node])
        # without recomputing, and with all micro-batches in flight
        self._holds = capacity.holds(device)
        self._least_capacity = [0] * len(problem.devices) if self._holds else list(self._bytes)
        link_times, layers = LinkTimes.from_problem(problem), nodes.spread(device)
        self._there = Pass.forwards(problem, link_times, layers)
        self._back = Pass.backwards(problem, link_times, layers) if problem.training else None
        self._moves = self._taken = 0
        self._trace()

    @property
    def length_ms(self) -> float:
        """The latency."""
        return self._there.length_ms + (self._back.length_ms if self._back else 0.0)

    @property
    def looked_at(self) -> int:
        """The work so far, in layers that were recomputed."""
        return (
            self._there.looked_at
            + (self._back.looked_at if self._back else 0)
            + ROUND.layers_per_move * self._moves
        )

    def pick(self, random: Random) -> dict[int, int]:
        """Return, by node that moves, its device; none where there is no such move."""
        layer = (
            random.choice(self._critical)
            if random.random() < 0.5
            else random.randrange(self.layers)
        )
        node = self._nodes.node_of[layer]
        old, near = self.device[node], self._near[node]
        device = (
            self.device[random.choice(near)]
            if near and random.random() < 0.5
            else random.choice(self._able[node])
        )
        moved = [node]
        if device == old:
            return {}
        kind = random.random()
        # A quarter of the moves are swaps: they keep the memory of both devices about the same.
        if kind < 0.25 and self._there.held[device]:
            other = self._nodes.node_of[random.choice(self._there.held[device])]
            return (
                {node: device, other: old}
                if self._may(node, device) and self._may(other, old)
                else {}
            )
        if kind < 0.6 and self._problem.contiguous:
            way = random.choice((self._quotient.before, self._quotient.after))
            moved = self._quotient.closed(node, way)
        else:
            moved = self._together(node, random.choice(GROUP_SIZES))
        return dict.fromkeys(moved, device) if all(self._may(one, device) for one in moved) else {}

    def move(self, devices: Mapping[int, int], most_ms: float) -> bool:
        """Bring nodes to devices if that meets the requirements and takes no longer.

        Whether it does.
        """
        self._moves += 1
        before = {node: self.device[node] for node in devices}
        self._put(devices)
        if devices and self._is_allowed(devices.values()) and self._is_short(devices, most_ms):
            self._taken += 1
            if self._taken % MOVES_PER_TRACE == 0:
                self._trace()
            return True
        self._put(before)
        return False

    def fits(self) -> bool:
        """Return whether all devices can hold what they do, and none recomputes that need not."""
        if self._holds:
            return self._capacity.holds(self.device)
        self._moves += self.layers  # it takes as long
        result = costs.judged(self._problem, self._nodes.spread(self.device))
        return result is not None and all(
            self._problem.recompute[device] == "always" for device in result.recompute
        )

    def _trace(self) -> None:
        """Look up what the last finish waits for, forwards and backwards."""
        last = self.layers - 1
        back = self._back.critical() if self._back else []
        self._critical = [*self._there.critical(), *(last - place for place in back)]

    def _may(self, node: int, device: int) -> bool:
        return device in self._nodes.allowed[node]

    def _together(self, node: int, most: int) -> list[int]:
        """Return a node with neighbours on its device, up to a random number."""
        found = [node]
        for one in found:
            for other in self._near[one] if len(found) < most else ():
                if (
                    self.device[other] == self.device[node]
                    and other not in found
                    and len(found) < most
                ):
                    found.append(other)
        return found

    def _put(self, devices: Mapping[int, int]) -> None:
        for node, device in devices.items():
            old, size, count = (
                self.device[node],
                self._capacity.size_bytes[node],
                len(self._nodes.nodes[node]),
            )
            self._bytes[old] -= size
            self._layers[old] -= count
            self._bytes[device] += size
            self._layers[device] += count
            self._quotient.move(node, device)

    def _is_allowed(self, targets: Iterable[int]) -> bool:
        """Return whether memory and numbers allow the moves, and no device waits for itself."""
        problem, capacity = self._problem, self._capacity
        used = len(self._layers) - self._layers.count(0)
        return (
            problem.least_devices <= used <= problem.most_devices
            and (problem.most_layers is None or max(self._layers) <= problem.most_layers)
            and all(
                not capacity.limited
                or self._bytes[d] <= max(capacity.capacity_bytes(d), self._least_capacity[d])
                for d in targets
            )
            and (not problem.contiguous or self._quotient.is_acyclic())
        )

    def _is_short(self, devices: Mapping[int, int], most_ms: float) -> bool:
        """Return whether both passes together take no longer with these nodes there.

        If so they keep that.
        """
        layers = {
            layer: device for node, device in devices.items() for layer in self._nodes.nodes[node]
        }
        # The backward pass takes at least `least_ms`, so the forward pass may take the rest at
        # most.
        there = self._there.moved(layers, most_ms - (self._back.least_ms if self._back else 0.0))
        if there is None:
            return False
        if self._back is not None:
            last = self.layers - 1
            places = {last - layer: device for layer, device in layers.items()}
            back = self._back.moved(places, most_ms - max(there))
            if back is None:
                return False
            self._back.keep(places, back)
        self._there.keep(layers, there)
        return True
