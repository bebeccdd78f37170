"""Loose nodes: what nothing orders may be at any stage, so ideals of all nodes would be too many.

Chains of ideals of the other nodes bound the bottleneck from below, and still do where every stage counts what a loose
node v costs it at the least, wherever v is::

    v is there      its work, and the transfer of its nets with all other pins elsewhere
    v is not        the transfer of its nets with all other pins there

A stage takes the cheaper for each v, but has room for few. With Lagrange's multiplier r for a byte, loose nodes add
to a stage at least::

    sum over v of min(cost where v is not there, cost where it is + r * state(v))  -  r * (room that other nodes leave)

What a net costs that other pins cut already is in the load without loose nodes. Nets with several
loose nodes count there alone. The loose nodes of the best chain are placed by the integer program,
the others staying where they are.

Source: Fisher, "The Lagrangian relaxation method for solving integer programming problems", 1981.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver import costs
from placer.solver.contiguous.ideal_frontiers import Counts, Front, Table, Vector, product
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.nets import joined_nets
from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction

MOST_RATES = 3
"""So many multipliers are looked at beside none."""


def loose_nodes(problem: Problem, nodes: Reduction) -> list[int]:
    """The nodes that nothing orders."""
    ordered = {node for arc in nodes.arcs(arcs_of(problem.values)) for node in arc}
    return [node for node in range(len(nodes.nodes)) if node not in ordered]


class _Member(NamedTuple):
    """A loose node.

    Attributes:
        nets: the places of those that it alone of the loose nodes has a pin of.
        cost_ms: by net, what it costs where it is cut.
        pins: by net, how many others it has.
        work_ms: by class of devices, its time.
        state_bytes: what it holds.
    """

    nets: NDArray[np.int64]
    cost_ms: Vector
    pins: Vector
    work_ms: Sequence[float]
    state_bytes: float


class Loose:
    """What loose nodes add to stages.

    Args:
        problem: what is asked.
        nodes: its layers, joined where they must be together.
        which: the loose nodes.
        works: by class of devices and node, its time.
        state_bytes: by node, what it holds; None if there is room for all.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        which: Sequence[int],
        works: Sequence[Vector],
        state_bytes: Vector | None,
    ) -> None:
        nets = [
            ({net.source, *net.readers}, net.there_ms + net.back_ms)
            for net in joined_nets(problem, nodes)
        ]
        alone = [(pins, cost) for pins, cost in nets if len(pins.intersection(which)) == 1]
        self.pins: Counts = np.zeros((len(nodes.nodes), len(alone)), np.float32)
        of: dict[int, list[int]] = {node: [] for node in which}
        for place, (pins, _) in enumerate(alone):
            self.pins[[pin for pin in pins if pin not in of], place] = 1
            of[next(pin for pin in pins if pin in of)].append(place)
        others, cost_ms = (
            self.pins.sum(axis=0).astype(np.float64),
            np.array([cost for _, cost in alone]),
        )
        self.members = [
            _Member(
                np.array(mine, np.int64),
                cost_ms[mine],
                others[mine],
                [float(work[node]) for work in works],
                0.0 if state_bytes is None else float(state_bytes[node]),
            )
            for node, mine in of.items()
            if mine
        ]
        self.rates = [0.0, *self._rates()]

    def _rates(self) -> list[float]:
        """Multipliers: what a byte of a node's state is worth where all its nets are saved; the
        most frequent ones.
        """
        rates: Counter[float] = Counter()
        for member in self.members:
            gain_ms = float(member.cost_ms.sum()) - min(member.work_ms)
            if member.state_bytes and 0 < gain_ms:
                rates[float(f"{gain_ms / member.state_bytes:.2e}")] += 1
        return sorted(rate for rate, _ in rates.most_common(MOST_RATES))

    def held(self, front: Front) -> Counts:
        """By ideal and net, how many of the other pins it holds."""
        free: Counts = product(front.taken.astype(np.float32), self.pins[front.free])
        return np.asarray(free + self.pins[front.must].sum(axis=0))


class Added:
    """What loose nodes add to the stages between the ideals of two fronts.

    Args:
        loose: the nodes.
        before: the front before the stages.
        behind: the one behind them.
    """

    def __init__(self, loose: Loose, before: Front, behind: Front) -> None:
        self._loose = loose
        here, there = loose.held(before), loose.held(behind)
        rows: list[NDArray[np.int64]] = []
        tables: list[list[list[Table]]] = [
            [[] for _ in loose.rates] for _ in loose.members[0].work_ms
        ]
        for member in loose.members:
            row, begins = _patterns(here[:, member.nets])
            column, ends = _patterns(there[:, member.nets])
            begin, end = begins[:, None, :], ends[None, :, :]
            absent = ((begin == 0) & (end == member.pins)) @ member.cost_ms
            if not absent.any():
                continue
            away = (begin == end) @ member.cost_ms
            rows.append(row)
            for kind, work_ms in enumerate(member.work_ms):
                for place, rate in enumerate(loose.rates):
                    cheaper = np.minimum(absent, away + (work_ms + rate * member.state_bytes))
                    tables[kind][place].append(cheaper[:, column])
        self._left = (
            np.concatenate([np.eye(int(row.max()) + 1)[row] for row in rows], 1) if rows else None
        )
        self._right = [[np.concatenate(one) for one in kind] for kind in tables] if rows else []

    def load(self, rows: slice, columns: slice, kind: int, room: Table | float) -> Table | float:
        """By some ideals and some later ones, what is added at the least.

        Args:
            rows: the ideals before.
            columns: those behind.
            kind: the class of the device of the stage.
            room: what the other nodes leave of it, in bytes.
        """
        if self._left is None:
            return 0.0
        found: Table | None = None
        for rate, right in zip(self._loose.rates, self._right[kind], strict=True):
            added = product(self._left[rows], right[:, columns]) - rate * room
            found = added if found is None else np.maximum(found, added)
        assert found is not None
        return found


def _patterns(held: Counts) -> tuple[NDArray[np.int64], Table]:
    """By ideal, the number of its row, and the different rows."""
    base, nets = int(held.max(initial=0)) + 1, held.shape[1]
    if base**nets < 2**62:  # one number tells a row, quicker than all of them
        codes = held.astype(np.int64) @ base ** np.arange(nets, dtype=np.int64)
        _, first, number = np.unique(codes, return_index=True, return_inverse=True)
    else:
        _, first, number = np.unique(held, axis=0, return_index=True, return_inverse=True)
    return number.reshape(-1), held[first].astype(np.float64)


class LooseModel(StageModel):
    """The integer program of loose nodes alone.

    Args:
        problem: what is asked.
        nodes: its layers, joined where they must be together.
        upper: only placements within it are searched.
        devices: by layer, where all are; the loose ones may be elsewhere.
        which: the loose nodes.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        upper: float,
        devices: Sequence[int],
        which: Sequence[int],
    ) -> None:
        result = costs.evaluate(problem, devices)
        assert result is not None  # links are all alike
        stage_of = {device: stage for stage, device in enumerate(result.stages)}
        self._fixed = [(stage_of[devices[layers[0]]],) * 2 for layers in nodes.nodes]
        for node in which:
            self._fixed[node] = (0, problem.most_devices - 1)
        super().__init__(problem, nodes, upper)

    def _windows(self) -> list[tuple[int, int]]:
        return self._fixed
