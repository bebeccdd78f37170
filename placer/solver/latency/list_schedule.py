"""List schedules: one block of layers after another goes to the device that finishes it first.

Blocks are nodes, chains of them without a branch, or connected parts. They come in the profile's
order, in which devices run them, or by the longest path to the end. Times and waits include both
passes::

    device 0   a a a a │ c c c │ e e     d reads b: on device 1 it may begin when the device is
    device 1   · · b b │ d d             free, on device 0 not before c is done and b's value is
                                         there

Contiguous schedules leave out devices that would wait for each other.

Source: Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for
heterogeneous computing", 2002 (HEFT, without insertion); Graham, "Bounds on multiprocessing timing
anomalies", 1969 (LPT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf

from placer.solver.bounds.simple_bounds import longest_paths
from placer.solver.components import closed_groups, topological_order
from placer.solver.free.device_capacity import DeviceCapacity
from placer.solver.latency.makespan import LinkTimes
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, joined
from placer.solver.values import Value


def list_schedules(problem: Problem, nodes: Reduction) -> Iterator[list[int]]:
    """Return, by layer, its device, of some list schedules, which may break requirements.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
    """
    capacity = DeviceCapacity(problem, nodes)
    for blocks in partitions(problem, nodes):
        listing = _Listing(problem, nodes, blocks, capacity)
        for order in (range(len(blocks.nodes)), listing.longest_way_first()):
            devices = listing.schedule(order)
            if devices is not None:
                layers = blocks.spread(devices)
                yield layers
                # the next list is scheduled with the memory that these devices need
                capacity.holds([layers[members[0]] for members in nodes.nodes])


def partitions(problem: Problem, nodes: Reduction) -> Iterator[Reduction]:
    """Return the layers in blocks: nodes, rows of them, and what hangs together.

    Each partition once.
    """
    yield nodes
    # whole models of a joint profile hang together; their order is no reason to be on one device
    arcs = nodes.arcs(
        (value.source, reader)
        for value in problem.values
        if value.repeats
        for reader in value.readers
    )
    readers = Counter(source for source, _ in arcs)
    sources = Counter(reader for _, reader in arcs)
    fewest = len(nodes.nodes)
    for pairs in ({arc for arc in arcs if readers[arc[0]] == sources[arc[1]] == 1}, arcs):
        together = [(nodes.nodes[one][0], nodes.nodes[other][0]) for one, other in sorted(pairs)]
        blocks = joined(problem, closed_groups([*nodes.nodes, *together]))
        if 1 < len(blocks.nodes) < fewest and all(blocks.allowed):
            fewest = len(blocks.nodes)
            yield blocks


class _Listing:
    """Blocks with what they take and wait for.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        blocks: nodes that go together.
        capacity: of the devices, for nodes.
    """

    def __init__(
        self, problem: Problem, nodes: Reduction, blocks: Reduction, capacity: DeviceCapacity
    ) -> None:
        self._problem, self._blocks, self._capacity = problem, blocks, capacity
        self._link_times = LinkTimes.from_problem(problem)
        devices = range(len(problem.devices))
        self._work_ms = [[problem.work_ms(layers, d) for d in devices] for layers in blocks.nodes]
        self._size_bytes = [0] * len(blocks.nodes)
        for layers, size in zip(nodes.nodes, capacity.size_bytes, strict=True):
            self._size_bytes[blocks.node_of[layers[0]]] += size
        self._able = [sorted(devices) for devices in blocks.allowed]
        self._inputs: list[list[tuple[int, Value]]] = [[] for _ in blocks.nodes]
        for value in problem.values:
            source = blocks.node_of[value.source]
            for reader in sorted(blocks.holding(value.readers) - {source}):
                self._inputs[reader].append((source, value))

    def longest_way_first(self) -> list[int]:
        """Return the blocks by their longest path to the end, in topological order if possible."""
        work = [
            sum(row[d] for d in able) / len(able)
            for row, able in zip(self._work_ms, self._blocks.allowed, strict=True)
        ]
        arcs = [
            (source, block)
            for block, inputs in enumerate(self._inputs)
            for source, *_ in inputs
            if source < block
        ]
        # Blocks with a long path behind them come first (as upward rank in HEFT): they delay the
        # end most.
        paths = longest_paths(
            range(len(work) - 1, -1, -1), work, [(block, source) for source, block in arcs]
        )
        return topological_order(len(work), arcs, [-way for way in paths])

    def schedule(self, order: Sequence[int]) -> list[int] | None:
        """Return, by block, the device on which it is done first; None if some block fits nowhere.

        Args:
            order: of the blocks.
        """
        place = [-1] * len(order)
        free, done = [0.0] * len(self._problem.devices), [0.0] * len(order)
        held = _Held(self._problem, self._capacity)
        for block in order:
            inputs = [
                (place[source], done[source], value)
                for source, value in self._inputs[block]
                if place[source] >= 0
            ]
            sources = {at for at, *_ in inputs}
            size, count = self._size_bytes[block], len(self._blocks.nodes[block])
            end, chosen = inf, -1
            for device in self._able[block]:
                if held.takes(device, sources, size, count):
                    start = max(free[device], self._there_ms(device, inputs))
                    if start + self._work_ms[block][device] < end:
                        end, chosen = start + self._work_ms[block][device], device
            if chosen < 0:
                return None
            place[block], done[block], free[chosen] = chosen, end, end
            held.take(chosen, sources, size, count)
        return place

    def _there_ms(self, device: int, inputs: Sequence[tuple[int, float, Value]]) -> float:
        """Return when values are on a device, from their devices and finish times."""
        times = self._link_times
        last = 0.0
        for at, done, value in inputs:
            if at != device:
                done += times.ms(at, device, value.bytes, value.repeats)
                if value.gradient_bytes:
                    done += times.ms(device, at, value.gradient_bytes)
            if done > last:
                last = done
        return last


class _Held:
    """What devices hold while a list is scheduled.

    Args:
        problem: the placement problem.
        capacity: of the devices.
    """

    def __init__(self, problem: Problem, capacity: DeviceCapacity) -> None:
        self._problem, self._capacity = problem, capacity
        self._bytes, self._layers = [0] * len(problem.devices), [0] * len(problem.devices)
        self._used: set[int] = set()
        self._waiting: list[set[int]] = [set() for _ in problem.devices]
        """By device, those that wait for it, directly or not, where they must not wait for each
        other."""

    def takes(self, device: int, sources: set[int], size_bytes: int, layers: int) -> bool:
        """Return whether a device may take a block that reads from these devices."""
        problem, capacity = self._problem, self._capacity
        return (
            (device in self._used or len(self._used) < problem.most_devices)
            and (
                problem.most_layers is None or self._layers[device] + layers <= problem.most_layers
            )
            and (
                not capacity.limited
                or self._bytes[device] + size_bytes <= capacity.capacity_bytes(device)
            )
            and not (problem.contiguous and sources & self._waiting[device])
        )

    def take(self, device: int, sources: set[int], size_bytes: int, layers: int) -> None:
        """Add the block to a device."""
        self._used.add(device)
        self._bytes[device] += size_bytes
        self._layers[device] += layers
        if self._problem.contiguous and sources - {device}:
            # Waiting is transitive: whoever waits for `device` now also waits for the devices of
            # the inputs.
            #     source device ──▶ device ──▶ devices that wait for it
            behind = {device, *self._waiting[device]}
            for other, waiting in enumerate(self._waiting):
                if other in sources or sources & waiting:
                    waiting |= behind - {other}
