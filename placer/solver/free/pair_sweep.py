"""All ways in which two devices may redivide their nodes, enumerated by a sweep.

The nodes are taken one by one, each to one device or the other. Earlier decisions matter later only
through the nets that are open, as in ``subset_sweep.py``, and through the loads so far::

    nodes taken ──▶ │ border │ ──▶ nodes to come     label: state of the border, both loads

Of two labels in the same state, one that is no better in either load is dropped. So is one that
cannot end within the devices' limits: a plain dynamic program computes beforehand the least that
the rest adds, weighted by some rates. Where labels are too many, one is kept of those that load the
first device about the same. All other nodes stay where they are: the result is a placement, not a
proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from itertools import permutations
from math import inf

import numpy as np
from numpy.typing import NDArray

from placer.schema.base import LONGEST_MS
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.free.loads import Loads
from placer.solver.free.subset_sweep import order_of
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, cut_costs


class Pin(IntFlag):
    """What is known of a net: which device has a pin of it, and which has its source.

    The next bit after ``Pin.MADE_BY_ONE`` says that the other device has the source.
    """

    ONE = 1
    OTHER = 2
    MADE_BY_ONE = 4


MOST_STATES = 1_000
"""The most states of a border: with more, a sweep takes too long."""

RATES = np.array([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
"""Weights of the first device's load in the lower bounds of the rest; 1 less them of the other."""


BANNED_MS = 1e6 * LONGEST_MS
"""Time of a node on a forbidden device: more than any limit, but finite for sums."""

Numbers = NDArray[np.int64]
Row = NDArray[np.float64]
Border = tuple[tuple[int, int], ...]


class TooWide(Exception):
    """A border has too many states."""


@dataclass(frozen=True)
class Divisions:
    """Non-dominated divisions of some nodes between two devices.

    Attributes:
        one_ms: by division, the load of the first device.
        other_ms: by division, the load of the second device.
        labels: the number of labels of the sweep.
    """

    one_ms: Row
    other_ms: Row
    labels: int
    _nodes: Sequence[int]
    _origins: Sequence[Numbers]

    @property
    def most_ms(self) -> Row:
        """The larger of the two loads, by way."""
        return np.maximum(self.one_ms, self.other_ms)

    def theirs(self, way: int) -> list[int]:
        """Return the nodes that go to the other device."""
        found, label = [], way
        for node, origins in zip(reversed(self._nodes), reversed(self._origins), strict=True):
            label, to_other = divmod(int(origins[label]), 2)
            if to_other:
                found.append(node)
        return found


@dataclass(frozen=True)
class _Step:
    """One node, by the state of the border before it.

    Attributes:
        after: by state and device, the state behind it.
        added_ms: by device whose load it is, by state and device of the node, what it adds.
        sizes: what the node takes of each limited resource.
    """

    after: Numbers
    added_ms: Row
    sizes: Row


