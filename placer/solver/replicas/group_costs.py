r"""The costs of stages that each have a number of replicas of their own.

A *unit* is a micro-batch of a measured size. A micro-batch has as many units as the least common
multiple of the numbers of replicas, U. The m replicas of a stage compute U / m units each, one
after another, so a stage with more replicas has shorter passes. Three replicas, then one::

    U = 3            d0  unit 0 ─┐
                     d1  unit 1 ─┼─▶  d3  units 0, 1, 2
                     d2  unit 2 ─┘

Units are numbered from 0, and replica i computes the consecutive units i U / m, ..., so at the
border between stages s and t::

    sender(u) = floor(u * m(s) / U)        receiver(u) = floor(u * m(t) / U)

**Transfers.** A value crosses a border in one message for each unit, over the link from
``sender(u)`` to ``receiver(u)``; its gradient comes back likewise. A device sends its messages one
after another, and receives them one after another, so a value takes as long as the busiest device
at either end::

    t(v) = max over devices i at either end of
           sum over units u with i = sender(u) or i = receiver(u) of
           latency(sender(u), receiver(u)) + bytes(v) / rate(sender(u), receiver(u))

**Passes** of a stage with m replicas, from the measured times of a unit::

    forward = U / m * sum of forward(l)        backward, weight gradients: likewise

**Gradients** of a stage are exchanged among its own replicas once per step, by the formulas of
``replication.py`` and ``gradient_exchange.py`` with R = m. The gradients of a piece are complete
within the pass of the last unit; parameters are needed within the pass of the first unit. The
optimizer takes 1 / m of its time. A stage with one replica exchanges nothing.

**Memory** of a replica, by the formulas of ``memory.py``, with R = m and U / m times as many
micro-batches (units) in flight. Units of a micro-batch share the memory of one backward pass. Under
zero-bubble, each unit has memory of its own for what it leaves to the weight-gradient pass.

**Objectives.** ``step``: the pipeline of these stages, passes and transfers, as for stages without
replicas. ``throughput``: with N units in a batch, the largest load of a device for a micro-batch,
with its part U / N of the exchange, divided by U::

    load(d) = U / m * (compute + sends + receives of a unit)  +  exchange(d) * U / N

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1 (stages with numbers of replicas of their own).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, lcm
from typing import NamedTuple

from placer.schedule import Pipeline, Plan, Transfer
from placer.schema import Link, MemoryUse
from placer.solver import costs, pipelines
from placer.solver.memory import Footprint, footprint, held_with
from placer.solver.problem import Problem
from placer.solver.replicas import gradient_exchange
from placer.solver.replicas.gradient_exchange import Exchange
from placer.solver.replicas.replication import Links, Replication, replication, shared_profile

Messages = Sequence[tuple[tuple[int, int], int]]
"""Pairs of a sender and a receiver, with the number of units that pass between them."""


class Group(NamedTuple):
    """A stage and its replicas.

    Attributes:
        layers: of the stage, ascending.
        devices: of its replicas, as indices in the cluster.
    """

    layers: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class GroupCosts:
    """The costs of groups; times in milliseconds.

    Attributes:
        value: the objective.
        pipeline: the stages with their passes, transfers, and times between two steps.
        plan: the order of passes.
        exchanges: by stage.
        in_flight: by stage, micro-batches in flight.
        memory: by stage, of each of its devices.
        recompute: the stages that recompute.
        compute_ms: by device of a group, its passes for a micro-batch.
        send_ms: by device of a group.
        receive_ms: by device of a group.
        load_ms: by device of a group, the three as the request joins them.
    """

    value: float
    pipeline: Pipeline | None
    plan: Plan | None
    exchanges: tuple[Exchange, ...]
    in_flight: tuple[int, ...]
    memory: tuple[MemoryUse, ...]
    recompute: frozenset[int]
    compute_ms: dict[int, float]
    send_ms: dict[int, float]
    receive_ms: dict[int, float]
    load_ms: dict[int, float]


@dataclass(frozen=True)
class _UnitFootprint(Footprint):
    """The memory of a device whose micro-batches consist of units.

    Attributes:
        units: of a micro-batch, on this device.
        weights_apart: whether weight-gradient passes run apart.
    """

    units: int = 1
    weights_apart: bool = False

    def use(self, flight: int, again: bool = False, backwards: int = 1) -> MemoryUse:
        """Return all of it, by kind; micro-batches in flight count all of their units."""
        unit = Footprint(self.one, self.kept_bytes, self.entering_bytes, self.recorded)
        scale = self.units if self.weights_apart else 1
        return unit.use(flight * self.units, again, backwards * scale)

    def total_bytes(self, flight: int, again: bool = False, backwards: int = 1) -> int:
        """Return all of it."""
        return self.use(flight, again, backwards).total_bytes


@dataclass(frozen=True)
class GroupModel:
    """The costs of groups with one measured size, schedule and number of micro-batches.

    Attributes:
        problem: of a unit on all devices, with the batch's micro-batches of ``units`` as chunks.
        units: of a micro-batch.
        cluster: the links by the names of both ends.
    """

    problem: Problem
    units: int
    cluster: Links
    _known: dict[tuple[int, ...], Replication | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _footprints: dict[tuple[tuple[int, ...], int], Footprint] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _problems: dict[int, Problem] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _known_tails: dict[tuple[tuple[int, ...], bool], list[tuple[float, int]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def evaluate(self, groups: Sequence[Group], below: float) -> GroupCosts | None:
        """Return the costs of groups that fit, or None if they do not or are not below a value.

        Args:
            groups: in pipeline order.
            below: the objective that is of interest.
        """
        found = self.costs(groups, below)
        return found if found is not None and self._fits(groups, found.memory) else None

    def costs(self, groups: Sequence[Group], below: float = inf) -> GroupCosts | None:
        """Return the costs of groups, whatever memory they need.

        The result is None if a link is missing, or the objective is not below a value.

        Args:
            groups: in pipeline order.
            below: the objective that is of interest.
        """
        problem = self.problem
        firsts = [group.devices[0] for group in groups]
        exchanged = [self.replication_of(group.devices) for group in groups]
        if any(one is None for one in exchanged):
            return None
        group_of = dict(zip(firsts, groups, strict=True))

        def footprint_of(device: int) -> Footprint:
            return self._footprint(group_of[device])

        repeated = costs.recomputed(problem, footprint_of, firsts)
        again = frozenset(stage for stage, device in enumerate(firsts) if device in repeated)
        rooms = costs.rooms_of(problem, firsts, footprint_of, repeated)
        if problem.request.objective == "throughput":
            return self._throughput(groups, again, rooms, exchanged, below)
        return self._step(groups, again, rooms, exchanged, below)

    def replication_of(self, devices: Sequence[int]) -> Replication | None:
        """Return what some devices exchange: nothing if one alone, None without a link."""
        key = tuple(devices)
        if key not in self._known:
            members = [self.problem.devices[device] for device in devices]
            self._known[key] = (
                replication([members], self.cluster) if len(members) > 1 else NO_REPLICATION
            )
        return self._known[key]

    def _units_of(self, group: Group) -> int:
        return self.units // len(group.devices)

    def _footprint(self, group: Group) -> Footprint:
        """Return the memory of each device of a group."""
        key = group.layers, len(group.devices)
        if key not in self._footprints:
            problem = self._problem_of(len(group.devices))
            one = footprint(problem, held_with(problem, group.layers))
            self._footprints[key] = _UnitFootprint(
                one.one,
                one.kept_bytes,
                one.entering_bytes,
                one.recorded,
                self._units_of(group),
                problem.weights_apart,
            )
        return self._footprints[key]

    def _problem_of(self, replicas: int) -> Problem:
        """Return the problem of one of so many replicas, which has its part of the optimizer."""
        if replicas not in self._problems:
            profile = shared_profile(self.problem.request.profile, replicas)
            self._problems[replicas] = replace(
                self.problem,
                request=self.problem.request.model_copy(update={"profile": profile}),
                layers=profile.layers,
                replication=Replication(replicas, (), ()) if replicas > 1 else None,
            )
        return self._problems[replicas]

    # Objective ``step``

    def _step(
        self,
        groups: Sequence[Group],
        again: frozenset[int],
        rooms: tuple[int, ...],
        exchanged: Sequence[Replication | None],
        below: float,
    ) -> GroupCosts | None:
        problem = self.problem
        pipeline = self._pipeline(groups, again)
        if pipeline is None:
            return None
        plan = pipelines.plan_of(problem, pipeline, room=rooms if problem.weights_apart else None)
        exchanges = self._exchanges(groups, exchanged, pipeline, plan)
        slots = tuple(one.slot_ms for one in exchanges)
        pipeline = replace(pipeline, optimizer_ms=slots)
        value = pipelines.step_ms(problem, pipeline, plan)
        if not value < below:
            return None
        memory = self._memory(groups, again, plan.in_flight)
        compute, send, receive = self._loads(groups, again)
        return GroupCosts(
            value,
            pipeline,
            plan,
            exchanges,
            plan.in_flight,
            memory,
            again,
            compute,
            send,
            receive,
            self._joined(compute, send, receive),
        )

    def _memory(
        self, groups: Sequence[Group], again: frozenset[int], rooms: Sequence[int]
    ) -> tuple[MemoryUse, ...]:
        """Return the memory of each stage's devices."""
        found = []
        for stage, (group, room) in enumerate(zip(groups, rooms, strict=True)):
            backwards = costs.backwards_of(self.problem, len(groups), stage, room)
            found.append(self._footprint(group).use(room, stage in again, backwards))
        return tuple(found)

    def _fits(self, groups: Sequence[Group], memory: Sequence[MemoryUse]) -> bool:
        """Return whether the devices of each stage have its memory."""
        limits = [self.problem.devices[group.devices[0]].usable_bytes for group in groups]
        return all(use.total_bytes <= limit for use, limit in zip(memory, limits, strict=True))

    def _pipeline(self, groups: Sequence[Group], again: frozenset[int]) -> Pipeline | None:
        """Return the stages without their exchange, or None if a value has no link."""
        problem = self.problem
        forward, backward, weights, optimizer = ([0.0] * len(groups) for _ in range(4))
        for stage, group in enumerate(groups):
            device, units = group.devices[0], self._units_of(group)
            for layer in group.layers:
                forward[stage] += units * problem.forward_ms[layer][device]
                backward[stage] += units * problem.backward_ms[layer][device]
                if stage in again:
                    backward[stage] += units * problem.again_ms(layer, device)
                weights[stage] += units * pipelines.weight_grad_ms(problem, layer, device)
                optimizer[stage] += pipelines.optimizer_ms(problem, layer, device) / len(
                    group.devices
                )
        transfers = self._transfers(groups)
        if transfers is None:
            return None
        return Pipeline(
            tuple(range(len(groups))),
            tuple(forward),
            tuple(backward),
            tuple(weights),
            transfers,
            tuple(optimizer),
        )

    def _crossings(self, groups: Sequence[Group]) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Return, by pair of stages, the bytes of each value that crosses, and of its gradient."""
        stage_of = {layer: stage for stage, group in enumerate(groups) for layer in group.layers}
        found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for value in self.problem.values:
            source = stage_of[value.source]
            for target in {stage_of[reader] for reader in value.readers} - {source}:
                found[source, target].append((value.bytes, value.gradient_bytes))
        return found

    def _transfers(self, groups: Sequence[Group]) -> tuple[Transfer, ...] | None:
        transfers = []
        for (source, target), sizes in sorted(self._crossings(groups).items()):
            there = messages(groups[source].devices, groups[target].devices, self.units)
            back = [((receiver, sender), count) for (sender, receiver), count in there]
            if not self._linked(there) or (
                any(size for _, size in sizes) and not self._linked(back)
            ):
                return None
            values_ms = sum(self._slowest_end_ms(there, size) for size, _ in sizes)
            gradients = [size for _, size in sizes if size]
            gradients_ms = sum(self._slowest_end_ms(back, size) for size in gradients)
            transfers.append(
                Transfer(source, target, values_ms, gradients_ms if gradients else None)
            )
        return tuple(transfers)

    def _link(self, sender: int, receiver: int) -> Link | None:
        return self.problem.links[sender][receiver]

    def _linked(self, found: Messages) -> bool:
        return all(self._link(*ends) is not None for ends, _ in found)

    def _slowest_end_ms(self, found: Messages, size_bytes: int) -> float:
        """Return how long the busiest device sends or receives a value of so many bytes a unit."""
        busy: dict[tuple[bool, int], float] = defaultdict(float)
        for (sender, receiver), count in found:
            link = self._link(sender, receiver)
            assert link is not None
            time_ms = count * link.transfer_ms(size_bytes)
            busy[True, sender] += time_ms
            busy[False, receiver] += time_ms
        return max(busy.values())

    def _exchanges(
        self,
        groups: Sequence[Group],
        exchanged: Sequence[Replication | None],
        pipeline: Pipeline,
        plan: Plan,
    ) -> tuple[Exchange, ...]:
        """Return the exchange of each stage."""
        problem = self.problem
        busy, ended = gradient_exchange.passes_of_step(pipeline, plan)
        found = []
        for stage, (group, costs_of) in enumerate(zip(groups, exchanged, strict=True)):
            optimizer_ms = pipeline.optimizer_ms[stage]
            if costs_of is None or costs_of.replicas == 1:
                found.append(Exchange(0.0, 0.0, 0.0, 0.0, optimizer_ms))
                continue
            tails = self._tails(group, plan.split)
            ready = [(ended[stage] - tail_ms, size) for tail_ms, size in tails]
            found.append(
                Exchange(
                    *gradient_exchange.reduced(ready, costs_of.reduce[0], busy[stage]),
                    *gradient_exchange.gathered(
                        problem, [group.layers], group.devices[0], costs_of.gather[0]
                    ),
                    optimizer_ms,
                )
            )
        return tuple(found)

    def _tails(self, group: Group, split: bool) -> list[tuple[float, int]]:
        """Return what follows each piece of a stage in its last pass, and the piece's bytes."""
        key = group.layers, split
        if key not in self._known_tails:
            self._known_tails[key] = gradient_exchange.piece_tails(
                self.problem, group.layers, group.devices[0], split
            )
        return self._known_tails[key]

    # Loads

    def _loads(
        self, groups: Sequence[Group], again: frozenset[int]
    ) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """Return what each device computes, sends and receives for a micro-batch."""
        problem = self.problem
        compute: dict[int, float] = {}
        for stage, group in enumerate(groups):
            device = group.devices[0]
            own = problem.work_ms(group.layers, device)
            if stage in again:
                own += sum(problem.again_ms(layer, device) for layer in group.layers)
            compute |= dict.fromkeys(group.devices, self._units_of(group) * own)
        send, receive = dict.fromkeys(compute, 0.0), dict.fromkeys(compute, 0.0)
        for (source, target), sizes in self._crossings(groups).items():
            there = messages(groups[source].devices, groups[target].devices, self.units)
            for (sender, receiver), count in there:
                for size, gradient in sizes:
                    self._add(send, receive, (sender, receiver), count, size)
                    if gradient:
                        self._add(send, receive, (receiver, sender), count, gradient)
        return compute, send, receive

    def _add(
        self,
        send: dict[int, float],
        receive: dict[int, float],
        ends: tuple[int, int],
        count: int,
        size_bytes: int,
    ) -> None:
        """Add some messages to the times of both ends."""
        link = self._link(*ends)
        time_ms = 0.0 if link is None else count * link.transfer_ms(size_bytes)
        send[ends[0]] += time_ms
        receive[ends[1]] += time_ms

    def _joined(
        self, compute: dict[int, float], send: dict[int, float], receive: dict[int, float]
    ) -> dict[int, float]:
        is_overlapped = self.problem.request.transfers == "overlapped"
        return {
            device: max(own, send[device], receive[device])
            if is_overlapped
            else own + send[device] + receive[device]
            for device, own in compute.items()
        }

    # Objective ``throughput``

    def _throughput(
        self,
        groups: Sequence[Group],
        again: frozenset[int],
        rooms: tuple[int, ...],
        exchanged: Sequence[Replication | None],
        below: float,
    ) -> GroupCosts | None:
        problem, chunks = self.problem, self.problem.request.chunks
        if self._transfers(groups) is None:
            return None
        compute, send, receive = self._loads(groups, again)
        for group, costs_of in zip(groups, exchanged, strict=True):
            if costs_of is not None and costs_of.replicas > 1:
                # Gradients are exchanged once in a batch, and a micro-batch pays its share.
                size = sum(problem.layers[layer].grad_bytes for layer in group.layers)
                for device in group.devices:
                    compute[device] += size * costs_of.byte_ms(0) / chunks
        load = self._joined(compute, send, receive)
        value = max(load.values()) / self.units
        if not value < below:
            return None
        memory = self._memory(groups, again, rooms)
        return GroupCosts(value, None, None, (), rooms, memory, again, compute, send, receive, load)


def messages(senders: Sequence[int], receivers: Sequence[int], units: int) -> Messages:
    """Return how many units pass from each replica of a stage to each replica of another.

    Args:
        senders: the devices of the stage that makes a value.
        receivers: the devices of the stage that reads it.
        units: of a micro-batch; each stage shares them evenly.
    """
    found = Counter(
        (senders[unit * len(senders) // units], receivers[unit * len(receivers) // units])
        for unit in range(units)
    )
    return sorted(found.items())


def units_of(counts: Sequence[int]) -> int:
    """Return the units of a micro-batch of stages with so many replicas."""
    return lcm(*counts)


NO_REPLICATION = Replication(1, (), ())
"""The exchange of a stage with one replica."""
