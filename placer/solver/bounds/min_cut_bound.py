"""Bounds from minimum cuts: layers that keep any device busy, wherever they are.

The device of node v holds some set S of nodes with v in it. Its load is at least::

    least(v) = min over S with v in S of
               (sum of work(n) over n in S
                + sum of transfer(e) over nets e with a pin in S and a pin outside)

This is a minimum cut between v and a sink. The bottleneck is at least the largest least(v), for
free and for contiguous placements and for any number of devices::

    v ──transfer(e)── u      a net of two pins is an edge; a net of more pins is an arc
    │                 │      that every pin feeds and that feeds every pin
  work(v)          work(u)
    └────▶ sink ◀─────┘

Source: Lawler, "Cutsets and partitions of hypergraphs", 1973.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import floor, inf

from ortools.graph.python import max_flow

from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.solver.values import Value

STEPS = 2**40
"""Integer steps of all nodes' work together: max-flow needs integers, and 2**40 keeps 12 digits."""

ENDLESS = 4 * STEPS

MOST_PINS = 20_000
"""Pins of all nets above which minimum cuts would take longer than a second."""

Pins = tuple[int, ...]


def cut_bound(problem: Problem, nodes: Reduction) -> float:
    """Return a lower bound on the bottleneck from the node whose device has most load, in ms.

    A node that may be on a device that pays for no transfer counts with its work alone, if that is
    less. The result is 0 where no bound is known.

    Args:
        problem: the placement problem, by objective ``throughput``.
        nodes: its layers, joined where they must be together.
    """
    # With overlapped transfers, compute and transfers do not add up, so a cut says nothing about
    # the load.
    nets = nets_by_pins(problem, nodes)
    if problem.request.transfers != "added" or not nets or sum(map(len, nets)) > MOST_PINS:
        return 0.0
    work = [least_ms(problem, nodes, node) for node in range(len(nodes.nodes))]
    alone = [alone_ms(problem, nodes, node) for node in range(len(nodes.nodes))]
    if not sum(time for time in work if time < inf):
        return 0.0
    # A device that holds only v is one of the candidate sets, so its load is an upper limit of
    # least(v). Nodes with a high limit come first: they raise `best`, and then most nodes need no
    # cut.
    most = [min(time, other) for time, other in zip(_isolated(work, nets), alone, strict=True)]
    best, cutter = 0.0, Cutter(work, nets)
    for node in sorted(range(len(work)), key=lambda node: -most[node]):
        if most[node] <= best:
            continue
        value, members = cutter.least([node])
        best = max(best, min(value, alone[node]))
        # The set found for this node contains `member` too, so it is a candidate set for `member`.
        for member in members:
            most[member] = min(most[member], value)
    return best


def _isolated(work: list[float], nets: dict[Pins, float]) -> list[float]:
    """Return, by node, the load of a device that holds it alone."""
    load = list(work)
    for pins, time_ms in nets.items():
        for node in pins:
            load[node] += time_ms
    return load


def nets_by_pins(problem: Problem, nodes: Reduction) -> dict[Pins, float]:
    """Return, by pins, what a net that is cut costs every device that it touches, at the least."""

    def both(value: Value) -> float:
        back = problem.quickest_ms(value.gradient_bytes) if value.gradient_bytes else 0.0
        return problem.quickest_ms(value.bytes) + back

    # Values with the same pins are cut together, so their times add up in one net.
    nets: dict[Pins, float] = defaultdict(float)
    for value in problem.values:
        pins = tuple(sorted(nodes.holding((value.source, *value.readers))))
        if len(pins) > 1:
            nets[pins] += both(value)
    return {pins: time_ms for pins, time_ms in nets.items() if time_ms > 0}


def least_ms(problem: Problem, nodes: Reduction, node: int) -> float:
    """Return the work of a node on the fastest device that pays for transfers."""
    devices = [device for device in range(len(problem.devices)) if device not in problem.untaxed]
    return min((problem.work_ms(nodes.nodes[node], device) for device in devices), default=inf)


def alone_ms(problem: Problem, nodes: Reduction, node: int) -> float:
    """Return the work of a node on the fastest device that pays for nothing.

    Infinite if it may be on none.
    """
    devices = problem.untaxed & nodes.allowed[node]
    return min((problem.work_ms(nodes.nodes[node], device) for device in devices), default=inf)


class Cutter:
    """Minimum cuts in one network.

    Nodes, two vertices for each net of many pins, an origin and the sink.

    Args:
        work: by node, its compute in milliseconds; some of it is finite and more than 0.
        nets: by pins, what a net costs where it is cut, in milliseconds.
    """

    def __init__(self, work: list[float], nets: dict[Pins, float]) -> None:
        self._count, self._steps_per_ms = (
            len(work),
            STEPS / sum(time for time in work if time < inf),
        )
        self._flow = max_flow.SimpleMaxFlow()
        self._sink = len(work)
        self._work = [self._steps(time_ms) for time_ms in work]
        for node, steps in enumerate(self._work):
            self._arc(node, self._sink, steps)  # arc number ``node``
        self._origin = self._sink + 1
        for node in range(self._count):
            self._arc(self._origin, node, 0)  # arc number ``count + node``
        vertex = self._origin + 1
        for pins, time_ms in nets.items():
            steps = self._steps(time_ms)
            if len(pins) == 2:
                self._arc(pins[0], pins[1], steps)
                self._arc(pins[1], pins[0], steps)
                continue
            # A net of many pins (Lawler 1973). Cutting the middle arc costs the transfer once,
            # whatever the number of pins on each side:
            #    pin a ─┐                          ┌─▶ pin a
            #    pin b ─┼─▶ vertex ──steps──▶ +1 ──┼─▶ pin b       all other arcs are endless
            #    pin c ─┘                          └─▶ pin c
            self._arc(vertex, vertex + 1, steps)
            for pin in pins:
                self._arc(pin, vertex, ENDLESS)
                self._arc(vertex + 1, pin, ENDLESS)
            vertex += 2

    def _steps(self, time_ms: float) -> int:
        # Rounding down keeps the cut a lower bound. A node that no taxed device may hold has
        # infinite work, which is capped at the steps of all other nodes together.
        return floor(min(time_ms * self._steps_per_ms, STEPS))

    def _arc(self, tail: int, head: int, capacity: int) -> None:
        self._flow.add_arc_with_capacity(tail, head, capacity)

    @contextmanager
    def without(self, outside: Sequence[int]) -> Iterator[None]:
        """Exclude these nodes from every set while the context is open."""
        for node in outside:
            # An endless arc to the sink makes it too expensive to keep the node on the source side.
            self._flow.set_arc_capacity(node, ENDLESS)
        yield
        for node in outside:
            self._flow.set_arc_capacity(node, self._work[node])

    def least(self, inside: Sequence[int], outside: Sequence[int] = ()) -> tuple[float, list[int]]:
        """Return the least load in ms of a device with some nodes, without others; and its set."""
        for node in inside:
            # The network is built once. Each query only opens the arcs from the origin to its
            # nodes.
            self._flow.set_arc_capacity(self._count + node, ENDLESS)
        with self.without(outside):
            status = self._flow.solve(self._origin, self._sink)
        for node in inside:
            self._flow.set_arc_capacity(self._count + node, 0)
        assert status == self._flow.OPTIMAL
        members = [other for other in self._flow.get_source_side_min_cut() if other < self._count]
        return self._flow.optimal_flow() / self._steps_per_ms * (1 - 1e-12), members
