"""The peak memory of a step for every interval of a linear order as one stage.

**Training.** The layers of the order are its steps, block by block. For a stage that begins with
block ``first``, a table over first block and step says how many bytes are held at the step. The
table grows as the stage takes in one block after another: a reader that joins makes values, and
gradients, wait at the steps before it, back to the reader before it::

    v   s . . r1 . . . r2      r1 joins: v waits at the steps between s and r1 of the stages
          |------|  |-----|    without a keeper there;
                               r2 joins: it waits from r1 on, as does its gradient where s is
                               in another stage

Where the order is not the profile's, the peak is an approximation.

Recorded passes have memory of their own: forwards and backwards each have a peak. Kept bytes do not
count backwards. Bytes that layers have yet to leave to weight-gradient passes do, with a negative
sign. Values that other stages make are stored outside passes and are not counted here. Values that
only other stages have yet to read stay until the pass is over.

**Inference.** A table over first block and step says how many bytes the stage that begins with the
block holds at the step. It grows as one block after another joins. A value is held from the step at
which it is made until its last reader in the stage, or, where it is made in the stage, until its
last reader anywhere::

    v   s . . r1 . . . r2     r1 joins: v is held from s until r1 in the stages without s
        |------|-------|      r2 joins: there until r2, from r1 on, and from s in the stages
                              without r1

Steps follow the profile's order, whatever the linear order, so the peak equals the placement's
peak. Held bytes only grow, so a stage's peak so far is the largest that any hold has reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver.problem import Problem
from placer.solver.values import Value


class _Hold(NamedTuple):
    """What some stages hold at some steps, once a block has joined them.

    Attributes:
        firsts: the stages, by first block.
        steps: the steps.
        size: in bytes.
    """

    firsts: slice
    steps: slice
    size: int


def inference_moments(problem: Problem, blocks: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return, by first block and end, the values and workspace in bytes at the stage's peak.

    Args:
        problem: the placement problem, in inference.
        blocks: the layers of each block, in a topological order.
    """
    count = len(blocks)
    held = np.zeros((count, len(problem.layers)), np.int64)
    worst = np.zeros(count, np.int64)
    moments = np.zeros((count + 1, count + 1))
    for block, joined in enumerate(_joined(problem, blocks)):
        for firsts, steps, size in joined:
            held[firsts, steps] += size
            worst[firsts] = np.maximum(worst[firsts], held[firsts, steps].max(axis=1))
        moments[:-1, block + 1] = worst
    return moments


def _joined(problem: Problem, blocks: Sequence[Sequence[int]]) -> list[list[_Hold]]:
    """Return, by block, what its joining adds."""
    block_of = {layer: block for block, layers in enumerate(blocks) for layer in layers}
    joined: list[list[_Hold]] = [[] for _ in blocks]
    for step, layer in enumerate(problem.layers):
        block, size = block_of[step], layer.forward_workspace_bytes
        if size:
            joined[block].append(_Hold(slice(0, block + 1), slice(step, step + 1), size))
    for value in problem.values:
        for block, hold in _holds(value, block_of) if value.held_bytes else ():
            joined[block].append(hold)
    return joined


def _holds(value: Value, block_of: dict[int, int]) -> Iterator[tuple[int, _Hold]]:
    """Return the bytes that a value adds as blocks join, each with its block."""
    last_step = {block_of[reader]: reader for reader in value.readers}
    last_step[block_of[value.source]] = value.readers[-1]
    # from a first block on, until which step; the later the block, the shorter
    held: list[tuple[int, int]] = []
    begin = 0
    for block, until in sorted(last_step.items()):
        held.append((begin, value.source - 1))
        begin = end = block + 1
        # `held` is a stack with decreasing `until`. The joining block extends the entries that end
        # earlier, and each extension is one rectangle of stages and steps.
        while held and held[-1][1] < until:
            first, known = held.pop()
            yield block, _Hold(slice(first, end), slice(known + 1, until + 1), value.held_bytes)
            end = first
        held.append((end, until))


Table = NDArray[np.float64]


