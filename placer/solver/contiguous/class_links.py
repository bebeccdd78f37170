"""Costs of values that cross between classes of devices, stage by stage.

The classes of the stages are known. A stage pays for each net that it shares with other stages. If
it has the source, it pays over the link to each later stage with a reader. If it has a reader, it
pays over the link from the earlier stage with the source. The stages of the other ends are known
only as windows, so the least cost is that over the best link to any of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from placer.schema import Link
from placer.solver.problem import Problem, Value
from placer.solver.reduce import Reduction

Bools = NDArray[np.bool_]
Vector = NDArray[np.float64]


class ClassNets:
    """The values as nets of nodes, and their costs between classes.

    Args:
        problem: the placement problem; every device pays for its transfers.
        nodes: its layers, joined where they must be together.
        never_ms: the time of a transfer without a link.

    Attributes:
        pins: by net and node, whether the net has a pin there.
        costs_ms: by net, class of the source and class of a reader, the least cost to both.
    """

    def __init__(self, problem: Problem, nodes: Reduction, never_ms: float) -> None:
        classes = problem.alike_devices()
        links = [[_between(problem, one, other) for other in classes] for one in classes]
        found: dict[tuple[int, tuple[int, ...], bool], Vector]
        found = defaultdict(lambda: np.zeros((len(classes), len(classes))))
        for value in problem.values:
            source = nodes.node_of[value.source]
            readers = tuple(sorted(nodes.holding(value.readers) - {source}))
            if readers:
                found[source, readers, value.bound_readers == value.readers] += _costs_ms(
                    value, links, never_ms, problem.request.transfers == "overlapped"
                )
        self.costs_ms = np.minimum(
            np.array(list(found.values())).reshape(-1, len(classes), len(classes)), never_ms
        )
        self._sources = np.array([source for source, _, _ in found], np.int64)
        self._ordered = np.array([ordered for _, _, ordered in found], np.bool_)[:, None]
        ends = [readers for _, readers, _ in found]
        self._readers = np.array([reader for readers in ends for reader in readers], np.int64)
        self._begins = np.cumsum([0, *map(len, ends)])[:-1].astype(np.int64)
        self._count = len(nodes.nodes)
        self._once = problem.multicast

    @cached_property
    def pins(self) -> Bools:
        """True where the net has a pin at the node, by net and node."""
        pins = np.zeros((len(self._sources), self._count), np.bool_)
        pins[np.arange(len(pins)), self._sources] = True
        sizes = np.diff(self._begins, append=len(self._readers))
        pins[np.repeat(np.arange(len(pins)), sizes), self._readers] = True
        return pins

    def least_ms(
        self, kind: int, here: Bools, earlier: Bools, later: Bools, fixed: Sequence[Bools]
    ) -> Vector:
        """Return, by net, its least cost to a stage if it is cut and has a pin there.

        Args:
            kind: the stage's class.
            here: by node, whether it can be at the stage.
            earlier: by node and class, whether it can be at an earlier stage of that class.
            later: by node and class, whether it can be at a later stage of that class.
            fixed: by class, the nodes that are certainly at another stage, stage by stage.
        """
        before, behind = earlier[self._sources], self._any_reader(later)
        if not self._ordered.all():
            before = np.where(self._ordered, before, before | later[self._sources])
            behind = np.where(self._ordered, behind, behind | self._any_reader(earlier))
        readers_here = self._any_reader(here[:, None])
        sent = np.where(behind & here[self._sources, None], self.costs_ms[:, kind, :], np.inf).min(
            axis=1
        )
        if not self._once:
            sent = np.maximum(sent, self._sent_for_sure(kind, fixed))
        received = np.where(before & readers_here, self.costs_ms[:, :, kind], np.inf).min(axis=1)
        least = np.minimum(sent, received)
        return np.where(np.isfinite(least), least, 0.0)

    def _sent_for_sure(self, kind: int, fixed: Sequence[Bools]) -> Vector:
        """Return, by net, what the source's stage sends to stages that certainly have a reader."""
        total = np.zeros(len(self._sources))
        for other, nodes in enumerate(fixed):
            total += self.costs_ms[:, kind, other] * self._any_reader(nodes).sum(axis=1)
        return total

    def _any_reader(self, which: Bools) -> Bools:
        """Return, by net, whether any of its readers is one of some nodes, in each column."""
        if not len(self._begins):
            return np.zeros((0, which.shape[1]), np.bool_)
        found: Bools = np.logical_or.reduceat(which[self._readers], self._begins, axis=0)
        return found


def _between(problem: Problem, ones: Sequence[int], others: Sequence[int]) -> list[Link]:
    """Return the link from devices of one class to devices of another.

    All are alike, as devices of a class may be swapped.
    """
    links = (problem.links[one][other] for one in ones for other in others if one != other)
    return [link for link in links if link is not None]


def _costs_ms(
    value: Value, links: Sequence[Sequence[list[Link]]], never_ms: float, overlapped: bool
) -> Vector:
    """Return, by the classes of source and reader, the times of a value and its gradient."""

    def least(between: Sequence[Link], size: int) -> float:
        return min(
            (0.0 if overlapped else link.transfer_ms(size) for link in between), default=never_ms
        )

    def both(source: int, reader: int) -> float:
        back = least(links[reader][source], value.gradient_bytes) if value.gradient_bytes else 0.0
        return least(links[source][reader], value.bytes) + back

    return np.array(
        [[both(source, reader) for reader in range(len(links))] for source in range(len(links))]
    )
