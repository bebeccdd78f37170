"""Chains of ideals where a value goes to each stage that reads it: what ``ideals.py`` counts once,
counted as often.

What the stage of a source takes depends on how many later stages read its values. So chains are followed from their
last stage to the first; a label of an ideal is one way to divide what it leaves, and says how often each of its values
is sent there and what the busiest of these stages takes::

    ideals   I ──── stage ──── J ═══ later stages     label of J: v and w, made in J, are read by 2 of these
             v      w reads v                         label of I: v is read by 3; the stage pays for w twice, for v once

Of two labels of an ideal one is left out if it sends no value less often and its busiest stage is
no quicker. Only chains count that are within a bottleneck when values count once, which few are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver.chain.optimal_cuts import Counts
from placer.solver.contiguous.ideal_frontiers import Bools, Front, Vector, product
from placer.solver.nets import joined_nets
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MOST_TIMES = 10_000_000
"""More than so many numbers, how often a value is sent, of all labels of a front that lead to one
are too many."""

Ints = NDArray[np.int64]
Times = NDArray[np.int8]


class Stages(NamedTuple):
    """What stages between the ideals of two fronts take where values count once: those that are not
    too long.

    Attributes:
        before: by stage, the place of the ideal before it.
        behind: and of the one behind it, ascending.
        load_ms: what it takes.
    """

    before: Ints
    behind: Ints
    load_ms: Vector

    def some(self, which: Ints | Bools) -> Stages:
        """Some of them."""
        return Stages(self.before[which], self.behind[which], self.load_ms[which])


class Labels(NamedTuple):
    """Ways to divide what ideals of a front leave.

    Attributes:
        ideal: by label, the place of its ideal in the front.
        sent: by label and value, how many later stages read it; 0 where it is not made in the
            ideal.
        busiest_ms: by label, what the busiest of these stages takes.
        kind: by label, the class of the device of the next stage.
        then: by label, the one that is left behind that stage, of those with a device of that class
            more.
    """

    ideal: Ints
    sent: Times
    busiest_ms: Vector
    kind: Ints
    then: Ints

    def some(self, which: Ints) -> Labels:
        """Some of them."""
        ideal, sent, busiest_ms, kind, then = self
        return Labels(ideal[which], sent[which], busiest_ms[which], kind[which], then[which])


def applies(problem: Problem) -> bool:
    """Whether a value may be sent more than once, and no such value is read before its source's
    stage.
    """
    several = [value for value in problem.values if len(value.readers) > 1]
    return (
        bool(several)
        and not problem.multicast
        and all(value.bound_readers == value.readers for value in several)
    )


class Sends:
    """The best chain through some fronts.

    Args:
        problem: what is asked, of the kind that ``applies`` names.
        nodes: its layers, joined where they must be together.
        fronts: by number of stages, the ideals that these can hold.
        stages: by number of stages before and class of devices, the stages that may come next.
        within: no stage may take longer, in milliseconds.

    Attributes:
        looked_at: how many numbers, how often a value is sent.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        fronts: Sequence[Front],
        stages: Mapping[tuple[int, int], Stages],
        within: float,
    ) -> None:
        self._fronts, self._stages, self._within = fronts, stages, within
        self._taxed = [alike[0] not in problem.untaxed for alike in problem.alike_devices()]
        nets = [net for net in joined_nets(problem, nodes) if len(net.readers) > 1]
        self._cost_ms = np.array([net.there_ms + net.back_ms for net in nets])
        sources, reads = (
            [net.source for net in nets],
            np.zeros((len(nodes.nodes), len(nets)), np.float32),
        )
        for place, net in enumerate(nets):
            reads[list(net.readers), place] = 1
        members = [front.members for front in fronts]
        self._made = [held[:, sources] for held in members]
        self._read = [product(held.astype(np.float32), reads) for held in members]
        self._labels: dict[Counts, Labels] = {}
        self.looked_at = 0

    def best(self, reached: Mapping[Counts, Vector]) -> tuple[float, list[tuple[int, int]]] | None:
        """The smallest bottleneck, and by stage the class of its device and the place of the ideal
        behind it.

        Args:
            reached: by devices of each class and ideal, the smallest bottleneck on the way to it.

        Returns:
            Infinity and no stages if no chain is within the bottleneck; None if labels are too
            many.
        """
        counts: Counts = ()
        for counts in sorted(reached, key=sum, reverse=True):
            able = reached[counts] <= self._within
            found = [self._last(counts, able)]
            for kind in range(len(counts)):
                further = self._further(counts, kind, able)
                if further is None:
                    return None
                found.append(further)
            self._labels[counts] = _undominated(
                Labels(*map(np.concatenate, zip(*found, strict=True)))
            )
        first = self._labels[counts]
        return (float(first.busiest_ms[0]), self._way(counts)) if len(first.ideal) else (inf, [])

    def _last(self, counts: Counts, able: Bools) -> Labels:
        """That of the ideal that holds all nodes, where it is in a front."""
        whole = self._fronts[sum(counts)].whole
        some = int(whole is not None and bool(able[whole]))
        ideal, none = np.full(some, whole or 0, np.int64), np.full(some, -1, np.int64)
        return Labels(
            ideal, np.zeros((some, len(self._cost_ms)), np.int8), np.zeros(some), none, none
        )

    def _further(self, counts: Counts, kind: int, able: Bools) -> Labels | None:
        """Labels of ideals before a stage on a device of a class; None if they are too many."""
        number, one_more = sum(counts), (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
        behind = self._labels.get(one_more)
        if behind is None or not len(behind.ideal):
            return self._last(counts, np.zeros_like(able))
        stages = self._stages[number, kind]
        first = np.searchsorted(stages.behind, behind.ideal, side="left")
        many = np.searchsorted(stages.behind, behind.ideal, side="right") - first
        self.looked_at += int(many.sum()) * len(self._cost_ms)
        if int(many.sum()) * len(self._cost_ms) > MOST_TIMES:
            return None
        label = np.repeat(np.arange(len(many)), many)
        stage = np.arange(len(label)) + np.repeat(first - np.cumsum(many) + many, many)
        made, ideal = self._made[number], stages.before[stage]
        load_ms = stages.load_ms[stage]
        if self._taxed[kind]:
            # the first time is in the load
            again_ms = (np.maximum(behind.sent, 1) - 1) * self._cost_ms
            load_ms = load_ms + product(again_ms, (~made.T).astype(np.float64))[label, ideal]
        fit = np.flatnonzero((load_ms <= self._within) & able[ideal])
        label, ideal = label[fit], ideal[fit]
        read = self._read[number + 1][behind.ideal[label]] > self._read[number][ideal]
        sent = np.where(made[ideal], behind.sent[label] + read, 0).astype(np.int8)
        busiest_ms = np.maximum(behind.busiest_ms[label], load_ms[fit])
        return Labels(ideal, sent, busiest_ms, np.full(len(label), kind, np.int64), label)

    def _way(self, counts: Counts) -> list[tuple[int, int]]:
        """The stages of the first label."""
        label, found = 0, []
        while (kind := int(self._labels[counts].kind[label])) >= 0:
            label = int(self._labels[counts].then[label])
            counts = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
            found.append((kind, int(self._labels[counts].ideal[label])))
        return found


def _undominated(labels: Labels) -> Labels:
    """Those of which no other of the same ideal sends each value as seldom and has no stage that is
    as quick.
    """
    order = np.lexsort((labels.busiest_ms, labels.sent.sum(axis=1), labels.ideal))
    ideal, sent, busiest_ms = labels.ideal[order], labels.sent[order], labels.busiest_ms[order]
    left, kept = np.arange(len(order)), [np.arange(0)]
    while len(left):
        firsts = np.flatnonzero(np.append(True, ideal[left][1:] != ideal[left][:-1]))
        # of each ideal the one that sends least, which no other dominates
        kept.append(left[firsts])
        lead = np.repeat(left[firsts], np.diff(np.append(firsts, len(left))))
        beaten = (sent[lead] <= sent[left]).all(axis=1) & (busiest_ms[lead] <= busiest_ms[left])
        left = left[~beaten]
    some = order[np.sort(np.concatenate(kept))]
    return labels.some(some)
