r"""Lower bounds on the step of every placement, for one number of micro-batches and one schedule.

These hold for an isolated step; the bounds of steady-state steps follow below. With n
micro-batches, f and b the passes of a stage, c = f + b, and before (behind) what a micro-batch
passes through in the stages before it (behind it)::

    any placement       before + n * c of every device, and without weight halves that run apart
                        before + n * c + the way back; of some of a node's passes, their heads and
                        tails (see ``one_machine_bound.py``); if contiguous, what filling the
                        pipeline takes (see ``fill_bound.py``)
    a row of stages     before + n * c
                        until the first stage has its last gradients: before + n * c without weight
                        halves that run apart; the whole way + (n - 1) * f, and the same with b;
                        then its weight half and optimizer
      fill-drain        the whole way + (n - 1) * c: a flow shop forwards, then one backwards
      1f1b              before + n * c + wait(f) + wait(b), with w = min(n, stages from here)
                        micro-batches in flight: until the first one comes back the stage runs
                        w - 1 further forward passes, before the last one comes back w - 1 backward
                        passes, wait(x) = max(0, behind - (w - 1) * x). Where n <= stages from here
                        these are one wait, the longer.
      zero-bubble       before + n * c + wait(f), without the weight halves of other stages, for
                        which nobody waits

Only the transfers at a stage's own two cuts count, over the fastest link. Everything elsewhere
counts on its fastest device. The bound of a whole cut of a row is the largest of its stages', so a
dynamic program finds the cut with the smallest bound (see ``optimal_cuts.py``). In an enumeration
of cuts the first stages are known: the end of the first stage, and the transfers between them, are
added.

**Steady state.** A device begins a step after its last pass of the step before and its optimizer.
So a step takes at least the time from a device's first pass to its last, and the optimizer. With n
micro-batches, f and b the passes of a stage, o its optimizer, c = f + b, and behind what a
micro-batch passes through in the stages behind it::

    any placement       n * c + o of every device, and what nothing hides of the exchange with its
                        replicas (see ``gradient_exchange.py``); the way from a layer that reads
                        nothing to any other, all micro-batches through that, and the way back,
                        after which the first one's device has its next step; if contiguous, what
                        filling the pipeline takes (see ``fill_bound.py``)
    a row of stages     n * c + o + wait, the stage's own passes
                        before + n * c + wait, without weight halves that run apart; the whole
                        way + (n - 1) * f, and the same with b: all of this between the first
                        pass of the first stage and its last
                        n * a transfer at a cut, which follow one another on a lane

A stage waits as in an isolated step for what is behind it: wait(f) +
wait(b) under 1f1b and fill-drain, wait(f) under zero-bubble. In inference nothing comes back, and
stages wait for nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.solver import pipelines
from placer.solver.bounds.simple_bounds import fastest_ms
from placer.solver.bounds.work_sharing import least_work
from placer.solver.chain import optimal_cuts
from placer.solver.chain.optimal_cuts import Counts, CutTable
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction
from placer.solver.replicas.gradient_exchange import SlotBound, slot_bounds
from placer.solver.step import fill_bound, one_machine_bound
from placer.solver.values import arcs_of, gradient_arcs

Table = NDArray[np.float64]
Matrix = Sequence[Sequence[float]]
_Entry = tuple[float, int, int, "_OpenCut", int]

LOOKS = 1_000
"""Unfinished cuts that are expanded before the caller is asked whether to go on."""

MOST_OPEN = 50_000
"""The most unfinished cuts, about 200 MB for a row of a hundred nodes."""


def any_placement(
    problem: Problem, nodes: Reduction, over: Callable[[], bool] = lambda: False
) -> float:
    """Return a bound on every step in ms: the busiest device, or one micro-batch's way.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes; each may be on some device.
        over: asked before each part of this; where it is, the step is not shorter than what the
            parts before tell.
    """
    if over():
        return 0.0
    awaited_ms = _awaited_ms(problem)
    if pipelines.is_steady_state(problem):
        return _any_steady_state(problem, nodes, awaited_ms, over) * (1 - ROUNDING)
    parts = itertools.takewhile(lambda _: not over(), (_spans, fill_bound.filling))
    passes = max((part(problem, nodes, awaited_ms) for part in parts), default=0.0)
    # In an isolated step the optimizer starts after all passes, so the two bounds add up.
    return (passes + (0.0 if over() else least_optimizer(problem, nodes))) * (1 - ROUNDING)


def least_optimizer(problem: Problem, nodes: Reduction) -> float:
    """Return a lower bound on every placement's optimizer step, in milliseconds."""
    return least_work(problem, nodes, partial(pipelines.optimizer_ms, problem))