@dataclass(frozen=True)
class _Wait:
    """Bytes that wait in some stages at some steps, once a block has joined them.

    Attributes:
        joined: the block.
        backwards: 1 if they wait backwards, 0 if forwards.
        firsts: the stages, by first block: from one, until another.
        steps: from one, until another.
        size: in bytes.
    """

    joined: int
    backwards: int
    firsts: tuple[int, int]
    steps: tuple[int, int]
    size: int


class TrainingMoments:
    """Tables by first block and end of what stages need in training.

    Args:
        problem: the placement problem.
        blocks: the layers of each block, in order.
        recorded: whether passes have memory of their own.

    Attributes:
        kept: what one micro-batch leaves for its backward pass, in bytes.
        ahead: what it needs at its worst moment forwards; all that it kept until then included.
        back: the same backwards; of recorded passes without what was kept, or is left to weight
            passes.
        moment: the larger of the two.
        follows: whether the order is the profile's; only then is ``moment`` exact.
    """

    def __init__(
        self, problem: Problem, blocks: Sequence[Sequence[int]], recorded: bool = False
    ) -> None:
        self._problem, self._recorded = problem, recorded
        order = [layer for block in blocks for layer in block]
        self.follows = order == sorted(order)
        self._step = {layer: step for step, layer in enumerate(order)}
        self._block = [block for block, layers in enumerate(blocks) for _ in layers]
        self._starts = [0, *np.cumsum([len(block) for block in blocks]).tolist()]
        kept = self._kept_until()
        layers = [problem.layers[layer] for layer in order]
        forwards = np.array([la.forward_workspace_bytes for la in layers], dtype=np.float64)
        backwards = np.array([la.backward_workspace_bytes for la in layers], dtype=np.float64)
        if recorded:
            backwards = np.array(
                [problem.back_workspace_bytes[layer] for layer in order], dtype=np.float64
            )
        self._held = (kept + forwards, (-self._to_leave(order) if recorded else kept) + backwards)
        for held in self._held:
            for block, start in enumerate(self._starts[:-1]):
                held[block, :start] = -np.inf  # steps before the stage
        self.kept = np.zeros((len(blocks) + 1, len(blocks) + 1))
        self.kept[:-1, 1:] = kept[:, np.array(self._starts[1:]) - 1]
        self.ahead, self.back = self._grown()
        self.moment: Table = np.maximum(self.ahead, self.back)

    def _to_leave(self, order: Sequence[int]) -> Table:
        """Return, by first block and step, the bytes that layers leave to weight passes."""
        sums = np.cumsum([0.0, *(self._problem.deferred_bytes[layer] for layer in order)])
        to_leave: Table = sums[None, 1:] - sums[np.array(self._starts[:-1]), None]
        return to_leave

    def _kept_until(self) -> Table:
        """Return, by first block and step, what is kept of the layers from one to the other."""
        count = len(self._starts) - 1
        change = np.zeros((count + 1, self._starts[-1] + 1))
        for layer, step in self._step.items():
            self._keep(change, [step], self._problem.layers[layer].saved_bytes)
        for value in self._problem.values:
            keepers = sorted(self._step[keeper] for keeper in value.keepers)
            # Recorded passes hold only their own values. A value that arrives lies outside of them,
            # so only stages that begin at its source's block or before count.
            if self._recorded:
                self._keep(
                    change, keepers[:1], value.held_bytes, self._block[self._step[value.source]] + 1
                )
            else:
                self._keep(change, keepers, value.held_bytes)
        # Until here, the table has differences in both directions.
        np.cumsum(change, axis=0, out=change)
        np.cumsum(change, axis=1, out=change)
        return change[:-1, :-1]

    def _keep(
        self, change: Table, keepers: Sequence[int], size: int, most: int | None = None
    ) -> None:
        """Add a size kept from the first of some steps in the stage on, as differences.

        Where ``most`` is given, only stages that begin before that block count.
        """
        # A stage keeps a value from its first keeper in the stage on. Of the stages that begin
        # behind the previous keeper's block and up to this one's, this step is the first keeper.
        before = 0
        for step in keepers if size else ():
            until = self._block[step] + 1 if most is None else min(most, self._block[step] + 1)
            change[before, step] += size
            change[until, step] -= size
            before = until

    def _grown(self) -> tuple[Table, Table]:
        """Return the worst moment forwards, and that backwards, block by block."""
        count = len(self._starts) - 1
        waits: list[list[_Wait]] = [[] for _ in range(count)]
        for wait in self._waits():
            if wait.firsts[0] < wait.firsts[1] and wait.steps[0] < wait.steps[1]:
                waits[wait.joined].append(wait)
        moments = np.zeros((count + 1, count + 1)), np.zeros((count + 1, count + 1))
        for block in range(count):
            end = self._starts[block + 1]
            worsts = [moment[:-1, block + 1] for moment in moments]
            for worst, moment in zip(worsts, moments, strict=True):
                np.copyto(worst, moment[:-1, block])
            for wait in waits[block]:
                rows, begin = slice(*wait.firsts), wait.steps[0]
                held, worst = self._held[wait.backwards], worsts[wait.backwards]
                held[rows, slice(*wait.steps)] += wait.size
                # steps of blocks that are yet to join count when they do
                if begin < end:
                    changed = held[rows, begin : min(wait.steps[1], end)]
                    np.maximum(worst[rows], changed.max(axis=1), out=worst[rows])
            for held, worst in zip(self._held, worsts, strict=True):
                np.maximum(worst, held[:, self._starts[block] : end].max(axis=1), out=worst)
        return moments

    def _waits(self) -> Iterator[_Wait]:
        for value in self._problem.values:
            source = self._step[value.source]
            readers = sorted(
                step for reader in value.readers if (step := self._step[reader]) > source
            )
            if value.held_bytes:
                yield from self._values(value, source, readers)
            if value.gradient_bytes:
                waits = self._staying if self._recorded else self._gradients
                yield from waits(value.gradient_bytes, source, readers)
            if value.retained_bytes and not self._recorded:
                yield self._rest(value)

    def _values(self, value: Value, source: int, readers: Sequence[int]) -> Iterator[_Wait]:
        """Add values that wait forwards, since the previous reader, in stages without a keeper."""
        keepers = {self._step[keeper] for keeper in value.keepers}
        if self._recorded and not (readers or keepers):
            return  # as for gradients
        # where it is made, until it is kept: for a reader there, or for one that it is sent to
        if self._recorded:
            end = min(
                (step for step in keepers if step >= source), default=max(readers, default=source)
            )
            here = self._block[source]
            yield _Wait(here, 0, (0, here + 1), (source + 1, end), value.held_bytes)
            return
        first, before, begin = 0, source, source + 1
        for reader in readers:
            if before in keepers:
                first = self._block[before] + 1
            joined = self._block[reader]
            yield _Wait(joined, 0, (first, joined + 1), (begin, reader), value.held_bytes)
            before = begin = reader

    def _gradients(self, size: int, source: int, readers: Sequence[int]) -> Iterator[_Wait]:
        """Yield the waits of gradients: at the source for it, elsewhere for the previous reader."""
        # what colocated layers read may stand behind them in an order that need not be the
        # profile's
        if not readers:
            return
        here = self._block[source]
        yield _Wait(here, 1, (0, here + 1), (source + 1, readers[-1]), size)
        for before, reader in pairwise(readers):
            yield _Wait(
                self._block[reader], 1, (here + 1, self._block[before] + 1), (before, reader), size
            )

    def _rest(self, value: Value) -> _Wait:
        """Add what waits backwards in addition to the last reader's gradient."""
        before, until, last = (
            self._step[layer]
            for layer in (value.retained_from, value.retained_until, value.readers[-1])
        )
        return _Wait(
            self._block[last],
            1,
            (0, self._block[before] + 1),
            (before, until),
            value.retained_bytes,
        )

    def _staying(self, size: int, source: int, readers: Sequence[int]) -> Iterator[_Wait]:
        """Yield the waits of gradients in a recorded pass: for the source, or to be sent later."""
        for before, reader in pairwise((source + 1, *readers)):
            joined = self._block[reader]
            yield _Wait(joined, 1, (0, joined + 1), (before, reader), size)
