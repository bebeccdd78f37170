"""What every interval of a linear order would cost as one stage: tables by first block and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from placer.solver.bounds import memory_bounds
from placer.solver.chain.interval_peaks import TrainingMoments, inference_moments
from placer.solver.problem import Problem
from placer.solver.reduce import Exchange, Reduction, exchanges
from placer.solver.values import Value

Table = NDArray[np.float64]


class Intervals:
    """Tables over intervals ``[first, end)`` of blocks; impossible intervals are infinite.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        blocks: runs of nodes, in a topological order.
        exchanged: the result of ``nets.exchanges``, where it is known.

    Attributes:
        exact: whether memory is exactly the cost model's.
    """

    exact = True

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        blocks: list[list[int]],
        exchanged: Sequence[Exchange] | None = None,
    ) -> None:
        self.problem, self.nodes, self.blocks = problem, nodes, blocks
        self._count = len(blocks)
        self._times: dict[tuple[int, bool], Table] = {}
        self._layers = [
            [layer for node in block for layer in nodes.nodes[node]] for block in blocks
        ]
        self._block_of = [0] * len(problem.layers)
        for block, layers in enumerate(self._layers):
            for layer in layers:
                self._block_of[layer] = block
        self._limited = problem.request.objective == "memory" or memory_bounds.can_bind(problem)
        if problem.request.objective != "memory":
            self._measure_transfers(exchanges(problem, nodes) if exchanged is None else exchanged)
        if self._limited:
            self._measure_memory()

    def flight(self, stages_left: int) -> int:
        """Return the micro-batches that a stage must be able to hold; 1 where memory is ample.

        Args:
            stages_left: the number of stages from this one on.
        """
        return self.problem.flight(stages_left) if self._limited else 1

    def cost(self, device: int, flight: int) -> Table:
        """Return the cost of each interval as one stage on a device.

        Its part of the objective, or infinity.
        """
        limit = self.problem.devices[device].usable_bytes
        if self.problem.request.objective == "memory":
            cost = self._least_memory(device, flight)
        else:
            cost = self._time(device)
            if self._limited and self.problem.recompute[device] == "auto":
                # An interval that fits without recomputation never recomputes, as in the cost
                # model.
                cost = np.where(self._memory(flight) <= limit, cost, self._time(device, again=True))
        if self._limited:
            cost = np.where(self._least_memory(device, flight) <= limit, cost, inf)
        if self.problem.most_layers is not None:
            layers = np.cumsum([0] + [len(block) for block in self._layers])
            cost = np.where(layers[None, :] - layers[:, None] > self.problem.most_layers, inf, cost)
        # Prefix counts: an interval is banned if the count grows between its ends.
        banned = np.cumsum(
            [0] + [any(device not in self.nodes.allowed[n] for n in block) for block in self.blocks]
        )
        cost = np.where(banned[None, :] > banned[:, None], inf, cost)
        # a stage is not empty
        return np.where(np.tri(self._count + 1, dtype=bool), inf, cost)

    def _time(self, device: int, again: bool = False) -> Table:
        """Return the time of each interval, whatever is in flight.

        ``again`` with a device that recomputes.
        """
        if (device, again) not in self._times:
            self._times[device, again] = self._measure_time(device, again)
        return self._times[device, again]

    def _measure_time(self, device: int, again: bool) -> Table:
        work = [self.problem.work_ms(layers, device) for layers in self._layers]
        if again:  # what recomputes runs forwards twice
            twice = [
                sum(self.problem.forward_ms[layer][device] for layer in layers)
                for layers in self._layers
            ]
            work = [one + more for one, more in zip(work, twice, strict=True)]
        done = np.concatenate([[0.0], np.cumsum(work)])
        compute: Table = done[None, :] - done[:, None]
        if device in self.problem.untaxed:
            return compute
        # The best latency and the best bandwidth may belong to different links. The table is then a
        # lower bound, which the bound of the cut needs.
        inwards, outwards = self._links(device, inwards=True), self._links(device, inwards=False)
        receive, send = self._over(inwards, self._received), self._over(outwards, self._sends)
        if self.problem.request.objective == "latency":
            return compute + receive
        if self.problem.request.transfers == "overlapped":
            return np.maximum(compute, np.maximum(send, receive))
        return compute + send + receive

    def _links(self, device: int, *, inwards: bool) -> tuple[float, float] | None:
        """Return a device's lowest latency in ms and time per byte in one direction."""
        others = range(len(self.problem.devices))
        links = [
            self.problem.links[o][device] if inwards else self.problem.links[device][o]
            for o in others
        ]
        real = [link for link in links if link is not None]
        if not real:
            return None
        return 1e3 * min(link.latency_s for link in real), 1e3 / max(
            link.bandwidth_bytes_per_s for link in real
        )

    @staticmethod
    def _over(link: tuple[float, float] | None, transfers: _Transfers) -> Table:
        # Without any link in this direction, only an interval without transfers is possible.
        if link is None:
            return np.where(transfers.number > 0, inf, 0.0)
        time_ms: Table = transfers.size * link[1]
        return time_ms + transfers.number * link[0] if link[0] else time_ms

    def _measure_transfers(self, exchanged: Iterable[Exchange]) -> None:
        """Count the values and gradients that enter and leave each interval, and their bytes."""
        self._received, self._sends = _Transfers(self._count), _Transfers(self._count)
        block_of = {node: block for block, nodes in enumerate(self.blocks) for node in nodes}
        for one in exchanged:
            source = block_of[one.source]
            readers = sorted({block_of[reader] for reader in one.readers} - {source})
            if readers:
                self._received.enter(source, readers, one.bytes, one.number)
                self._sends.leave(source, readers, one.bytes, one.number)
            if readers and one.gradients:
                self._sends.enter(source, readers, one.gradient_bytes, one.gradients)
                self._received.leave(source, readers, one.gradient_bytes, one.gradients)

    def _memory(self, flight: int) -> Table:
        return self._fixed + self._passing(flight)

    def _passing(self, flight: int) -> Table:
        """Return what further micro-batches keep and the peak of one, or the needs of each."""
        if self.problem.recorded:
            backwards = self.problem.backwards(flight)
            each = self._each + (self._landing if flight > backwards else 0.0)
            return flight * each + backwards * self._backward + self._shared
        return (flight - 1) * self._kept + self._moment

    def _least_memory(self, device: int, flight: int) -> Table:
        """Return the same, recomputed where it must be, or that is less and allowed."""
        rule = self.problem.recompute[device]
        if rule == "never":
            return self._memory(flight)
        # A device that recomputes keeps only its inputs of the other micro-batches. The micro-batch
        # that is being recomputed has the full peak.
        again = (flight - 1) * self._entering + self._moment
        return self._fixed + (
            again if rule == "always" else np.minimum(self._passing(flight), again)
        )

    @cached_property
    def _entering(self) -> Table:
        """Return the bytes of the values that come in from other stages for one micro-batch."""
        return self._coming(attrgetter("held_bytes"))

    def _coming(self, size: Callable[[Value], int]) -> Table:
        """Return the sums of a size of each value, over those that come in from other stages."""
        transfers = _Transfers(self._count)
        for value, source, readers in self._exchanged():
            transfers.enter(source, readers, size(value))
        return transfers.size

    def _exchanged(self) -> Iterator[tuple[Value, int, list[int]]]:
        """Return the values that blocks exchange, with the source's and the readers' blocks."""
        for value in self.problem.values:
            source = self._block_of[value.source]
            readers = sorted({self._block_of[reader] for reader in value.readers} - {source})
            if readers:
                yield value, source, readers

    @cached_property
    def _crossing(self) -> Table:
        """Return one micro-batch's bytes outside passes; see ``memory.crossing_bytes``."""
        transfers = _Transfers(self._count)
        for value, source, readers in self._exchanged():
            transfers.enter(source, readers, value.held_bytes)
            transfers.leave(source, readers, value.arriving_bytes)
        return transfers.size

    @cached_property
    def _waiting(self) -> Table:
        """Gradients from other stages that wait where they come, for one micro-batch.

        See ``memory.landing_bytes``.
        """
        transfers = _Transfers(self._count)
        for value, source, readers in self._exchanged():
            transfers.leave(source, readers, value.gradient_bytes - value.arriving_bytes)
        return transfers.size

    @cached_property
    def _sent(self) -> Table:
        """Return one micro-batch's bytes that are sent to other stages and not kept here."""
        transfers = _Transfers(self._count)
        for value, source, readers in self._exchanged():
            keepers = {self._block_of[keeper] for keeper in value.keepers}
            if not keepers:
                transfers.leave(source, readers, value.held_bytes)
            elif source not in keepers:
                # a keeper reads it: a stage without one lacks a reader
                #     k1 . . source . . k2      a stage with the source but without k1 and k2
                #        [first ... end)        holds the value only until it is sent
                before = max((keeper for keeper in keepers if keeper < source), default=-1)
                after = min((keeper for keeper in keepers if keeper > source), default=self._count)
                transfers.add(value.held_bytes, (before + 1, source + 1), (source + 1, after + 1))
        return transfers.size

    def _measure_memory(self) -> None:
        """Compute the state, the kept bytes and the worst moment of each interval."""
        shape = (self._count + 1, self._count + 1)
        problem = self.problem
        self._fixed = self._summed(
            [memory_bounds.state_bytes(problem, layer) for layer in problem.layers]
        )
        self._fixed = self._fixed + self._copied()
        self._kept, self._moment, self._each, self._landing = (np.zeros(shape) for _ in range(4))
        self._backward, self._shared = np.zeros(shape), np.zeros(shape)
        if memory_bounds.holds_state_alone(problem):
            return
        if problem.recorded:
            passes = TrainingMoments(problem, self._layers, recorded=True)
            # Either the forward peak counts, or the state after the pass: kept bytes and bytes
            # still to be sent. Both last for every micro-batch in flight.
            self._each = np.maximum(passes.ahead, passes.kept + self._sent) + self._crossing
            self._landing = self._coming(attrgetter("gradient_bytes"))
            self._backward, self._shared = passes.back, self._summed(problem.step_bytes)
            if problem.weights_apart:
                self._landing = self._landing + self._waiting
                self._backward = self._backward + self._summed(problem.deferred_bytes)
                self._shared = self._shared + self._largest(problem.weight_grad_workspace_bytes)
            self.exact = passes.follows
        if problem.training and (problem.may_recompute or not problem.recorded):
            moments = TrainingMoments(problem, self._layers)
            self._kept, self.exact = moments.kept, moments.follows
            self._moment = np.maximum(moments.moment, self._summed(problem.step_bytes))
        if not problem.training:
            self._moment = inference_moments(problem, self._layers)

    def _copied(self) -> Table:
        """Return the bytes of copies in each interval with sharing layers but not the first."""
        transfers = _Transfers(self._count)
        for shared in self.problem.shared:
            first = self._block_of[shared.first]
            others = sorted({self._block_of[layer] for layer in shared.others} - {first})
            transfers.enter(first, others, shared.total_bytes)
        return transfers.size

    def _summed(self, sizes: Sequence[int]) -> Table:
        """Return the sums over intervals of what each layer holds."""
        blocks = [sum(sizes[layer] for layer in layers) for layers in self._layers]
        held = np.concatenate([[0.0], np.cumsum(blocks, dtype=np.float64)])
        table: Table = held[None, :] - held[:, None]
        return table

    def _largest(self, sizes: Sequence[int]) -> Table:
        """Return the largest of what each layer of an interval needs for itself."""
        blocks = np.array(
            [max(sizes[layer] for layer in layers) for layers in self._layers], dtype=np.float64
        )
        table: Table = np.zeros((self._count + 1, self._count + 1))
        for first in range(self._count):
            table[first, first + 1 :] = np.maximum.accumulate(blocks[first:])
        return table