class Pairs:
    """Divisions of any two devices, of placements for which ``loads_add_up``.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.

    Attributes:
        problem: the placement problem.
        loads: the costs of nodes and nets.
        capacity: the capacity of devices.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self.problem, self._allowed, self.loads = problem, nodes.allowed, Loads(problem, nodes)
        self.capacity = DeviceCapacity(problem, nodes)
        self._layers = [len(layers) for layers in nodes.nodes]
        self._order = order_of(len(nodes.nodes), cut_costs(self.loads.nets))

    def divisions(
        self,
        devices: Sequence[int],
        one: int,
        other: int,
        most_ms: tuple[float, float],
        most_labels: int,
    ) -> Divisions | None:
        """Return the ways to divide what two devices hold; None if none is found.

        Args:
            devices: by node, where all are.
            one: a device.
            other: another one.
            most_ms: the load that each may have.
            most_labels: where there are more at a step, some are dropped.

        Raises:
            TooWide: a border has too many states.
        """
        nodes = [node for node in self._order if devices[node] in (one, other)]
        used = 2 + len(set(devices) - {one, other})
        if not nodes or used > self.problem.most_devices:
            return None
        most_layers = self.problem.most_layers or inf
        # neither device may be empty: the other one holds a layer
        if used <= self.problem.least_devices:
            most_layers = min(most_layers, sum(self._layers[node] for node in nodes) - 1)
        limits = np.array([self._capacity_bytes(one, other), [most_layers, most_layers]])
        steps = self._steps(devices, nodes, one, other)
        return _Search(nodes, steps, np.array(most_ms), limits, most_labels).divisions()

    def _sizes(self, node: int) -> Row:
        """Return what a node takes: bytes that add up, layers."""
        return np.array([self.capacity.size_bytes[node], self._layers[node]], np.float64)

    def _capacity_bytes(self, *devices: int) -> list[float]:
        """Return the sum of sizes that each of some devices can hold."""
        is_limited = self.capacity.limited
        return [self.capacity.capacity_bytes(one) if is_limited else inf for one in devices]

    def _steps(
        self, devices: Sequence[int], nodes: Sequence[int], one: int, other: int
    ) -> list[_Step]:
        """Return the steps of the sweep."""
        paid = _Paid(self, devices, one, other)
        left = Counter(net for node in nodes for net in self.loads.nets_of[node])
        borders: list[Border] = [()]
        found = []
        for node in nodes:
            left.subtract(self.loads.nets_of[node])
            known: dict[Border, int] = {}
            after, added = np.zeros((len(borders), 2), np.int64), np.zeros((2, len(borders), 2))
            for column, device in enumerate((one, other)):
                work_ms = (
                    self.loads.work_ms[node][device] if device in self._allowed[node] else BANNED_MS
                )
                bits = [(net, paid.bits(node, net, column)) for net in self.loads.nets_of[node]]
                for state, border in enumerate(borders):
                    # A net's cost is charged once it is certain: by the difference of what is
                    # known before and after this node.
                    #     pins seen   one        one, other
                    #     cost        0     ──▶  transfer between the two
                    sides, cost = dict(border), [0.0, 0.0]
                    for net, bit in bits:
                        before = sides.get(net, 0)
                        if before | bit != before:
                            here, there = paid.by(net, before), paid.by(net, before | bit)
                            cost[0] += there[0] - here[0]
                            cost[1] += there[1] - here[1]
                        sides[net] = before | bit
                        # No later node has a pin of the net, so its state no longer matters.
                        # Borders stay small.
                        if not left[net]:
                            del sides[net]
                    cost[column] += work_ms
                    after[state, column] = known.setdefault(
                        tuple(sorted(sides.items())), len(known)
                    )
                    added[:, state, column] = cost
            borders = list(known)
            if len(borders) > MOST_STATES:
                raise TooWide
            found.append(_Step(after, added, self._sizes(node)))
        return found


class _Paid:
    """What nets cost two devices, while the others hold what they hold.

    Args:
        pairs: all nodes and nets.
        devices: by node, where all are.
        one: a device.
        other: another one.
    """

    def __init__(self, pairs: Pairs, devices: Sequence[int], one: int, other: int) -> None:
        self._loads, self._devices, self._two = pairs.loads, devices, (one, other)
        self._by_value = not pairs.problem.multicast
        self._taxed = tuple(device not in pairs.problem.untaxed for device in self._two)
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def bits(self, node: int, net: int, column: int) -> int:
        """Return what is known of a net if a node is at the first device, or at the other."""
        one = self._loads.nets[net]
        source = one.source == node and (one.back_ms or self._by_value)
        return (Pin.ONE | (Pin.MADE_BY_ONE if source else 0)) << column

    def by(self, net: int, bits: int) -> tuple[float, float]:
        """Return the least cost of a net to each device, from what is known of it."""
        key = net, bits
        if key not in self._known:
            paid = self._paid(net, bits)
            self._known[key] = (paid[0] * self._taxed[0], paid[1] * self._taxed[1])
        return self._known[key]

    def _paid(self, net: int, bits: int) -> tuple[float, float]:
        has_one, has_other = bool(bits & Pin.ONE), bool(bits & Pin.OTHER)
        one, other = self._two
        source = self._devices[self._loads.nets[net].source]
        away = {self._devices[reader] for reader in self._loads.nets[net].readers}.difference(
            self._two
        )
        each_ms = self._loads.each_ms[net]
        if source in self._two and bits & Pin.MADE_BY_ONE:
            return self._loads.sent_ms(net, one, away | {other} if has_other else away), each_ms[
                one
            ][other] * has_other
        if source in self._two and bits & Pin.MADE_BY_ONE << 1:
            return each_ms[other][one] * has_one, self._loads.sent_ms(
                net, other, away | {one} if has_one else away
            )
        if source not in self._two:
            return each_ms[source][one] * has_one, each_ms[source][other] * has_other
        # Which of the two has the source is open, or makes no difference where links are alike.
        # Only the least transfer is certain.
        cut = (has_one and has_other) or bool(away)
        least_ms = min(each_ms[a][b] for a, b in permutations((one, other, *away), 2))
        return least_ms * (cut and has_one), least_ms * (cut and has_other)


@dataclass
class _Search:
    """The labels of one sweep.

    Attributes:
        nodes: in the order of the sweep.
        steps: of each.
        most_ms: the load that each device may have.
        limits: by resource and device, what it may hold; infinite where that does not matter.
        most_labels: at a step.
    """

    nodes: Sequence[int]
    steps: Sequence[_Step]
    most_ms: Row
    limits: Row
    most_labels: int

    def divisions(self) -> Divisions | None:
        """Return the labels that are left at the end, or None without any."""
        rests = self._rests()
        rates, most = (
            RATES[:, None],
            (RATES * self.most_ms[0] + (1 - RATES) * self.most_ms[1])[:, None],
        )
        state = np.zeros(1, np.int64)
        load, held = np.zeros((2, 1)), np.zeros((len(self.limits), 2, 1))
        is_limited = bool(np.isfinite(self.limits).any())
        origins, looked_at = [], 0
        for step, rest in zip(self.steps, rests, strict=True):
            labels = np.arange(len(state))
            origin, column = np.concatenate([labels, labels]), np.repeat([0, 1], len(state))
            load = load[:, origin] + step.added_ms[:, state[origin], column]
            state = step.after[state[origin], column]
            # A Lagrangian bound: no completion is within both limits if, for any rate,
            #    rate * load_one + (1 - rate) * load_other + least rest  >  limit
            able = (rates * load[0] + (1 - rates) * load[1] + rest[:, state] <= most).all(axis=0)
            if is_limited:
                added = step.sizes[:, None, None] * (column == np.array([[0], [1]]))
                held = held[:, :, origin] + added
                able &= (held <= self.limits[:, :, None]).all(axis=(0, 1))
            chosen = self._thinned(state, load, _undominated(state, load, np.flatnonzero(able)))
            if not len(chosen):
                return None
            state, load = state[chosen], load[:, chosen]
            held = held[:, :, chosen] if is_limited else held
            origins.append(2 * origin[chosen] + column[chosen])
            looked_at += len(origin)
        return Divisions(load[0], load[1], looked_at, self.nodes, origins)

    def _rests(self) -> list[Row]:
        """Return, by step, rate and state behind it, the least that the rest adds."""
        rates = RATES[:, None, None]
        found = [np.zeros((len(RATES), 1))]
        for step in reversed(self.steps[1:]):
            divisions = (
                rates * step.added_ms[0] + (1 - rates) * step.added_ms[1] + found[-1][:, step.after]
            )
            found.append(divisions.min(axis=2))
        return found[::-1]

    def _thinned(self, state: Numbers, load: Row, some: Numbers) -> Numbers:
        """Return as many labels as allowed, spread over the load of the first device.

        Of labels that load the first device about the same, the one with the largest load is kept.
        It loads the other device least, as no label is dominated. One label of each state is kept
        in any case.
        """
        width = self.most_ms[0] / self.most_labels
        while len(some) > self.most_labels:
            run = state[some] * (int(self.most_ms[0] / width) + 2) + (load[0, some] / width).astype(
                np.int64
            )
            last = np.append(run[1:] != run[:-1], True)
            if last.sum() <= self.most_labels or width > self.most_ms[0]:
                return np.asarray(some[last])
            width *= 1.5
        return some


def _undominated(state: Numbers, load: Row, able: Numbers) -> Numbers:
    """Return the able labels that none of the same state dominates, by state and first load."""
    if not len(able):
        return able
    # Sorted by state, then by the first load. A label is dominated if an earlier one of its state
    # has no larger second load, so one running maximum finds all.
    able = able[np.lexsort((load[1, able], load[0, able], state[able]))]
    other = load[1, able]
    # all of a state above all of the one before
    ranked = state[able] * (float(other.max()) + 1.0) - other
    kept = np.ones(len(able), bool)
    kept[1:] = ranked[1:] > np.maximum.accumulate(ranked)[:-1]
    return np.asarray(able[kept])