def _spans(problem: Problem, nodes: Reduction, awaited_ms: Matrix) -> float:
    """Return the busy time of a node's device and of any device, with what precedes and follows.

    Devices hold different nodes. So before the first pass of the second device comes at least what
    precedes some second node, and likewise for what follows.
    """
    chunks = problem.request.chunks

    def held_ms(layer: int, device: int) -> float:
        return problem.forward_ms[layer][device] + awaited_ms[layer][device]

    ways = one_machine_bound.ways_of(problem, awaited_ms)
    heads, tails = (
        sorted(min(ms[i] for i in layers) for layers in nodes.nodes)
        for ms in (ways.there, ways.back)
    )
    # The k-th device used waits at least as long as the k-th smallest head and the k-th smallest
    # tail, whatever nodes it holds.
    both = [head + tail for head, tail in zip(heads, tails, strict=True)]
    return max(
        one_machine_bound.of_nodes(problem, nodes, awaited_ms, ways),
        chunks * least_work(problem, nodes, problem.compute_ms, [head / chunks for head in heads]),
        chunks * least_work(problem, nodes, held_ms, [aside / chunks for aside in both]),
    )


def _awaited_ms(problem: Problem) -> Matrix:
    """Return, by layer and device, what others wait for of a backward pass."""
    if problem.request.schedule != "zero-bubble":
        return problem.backward_ms
    return [
        [
            whole - pipelines.weight_grad_ms(problem, layer, device)
            for device, whole in enumerate(row)
        ]
        for layer, row in enumerate(problem.backward_ms)
    ]


def is_row(problem: Problem, nodes: Reduction) -> bool:
    """Return whether every contiguous placement is a row of stages with neighbours both ways."""
    if len(nodes.nodes) > optimal_cuts.MOST_NODES or not optimal_cuts.is_only_order(problem, nodes):
        return False
    back = nodes.arcs(gradient_arcs(problem.values))
    return not problem.training or all(
        (node, node + 1) in back for node in range(len(nodes.nodes) - 1)
    )