class _Transfers:
    """Values by the intervals that they enter or leave.

    The tables are filled in once all values are known.

    Args:
        blocks: how many there are.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._corners: list[tuple[int, int, int, int]] = []
        self._numbers: list[int] = []
        self._sizes: list[int] = []

    def enter(self, source: int, readers: list[int], size: int, number: int = 1) -> None:
        """Add values of that size to the intervals that hold a reader, but not their source."""
        before = source
        #     source . . r1 . . r2     the interval begins after the source, and the first reader
        #            |----|-----|      in it is r1 or r2: disjoint rectangles, one for each reader
        for reader in (reader for reader in readers if reader > source):
            self.add(size, (before + 1, reader + 1), (reader + 1, self._blocks + 1), number)
            before = reader
        after = source
        for reader in (reader for reader in reversed(readers) if reader < source):
            self.add(size, (0, reader + 1), (reader + 1, after + 1), number)
            after = reader

    def leave(self, source: int, readers: list[int], size: int, number: int = 1) -> None:
        """Add values of that size to the intervals that hold their source, but not all readers."""
        first, last = min(source, readers[0]), max(source, readers[-1])
        self.add(size, (0, source + 1), (source + 1, self._blocks + 1), number)
        # Intervals with all ends inside send nothing, so the second rectangle takes them out again.
        self.add(-size, (0, first + 1), (last + 1, self._blocks + 1), -number)

    def add(
        self, size: int, rows: tuple[int, int], columns: tuple[int, int], number: int = 1
    ) -> None:
        """Count so many values of that size in all to the intervals of a rectangle."""
        self._corners.append((*rows, *columns))
        self._numbers.append(number)
        self._sizes.append(size)

    @cached_property
    def number(self) -> Table:
        """The number of values, by interval."""
        return self._filled(self._numbers)

    @cached_property
    def size(self) -> Table:
        """The bytes of the values, by interval."""
        return self._filled(self._sizes)

    def _filled(self, amounts: Sequence[int]) -> Table:
        """Return the amounts in their rectangles.

        As differences, which sums along both axes fill in.
        """
        side = self._blocks + 2
        if not any(amounts):
            return np.zeros((side - 1, side - 1))
        amount = np.array(amounts, np.float64)
        # A rectangle is four corners of a difference table (a 2-D prefix sum):
        #    +amount at (top, left)       -amount at (top, right)
        #    -amount at (bottom, left)    +amount at (bottom, right)
        top, bottom, left, right = np.array(self._corners, np.int64).T
        places = np.concatenate(
            [top * side + left, bottom * side + right, bottom * side + left, top * side + right]
        )
        changes = np.concatenate([amount, amount, -amount, -amount])
        table = np.asarray(np.bincount(places, changes, side * side), np.float64).reshape(
            side, side
        )
        filled: Table = np.cumsum(np.cumsum(table, axis=0), axis=1)[:-1, :-1]
        return filled
