"""Unordered nodes: a bound for chains of ideals without them, and their places afterwards.

An ideal may hold any of the nodes that no arc orders, so graphs with many of them have too many
ideals. Chains of ideals of the other nodes bound the bottleneck from below. They still do if each
stage adds the least cost of each unordered node v, wherever v is::

    v at the stage      the work of v, and the transfers of its nets without another pin here
    v at another stage  the transfers of its nets with all other pins here

The stage takes the cheaper of the two for each v, but its memory has capacity for few of them. A
Lagrange multiplier r, in ms per byte, prices the memory. So unordered nodes add at least::

    sum over v of min(cost elsewhere, cost here + r * state(v)) - r * (capacity left by other nodes)

The load without unordered nodes already counts each net that other pins cut, and each net of
several unordered nodes. An integer program then places the unordered nodes of the best chain, while
the other nodes stay.

Source: Fisher, "The Lagrangian relaxation method for solving integer programming problems", 1981.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver import costs
from placer.solver.contiguous.ideal_frontiers import Counts, Frontier, Table, Vector, product
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, joined_nets
from placer.solver.values import arcs_of


def unordered_nodes(problem: Problem, nodes: Reduction) -> list[int]:
    """Return the nodes without arcs to or from other nodes."""
    ordered = {node for arc in nodes.arcs(arcs_of(problem.values)) for node in arc}
    return [node for node in range(len(nodes.nodes)) if node not in ordered]


class _Member(NamedTuple):
    """An unordered node.

    Attributes:
        nets: the columns of its nets, except nets that it shares with other unordered nodes.
        cost_ms: by net, the cost for each stage that the net touches if it is cut.
        pins: by net, the number of other pins.
        work_ms: by class of devices, its time.
        state_bytes: its state in memory.
    """

    nets: NDArray[np.int64]
    cost_ms: Vector
    pins: Vector
    work_ms: Vector
    state_bytes: float


class UnorderedNodes:
    """The nets, times and state of unordered nodes.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        which: the unordered nodes.
        works: by class of devices and node, its time.
        state_bytes: by node, its state; zeros if memory is not limited.

    Attributes:
        members: the unordered nodes with nets of their own.
        rates: the Lagrange multipliers, in ms per byte. Zero is the bound without memory.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        which: Sequence[int],
        works: Table,
        state_bytes: Vector,
    ) -> None:
        nets = [
            ({net.source, *net.readers}, net.there_ms + net.back_ms)
            for net in joined_nets(problem, nodes)
        ]
        own = [(pins, cost) for pins, cost in nets if len(pins.intersection(which)) == 1]
        columns_of: dict[int, list[int]] = {node: [] for node in which}
        self._pins: Counts = np.zeros((len(nodes.nodes), len(own)), np.float32)
        for column, (pins, _) in enumerate(own):
            (member,) = pins.intersection(which)
            columns_of[member].append(column)
            self._pins[list(pins - {member}), column] = 1
        others = self._pins.sum(axis=0).astype(np.float64)
        cost_ms = np.array([cost for _, cost in own])
        self.members = [
            _Member(
                np.array(columns, np.int64),
                cost_ms[columns],
                others[columns],
                works[:, node],
                float(state_bytes[node]),
            )
            for node, columns in columns_of.items()
            if columns
        ]
        self.rates = self._rates()

    def _rates(self) -> Vector:
        """Return zero and the most frequent gain per byte of a node that saves all its nets."""
        gains: Counter[float] = Counter()
        for member in self.members:
            gain_ms = float(member.cost_ms.sum() - member.work_ms.min())
            if member.state_bytes and gain_ms > 0:
                # Rounded, so that the gains of layers of one shape are equal.
                gains[float(f"{gain_ms / member.state_bytes:.2e}")] += 1
        return np.array([0.0, *(rate for rate, _ in gains.most_common(1))])

    def held(self, frontier: Frontier) -> Counts:
        """Return, by ideal and net, how many of the other pins the ideal holds."""
        free: Counts = product(frontier.taken.astype(np.float32), self._pins[frontier.free])
        return np.asarray(free + self._pins[frontier.must].sum(axis=0))


class UnorderedLoads:
    """The least loads that unordered nodes add to the stages between two frontiers.

    Args:
        unordered: the nodes.
        before: the frontier before the stages.
        behind: the frontier behind them.
    """

    def __init__(self, unordered: UnorderedNodes, before: Frontier, behind: Frontier) -> None:
        self._rates = unordered.rates
        here, there = unordered.held(before), unordered.held(behind)
        rows: list[Table] = []
        tables: list[NDArray[np.float64]] = []
        for member in unordered.members:
            # Few different numbers of pins occur, so each pair of patterns is compared once.
            row, begins = _patterns(here[:, member.nets])
            column, ends = _patterns(there[:, member.nets])
            begin, end = begins[:, None, :], ends[None, :, :]
            elsewhere = ((begin == 0) & (end == member.pins)) @ member.cost_ms
            if not elsewhere.any():
                continue
            cut = (begin == end) @ member.cost_ms
            price = member.work_ms[:, None] + self._rates * member.state_bytes
            least = np.minimum(elsewhere, cut + price[:, :, None, None])
            rows.append(np.eye(len(begins))[row])
            tables.append(least[..., column])
        # With one 0/1 matrix of patterns per node side by side, a product sums over the nodes.
        self._left = np.concatenate(rows, axis=1) if rows else None
        self._right = np.concatenate(tables, axis=2) if rows else None

    def load(
        self, rows: slice, columns: slice, kind: int, left_bytes: Table | float
    ) -> Table | float:
        """Return, by some ideals and some later ones, the least load that is added.

        Args:
            rows: the ideals before the stage.
            columns: the ideals behind it.
            kind: the class of its device.
            left_bytes: the memory of the device that the other nodes leave.
        """
        if self._left is None or self._right is None:
            return 0.0
        left, right = self._left[rows], self._right[kind, :, :, columns]
        added = [
            product(left, table) - rate * left_bytes
            for rate, table in zip(self._rates, right, strict=True)
        ]
        return np.asarray(np.max(added, axis=0))


def _patterns(held: Counts) -> tuple[NDArray[np.int64], Table]:
    """Return, by ideal, the index of its row among the different rows, and these rows."""
    # Bytes compare much faster than the rows that np.unique(axis=0) sorts.
    keys = np.ascontiguousarray(held).view(f"V{held.itemsize * held.shape[1]}")[:, 0]
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    return index, held[first].astype(np.float64)


class UnorderedModel(StageModel):
    """The integer program of unordered nodes: all other nodes stay at their stages.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        upper: only placements within this bottleneck are searched, in milliseconds.
        devices: by layer, its device; the unordered nodes may move.
        which: the unordered nodes.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        upper: float,
        devices: Sequence[int],
        which: Sequence[int],
    ) -> None:
        result = costs.costs_of(problem, devices)  # links are all alike
        stage_of = {device: stage for stage, device in enumerate(result.stages)}
        self._fixed = [(stage_of[devices[layers[0]]],) * 2 for layers in nodes.nodes]
        for node in which:
            self._fixed[node] = (0, problem.most_devices - 1)
        super().__init__(problem, nodes, upper)

    def _windows(self) -> list[tuple[int, int]]:
        return self._fixed