class StepTable(CutTable):
    """Lower bounds on the step by how a row is cut, with those cuts below a value.

    Args:
        problem: the placement problem, of a schedule and a number of micro-batches.
        nodes: its layers in nodes, a row.
        bottleneck: the same question with objective ``throughput``, by whose memory cuts are
            judged.
        classes: devices that may be swapped.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, bottleneck: Problem, classes: list[list[int]]
    ) -> None:
        super().__init__(bottleneck, nodes, [[node] for node in range(len(nodes.nodes))], classes)
        self._asked = problem
        self._extra = 0.0 if pipelines.is_steady_state(problem) else least_optimizer(problem, nodes)
        optimizer_ms = partial(pipelines.optimizer_ms, problem)
        self._optimizer = self._sums(fill_bound.matrix(problem, optimizer_ms))
        self._forward = self._sums(problem.forward_ms)
        self._backward = self._sums(problem.backward_ms)
        self._awaited = self._sums(_awaited_ms(problem))
        self._way_there = self._fastest_sums(problem.forward_ms)
        self._way_back = self._fastest_sums(_awaited_ms(problem))
        # All sums below are prefix sums over nodes: the value of nodes i..j-1 is sums[j] - sums[i].
        self._cut_there, self._cut_back = self._transfers()
        self._by_stages_left: dict[tuple[int, int], tuple[Table, Table]] = {}
        self._best_trip: dict[Counts, Table] = {}

    def _sums(self, time_ms: Matrix) -> Table:
        """Return, by device and node, the sum over all nodes before it."""
        devices = range(len(self.problem.devices))
        rows = [
            [sum(time_ms[layer][d] for layer in layers) for layers in self.nodes.nodes]
            for d in devices
        ]
        return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.array(rows), axis=1)], axis=1)

    def _fastest_sums(self, time_ms: Matrix) -> Table:
        """Return, by node, the sum over all nodes before it, each layer on its fastest device."""
        fastest = fastest_ms(self.problem, time_ms)
        return np.concatenate(
            [[0.0], np.cumsum([sum(fastest[layer] for layer in row) for row in self.nodes.nodes])]
        )

    def cost(self, kind: int, stages_left: int) -> Table:
        """Return, by first node and end, a lower bound on the step with that stage.

        Infinite where it cannot be.
        """
        return self._bounds_of(kind, stages_left)[0]

    def _bounds_of(self, kind: int, stages_left: int) -> tuple[Table, Table]:
        """Return the same, and a bound on the time until the first stage has its last gradients."""
        key = kind, stages_left
        if key not in self._by_stages_left:
            possible = np.isfinite(super().cost(kind, stages_left))
            own, trip = self._bound(self.classes[kind][0], stages_left)
            whole, until = (
                np.where(possible, (bound + self._extra) * (1 - ROUNDING), np.inf)
                for bound in (np.maximum(own, trip), trip)
            )
            self._by_stages_left[key] = whole, until
        return self._by_stages_left[key]

    def fill(self) -> tuple[float, Counts]:
        """Fill the table, also by the time until the first stage has its last gradients."""
        found = super().fill()
        for counts, best in self.best.items():  # ascending numbers of devices
            self._best_trip[counts] = best if not sum(counts) else self._least_trip(counts)
        return found

    def _least_trip(self, counts: Counts) -> Table:
        """Return, by first node, the least such time with the stages from there."""
        trips = [
            self._trips(counts, kind, slice(None)).min(axis=-1)
            for kind in optimal_cuts.kinds_left(counts)
        ]
        return np.asarray(np.min(trips, axis=0))

    def _trips(self, counts: Counts, kind: int, start: slice | int) -> Table:
        """Return, by first node and end, the trip time if such a device takes the stage."""
        until = self._bounds_of(kind, sum(counts))[1][start]
        return np.asarray(np.maximum(until, self._best_trip[optimal_cuts.one_less(counts, kind)]))

    def _tail(self, kind: int) -> Table:
        """Return, by end of the first stage, what it does when it has its last gradients.

        A weight half, and the optimizer.
        """
        device = self.classes[kind][0]
        optimizer = (
            self._optimizer[device] if self._asked.training else np.zeros(len(self.nodes.nodes) + 1)
        )
        return np.asarray(
            (self._backward - self._awaited)[device] + np.maximum(0.0, optimizer - self._extra)
        )

    def _transfers(self) -> tuple[Table, Table]:
        """Return, by node, the time of one micro-batch over a cut before it, both ways."""
        there, back = (np.zeros(len(self.nodes.nodes) + 1) for _ in range(2))
        quickest_ms = self.problem.quickest_ms
        for value in self.problem.values:
            node = self.nodes.node_of[value.source]
            if node + 1 in self.nodes.holding(value.readers):
                there[node + 1] += quickest_ms(value.bytes)
                if value.gradient_bytes:
                    back[node + 1] += quickest_ms(value.gradient_bytes)
        return there, back

    def _bound(self, device: int, stages_left: int) -> tuple[Any, Any]:
        """Return, by first node and end, bounds on a step's passes with a stage there.

        All, and until gradients are back.
        """
        chunks = self._asked.request.chunks
        forward, backward, awaited = (
            sums[device][None, :] - sums[device][:, None]
            for sums in (self._forward, self._backward, self._awaited)
        )
        #     nodes   0 ......... first ......... end ......... last
        #             |-- there ---|--- stage ----|--- behind ---|
        #             |-- back ----|              |
        # Rows are first nodes and columns are ends.
        there = (self._way_there + self._cut_there)[:, None]
        back = (self._way_back + self._cut_back)[:, None]
        whole = self._way_there[-1] + self._way_back[-1]
        behind = (whole - self._way_there - self._way_back + self._cut_there + self._cut_back)[
            None, :
        ]
        cut = self._cut_there + self._cut_back
        whole = whole + cut[:, None] + cut[None, :]
        # One micro-batch passes through all stages; the other chunks - 1 follow through this stage,
        # in one direction or the other.
        way = whole + (chunks - 1) * np.maximum(forward, awaited)
        wait = fill_bound.wait_ms(self._asked, stages_left, behind, forward, backward)
        own = chunks * (forward + backward) + wait
        round_trip = np.maximum(way, there + back + chunks * (forward + awaited) + wait)
        if not pipelines.is_steady_state(self._asked):
            return there + own, round_trip
        own = own + self._optimizer[device][None, :] - self._optimizer[device][:, None]
        # Each direction of a link is one lane: all micro-batches of a step pass through it in turn.
        lanes = chunks * np.maximum(self._cut_there, self._cut_back)[:, None]
        return np.maximum(own, lanes), round_trip if self._asked.training else np.zeros_like(own)

    def cuts(self) -> Iterator[tuple[float, list[int] | None]]:
        """Return every cut, the lowest bound first.

        Yields:
            Its bound, which is one for all that follow, and by layer its device. None instead while
                cuts are being put together, so that whoever asks may stop; no devices at all where
                it gives up, as too many are open.
        """
        if not np.isfinite(self.fill()[0]):
            return
        # Best-first search. Each entry is an open cut with the index of its next option; popping it
        # pushes two entries: the same cut with the next option, and the extended cut.
        #    open cut  | 0..3 | 3..7 | ?      options of the next stage, by bound
        #                       ├─▶ choice 0 ──▶ extended cut
        #                       └─▶ choice 1 (pushed when choice 0 is popped)
        queue: list[_Entry] = []
        number = itertools.count()

        def push(open_cut: _OpenCut, choice: int) -> None:
            if choice < len(open_cut.options.bounds):
                bound = max(open_cut.bound, float(open_cut.options.bounds[choice]))
                heapq.heappush(queue, (bound, -open_cut.start, next(number), open_cut, choice))

        for counts in self.best:
            if sum(counts) < self.problem.least_devices:
                continue
            push(_OpenCut(0, counts, (), 0.0, None, self._next_stages(0, counts, None)), 0)
        for look in itertools.count(1):
            if not queue:
                return
            bound, _, _, parent, choice = heapq.heappop(queue)
            if look % LOOKS == 0:
                yield bound, None
            if len(queue) > MOST_OPEN:
                yield bound, []
                return
            push(parent, choice + 1)
            stop, kind = int(parent.options.stops[choice]), int(parent.options.kinds[choice])
            stages = (*parent.stages, (stop, kind))
            if stop == len(self.nodes.nodes):
                yield bound, self._devices(stages)
            else:
                counts = optimal_cuts.one_less(parent.counts, kind)
                tail = float(self._tail(kind)[stop]) if parent.tail is None else parent.tail
                tail += float(self._cut_there[parent.start] + self._cut_back[parent.start])
                push(
                    _OpenCut(
                        stop, counts, stages, bound, tail, self._next_stages(stop, counts, tail)
                    ),
                    0,
                )

    def _devices(self, stages: tuple[tuple[int, int], ...]) -> list[int]:
        """Return, by layer, its device, from the end and the class of each stage."""
        unused = [iter(members) for members in self.classes]
        devices: list[int] = []
        for stop, kind in stages:
            devices += [next(unused[kind])] * (stop - len(devices))
        return self.nodes.spread(devices)

    def _next_stages(self, start: int, counts: Counts, tail: float | None) -> _Options:
        """Return the options for the next stage, the lowest bound first; dead ends are left out.

        Args:
            start: where it begins.
            counts: by class, the devices that are left.
            tail: what is known to come on top of the time until the first stage has its last
                gradients; None if the next is the first.
        """
        rows = []
        for kind in optimal_cuts.kinds_left(counts):
            # `best` bounds the stages behind, so the bound of an open cut covers its whole
            # completion, as in A* search.
            later = self.best[optimal_cuts.one_less(counts, kind)]
            row = np.maximum(self.cost(kind, sum(counts))[start], later)
            trips = self._trips(counts, kind, start) + (
                self._tail(kind) if tail is None else tail
            ) * (1 - ROUNDING)
            row = np.maximum(row, trips)
            stops = np.flatnonzero(np.isfinite(row)).astype(np.int16)
            rows.append((row[stops], stops, np.full(len(stops), kind, dtype=np.int16)))
        bounds, stops, kinds = (np.concatenate(column) for column in zip(*rows, strict=True))
        order = np.lexsort((kinds, stops, bounds))
        return _Options(bounds[order], stops[order], kinds[order])


class _Options(NamedTuple):
    """What the next stage may be, by bound; in arrays, as there are many of them.

    Attributes:
        bounds: of cuts with it.
        stops: its end.
        kinds: the class of its device.
    """

    bounds: Table
    stops: NDArray[np.int16]
    kinds: NDArray[np.int16]


@dataclass(frozen=True)
class _OpenCut:
    """The first stages of cuts.

    Attributes:
        start: where the next stage begins.
        counts: by class, the devices that are left, all of which are used.
        stages: the end and the class of each decided stage.
        bound: the largest bound of these stages.
        tail: the first stage's time after its last gradients, and transfers at cuts before
            the last; None without a stage.
        options: for the next stage, by bound.
    """

    start: int
    counts: Counts
    stages: tuple[tuple[int, int], ...]
    bound: float
    tail: float | None
    options: _Options


def table(problem: Problem, nodes: Reduction, bottleneck: Problem) -> StepTable | None:
    """Return the table of a row of stages, or None without a row or with too many kinds of devices.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        bottleneck: the same question with objective ``throughput``.
    """
    classes, exactly = optimal_cuts.device_classes(problem)
    if (
        not exactly
        or not problem.contiguous
        or not all(nodes.allowed)
        or not is_row(problem, nodes)
    ):
        return None
    found = StepTable(problem, nodes, bottleneck, classes)
    return found if found.intervals.exact else None


Arcs = Sequence[tuple[int, int]]


def _any_steady_state(
    problem: Problem,
    nodes: Reduction,
    awaited_ms: Sequence[Sequence[float]],
    over: Callable[[], bool] = lambda: False,
) -> float:
    """Return a lower bound on every steady-state step, in milliseconds.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        awaited_ms: by layer and device, what others wait for of a backward pass.
        over: asked before the longer parts of this.
    """
    shared = [
        (least_work(problem, nodes, partial(_work_ms, problem, slot)) - slot.less_ms, slot)
        for slot in slot_bounds(problem)
    ]
    work_ms, slot = max(shared, key=itemgetter(0))
    least = max(work_ms, _way_and_back(problem, awaited_ms))
    if over():
        return least
    return fill_bound.filling_of_steady_state(problem, nodes, awaited_ms, slot, least)


def _work_ms(problem: Problem, slot: SlotBound, layer: int, device: int) -> float:
    """Return the time that a layer keeps a device busy in a step."""
    passes_ms = problem.request.chunks * problem.compute_ms(layer, device)
    return passes_ms + slot.layer_ms(layer, device)


def _way_and_back(problem: Problem, awaited_ms: Sequence[Sequence[float]]) -> float:
    """Return the longest way to a layer, through it with all micro-batches, and back."""
    forward, awaited = fastest_ms(problem, problem.forward_ms), fastest_ms(problem, awaited_ms)
    there, back = arcs_of(problem.values), gradient_arcs(problem.values)
    read = {reader for _, reader in there}
    starts = [layer for layer in range(len(problem.layers)) if layer not in read]
    #     way to l    F F F .. F  B .. B   way back     n micro-batches pass through l one by one;
    #                 |-- n passes ------|              the ways above already contain one of them
    further = [
        (problem.request.chunks - 1) * (one + other)
        for one, other in zip(forward, awaited, strict=True)
    ]
    ways = [
        zip(_ways_from(s, forward, there), _ways_from(s, awaited, back), further, strict=True)
        for s in starts
    ]
    return max(sum(way) for by_layer in ways for way in by_layer)


def _ways_from(start: int, time_ms: Sequence[float], arcs: Arcs) -> list[float]:
    """Return, by layer, the longest path to it from one layer, both included.

    Every arc runs with the layers' order.
    """
    way = [-inf] * len(time_ms)
    way[start] = time_ms[start]
    for source, reader in sorted(arcs):
        way[reader] = max(way[reader], way[source] + time_ms[reader])
    return way
