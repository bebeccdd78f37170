"""The referee's own computation of a step: passes and transfers are events on a longest path.

The order of passes comes from ``placer.schedule``: it is data that execution follows too. Otherwise
the referee shares nothing with the solver, and implements the formulas in the docstrings of
``costs.py`` and ``placer.schedule`` a second time.

**A steady-state step** is the longest cycle of events. Events wait for others of their step, and
for some of the step before. A chain of events, each of which waits for the next, that returns to
its start after k steps delays each step by a k-th of its time. The longest such mean is the time of
a step. It is found by improvement. From the mean of some chain, longest paths are followed, where
each step forward costs the mean. If paths grow without limit, they go round a longer chain, whose
mean is the next. If they do not, there is no longer chain.

Source: Lawler, "Combinatorial Optimization: Networks and Matroids", 1976, section 3.13.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from graphlib import TopologicalSorter
from math import inf
from typing import Any

from placer.schedule import Pipeline, Plan, Transfer, plan, roomy_plans, steady_state_ms, step_ms
from placer.schema import Edge, Layer, Placement, PlacementRequest
from placer.solver.referee import recompute
from placer.solver.referee.claims import equal, near, require

Event = tuple[Any, ...]
Waits = Mapping[Event, Set[Event]]

ROUNDING = 1e-12
"""Relative increase, of all work of a step, from which a path counts as longer."""


def longest_mean(waits: Waits, carried: Waits, duration: Callable[[Event], float]) -> float:
    """Return the longest time per step of all chains that repeat.

    Args:
        waits: by event, the events of the same step that it waits for.
        carried: by event, the events of the step before that it waits for.
        duration: of an event.
    """
    search = _Search(waits, carried, duration)
    mean, longer = 0.0, search.longer_than(0.0)
    while longer is not None and longer > mean:
        mean, longer = longer, search.longer_than(longer)
    return mean


class _Search:
    def __init__(self, waits: Waits, carried: Waits, duration: Callable[[Event], float]) -> None:
        order = list(TopologicalSorter(waits).static_order())
        self._time = {event: duration(event) for event in order}
        self._before = {
            event: [
                *((one, 0) for one in waits.get(event, ())),
                *((one, 1) for one in carried.get(event, ())),
            ]
            for event in order
        }
        self._way = dict.fromkeys(order, 0.0)
        self._least = ROUNDING * sum(self._time.values())

    def longer_than(self, mean: float) -> float | None:
        """Return the mean of a chain with a larger mean, or None without such a chain."""
        predecessors: dict[Event, tuple[Event, int]] = {}
        while self._extend(mean, predecessors):
            found = self._round(predecessors)
            if found is not None:
                return found
        return None

    def _extend(self, mean: float, predecessors: dict[Event, tuple[Event, int]]) -> bool:
        """Extend the paths by a step; return whether any is longer than the known one."""
        longer = False
        for event, before in self._before.items():
            for other, steps in before:
                way = self._way[other] + self._time[other] - steps * mean
                if way > self._way[event] + self._least:
                    self._way[event], predecessors[event] = way, (other, steps)
                    longer = True
        return longer

    def _round(self, predecessors: Mapping[Event, tuple[Event, int]]) -> float | None:
        """Return the mean of a chain that a way goes round."""
        seen: dict[Event, int] = {}
        for number, start in enumerate(predecessors):
            event = start
            while event in predecessors and event not in seen:
                seen[event] = number
                event = predecessors[event][0]
            if seen.get(event) == number and event in predecessors:
                return self._mean(event, predecessors)
        return None

    def _mean(self, start: Event, predecessors: Mapping[Event, tuple[Event, int]]) -> float:
        total, steps, event = 0.0, 0, start
        while True:
            event, passed = predecessors[event]
            total, steps = total + self._time[event], steps + passed
            if event == start:
                return total / steps


Where = Mapping[str, str]
Pair = tuple[int, int]


def chosen(request: PlacementRequest, placement: Placement) -> PlacementRequest | None:
    """Return the question with what the placement chose; None if it may not choose so."""
    for question in choices(request):
        same = (placement.batch_size, placement.chunks, placement.schedule, placement.contiguous)
        if same == (
            question.profile.batch_size,
            question.chunks,
            question.schedule,
            question.constraints.contiguous,
        ):
            return question
    return None


def choices(request: PlacementRequest) -> Iterator[PlacementRequest]:
    """Return the request for every fitting micro-batch size, schedule and kind of placement."""
    whole = request.batch_size or request.chunks * request.profile.batch_size
    contiguous_too = (
        ["1f1b", "zero-bubble", "fill-drain"] if request.is_training else ["fill-drain"]
    )
    kinds = [
        (order, True)
        for order in (contiguous_too if request.schedule == "auto" else [request.schedule])
    ]
    # Several stages of one device do not recompute, so they are no choice if a device must.
    always = any(recompute.must(request, device.name) for device in request.devices)
    if request.is_training and request.schedule in ("auto", "interleaved") and not always:
        kinds += [("interleaved", False)] * (request.constraints.contiguous is not True)
    for profile in (request.profile, *request.profiles):
        if whole % profile.batch_size:
            continue
        for order, contiguous in kinds:
            rules = request.constraints.model_copy(update={"contiguous": contiguous})
            given = {
                "profile": profile,
                "chunks": whole // profile.batch_size,
                "cluster": request.placed_on,
            }
            yield request.model_copy(update=given | {"schedule": order, "constraints": rules})


class StepReading:
    """One placement's step, event by event.

    Args:
        request: the question, with all but the map chosen.
        where: by layer, its device.
        stages: the devices in pipeline order.
        held: for how many micro-batches each stage has room, where the schedule leaves a choice:
            under ``zero-bubble``, and where a device has several stages under ``interleaved``, for
            the order that holds so many. None for the order of ``placer.schedule.plan``.

    Raises:
        PlacementError: no order holds so many.
    """

    def __init__(
        self,
        request: PlacementRequest,
        where: Where,
        stages: Sequence[str],
        held: Sequence[int] | None = None,
    ) -> None:
        self._request, self._where = request, where
        self._types = {device.name: device.type for device in request.devices}
        self._links = {(link.source, link.target): link for link in request.placed_on.links}
        self.stage_of, self._devices = self._stages(stages)
        self._passes = {
            kind: self._sums(kind) for kind in ("forward", "backward", "weights", "optimizer")
        }
        self._values, self._gradients = self._crossings()
        self.plan = self._plan(held)
        self._optimizer_ms: dict[str, float] = defaultdict(float)
        for device, time_ms in zip(self._devices, self._passes["optimizer"], strict=True):
            self._optimizer_ms[device] += time_ms

    def _stages(self, stages: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        if self._request.constraints.contiguous:
            return {layer: stages.index(device) for layer, device in self._where.items()}, list(
                stages
            )
        stage_of: dict[str, int] = {}
        devices: list[str] = []
        for layer, device in self._where.items():
            if not devices or devices[-1] != device:
                devices.append(device)
            stage_of[layer] = len(devices) - 1
        return stage_of, devices

    def _sums(self, kind: str) -> list[float]:
        total = [0.0] * len(self._devices)
        for layer in self._request.profile.layers:
            device_type = self._types[self._where[layer.name]]
            backward = layer.backward_ms[device_type] if self._request.is_training else 0.0
            times = {"forward": layer.forward_ms[device_type], "backward": backward}
            # what has no parameters to train has no such half
            untold = backward / 2 if layer.grad_bytes else 0.0
            times["weights"] = min(backward, layer.weight_grad_ms.get(device_type, untold))
            times["optimizer"] = (
                layer.optimizer_ms.get(device_type, 0.0) if self._request.is_training else 0.0
            )
            total[self.stage_of[layer.name]] += times[kind]
        return total

    def _plan(self, held: Sequence[int] | None) -> Plan:
        schedule = self._request.schedule
        assert schedule != "auto"
        whole = self.pipeline
        places = whole.places
        if held is not None and schedule == "interleaved" and len(set(places)) < len(places):
            alike = [
                one
                for one in roomy_plans(whole, self._request.chunks)
                if one.in_flight == tuple(held)
            ]
            require(bool(alike), f"in_flight is {tuple(held)}, which no order of these stages has")
            return min(
                alike,
                key=partial(
                    steady_state_ms if self._request.step_kind == "steady-state" else step_ms, whole
                ),
            )
        return plan(
            schedule,
            places,
            self._request.chunks,
            forward_ms=whole.forward_ms,
            backward_ms=whole.backward_ms,
            weight_grad_ms=whole.weight_grad_ms,
            transfers=whole.transfers,
            room=held
            if schedule == "zero-bubble" and held is not None and len(held) == len(places)
            else None,
            training=self._request.is_training,
        )

    def device_of(self, stage: int) -> str:
        """Return the device of a stage."""
        return self._devices[stage]

    def duration(self, stage: int, phase: str) -> float:
        """Return the time of a pass of a stage."""
        return self._duration((stage, phase, 0))

    def last_pass_ms(self, layer: Layer) -> float:
        """Return a layer's time in the last pass of its stage, without a repeated forward pass."""
        kind = self._types[self._where[layer.name]]
        whole = layer.backward_ms[kind]
        if not self.plan.split:
            return whole
        return min(whole, layer.weight_grad_ms.get(kind, whole / 2 if layer.grad_bytes else 0.0))

    def optimizer_of(self, device: str) -> float:
        """Return the time of the optimizer's step on a device."""
        return self._optimizer_ms[device]

    def set_optimizer(self, device: str, time_ms: float) -> None:
        """Set the time between the last pass of a device and its first one in the next step."""
        self._optimizer_ms[device] = time_ms

    @property
    def pipeline(self) -> Pipeline:
        """The stages, as ``placer.schedule`` takes them."""
        names = [device.name for device in self._request.devices]
        forward, backward, weights, optimizer = (tuple(times) for times in self._passes.values())
        places = tuple(names.index(device) for device in self._devices)
        crossings = [
            Transfer(*pair, there, self._gradients.get(pair))
            for pair, there in sorted(self._values.items())
        ]
        return Pipeline(places, forward, backward, weights, tuple(crossings), optimizer)

    def _crossings(self) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Return the times of values and of gradients, by the maker's and first reader's stages."""
        values: dict[Pair, float] = defaultdict(float)
        gradients: dict[Pair, float] = defaultdict(float)
        for edge in self._request.profile.edges:
            for device in {self._where[name] for name in edge.targets} - {self._where[edge.source]}:
                pair = self.stage_of[edge.source], self._first_reader(edge, device)
                values[pair] += self._links[self._where[edge.source], device].transfer_ms(
                    edge.bytes
                )
                if self._request.is_training and edge.gradient_bytes:
                    gradients[pair] += self._links[device, self._where[edge.source]].transfer_ms(
                        edge.gradient_bytes
                    )
        return values, gradients

    def _first_reader(self, edge: Edge, device: str) -> int:
        return min(self.stage_of[name] for name in edge.targets if self._where[name] == device)

    @cached_property
    def flights(self) -> dict[str, int]:
        """The micro-batches in flight at a layer's segment, by layer."""
        return self.flights_of(self.plan)

    def flights_of(self, plan: Plan) -> dict[str, int]:
        """Return the same by an order of passes."""
        return {layer: plan.in_flight[stage] for layer, stage in self.stage_of.items()}

    @property
    def step_ms(self) -> float:
        """Return the time of the whole batch with the optimizer, isolated or in steady state."""
        return (
            self.steady_state_ms if self._request.step_kind == "steady-state" else self.isolated_ms
        )

    @cached_property
    def steady_state_ms(self) -> float:
        """Return the time of a steady-state step."""
        return longest_mean(self._waits | self._optimizers(), self._carried(), self._duration)

    @cached_property
    def isolated_ms(self) -> float:
        """Return the time of a step from idle to idle devices."""
        end: dict[Event, float] = {}
        for event in TopologicalSorter(self._waits).static_order():
            end[event] = max(
                (end[before] for before in self._waits[event]), default=0.0
            ) + self._duration(event)
        last = max(end[tuple(item)] for item in self.plan.issue)
        return last + self.optimizer_ms()

    def optimizer_ms(self) -> float:
        """Return the device whose optimizer takes longest."""
        return max(self._optimizer_ms.values(), default=0.0)

    def _duration(self, event: Event) -> float:
        if event[0] == "optimizer":
            return self._optimizer_ms.get(event[1], 0.0)
        if event[0] == "values":
            return self._values[event[1]]
        if event[0] == "gradients":
            return self._gradients[event[1]]
        stage, phase, _ = event
        whole = self._passes[phase][stage]
        return (
            whole - self._passes["weights"][stage]
            if self.plan.split and phase == "backward"
            else whole
        )

    def _lanes(self) -> list[list[Event]]:
        """Return the events of each lane, in order."""
        lanes: dict[Event, list[Event]] = defaultdict(list)
        for stage, phase, batch in self.plan.issue:
            for pair in sorted(pair for pair in self._values if pair[1] == stage):
                other, here = self._devices[pair[0]], self._devices[stage]
                if phase == "forward":
                    lanes["values", other, here].append(("values", pair, batch))
                elif phase == "backward" and pair in self._gradients:
                    lanes["gradients", here, other].append(("gradients", pair, batch))
        return list(lanes.values())

    @cached_property
    def _waits(self) -> dict[Event, set[Event]]:
        """Return the events of its step that each event waits for."""
        waits: dict[Event, set[Event]] = defaultdict(set)
        before: dict[str, Event] = {}
        for stage, phase, batch in self.plan.issue:
            item, here = (stage, phase, batch), self._devices[stage]
            waits[item] |= {before[here]} if here in before else set()
            before[here] = item
            for pair in sorted(pair for pair in self._values if pair[1] == stage):
                if phase == "forward":
                    sent: Event = ("values", pair, batch)
                    waits[sent] |= {(pair[0], "forward", batch)} | self._room(stage, batch)
                    waits[item].add(sent)
                elif phase == "backward" and pair in self._gradients:
                    sent = ("gradients", pair, batch)
                    waits[sent].add(item)
                    waits[pair[0], "backward", batch].add(sent)
            # A stage that receives no gradients begins its backward pass from the loss.
            if phase == "backward" and all(pair[0] != stage for pair in self._gradients):
                waits[item].add((len(self._devices) - 1, "forward", batch))
        for lane in self._lanes():
            for first, second in itertools.pairwise(lane):
                waits[second].add(first)
        return waits

    def _of_device(self) -> dict[str, list[Event]]:
        """Return, by device, its passes in order."""
        passes: dict[str, list[Event]] = defaultdict(list)
        for stage, phase, batch in self.plan.issue:
            passes[self._devices[stage]].append((stage, phase, batch))
        return passes

    def _optimizers(self) -> dict[Event, set[Event]]:
        """Return the optimizer of each device, which waits for the last of its passes."""
        return {("optimizer", device): {passes[-1]} for device, passes in self._of_device().items()}

    def _carried(self) -> dict[Event, set[Event]]:
        """Return, by event, the events of the step before that it waits for.

        These are the last on its device, on its lane, and the previous user of its buffer.
        """
        carried: dict[Event, set[Event]] = defaultdict(set)
        for device, passes in self._of_device().items():
            carried[passes[0]].add(("optimizer", device))
        last = "weights" if self.plan.split else "backward"
        for lane in self._lanes():
            carried[lane[0]].add(lane[-1])
        for pair in self._values if self.plan.training else ():
            held = self.plan.in_flight[pair[1]]
            for batch in range(held):
                # of those that have the same buffer
                latest = range(batch, self._request.chunks, held)[-1]
                carried["values", pair, batch].add((pair[1], last, latest))
        return carried

    def _room(self, stage: int, batch: int) -> set[Event]:
        """Return the pass that makes room for a micro-batch."""
        older = batch - self.plan.in_flight[stage]
        last = "weights" if self.plan.split else "backward"
        return {(stage, last, older)} if self.plan.training and older >= 0 else set()


def possible_flights(
    request: PlacementRequest, where: Where, stages: Sequence[str]
) -> list[dict[str, int]]:
    """Return, by layer, the micro-batches in flight of its segment, for each possible order."""
    reading = StepReading(request, where, stages)
    whole = reading.pipeline
    if len(set(whole.places)) == len(whole.places):
        return [reading.flights]
    return [reading.flights_of(one) for one in roomy_plans(whole, request.chunks)]


def check_said(request: PlacementRequest, reading: StepReading, placement: Placement) -> None:
    """Raise on what is said of a whole batch and is not so.

    The best of the choices, bounds of all, both times.

    Args:
        request: the question.
        reading: of the placement's step.
        placement: the answer.

    Raises:
        PlacementError: what is claimed, and what is true.
    """
    step = placement.step
    assert step is not None  # check() has looked
    check_choices(request, placement)
    equal("step.kind", step.kind, request.step_kind)
    for name, claimed, true in (
        ("isolated_ms", step.isolated_ms, reading.isolated_ms),
        ("steady_state_ms", step.steady_state_ms, reading.steady_state_ms),
    ):
        near(f"step.{name}", inf if claimed is None else claimed, true)
    equal("step.in_flight", step.in_flight, reading.plan.in_flight)
    near("step.optimizer_ms", step.optimizer_ms, reading.optimizer_ms())
    equal("step.reduction_ms", (step.reduction_ms, step.reduction_hidden_ms), (0.0, 0.0))


def check_choices(request: PlacementRequest, placement: Placement) -> None:
    """Raise on what is said of the batch and of the choices and is not so.

    Args:
        request: the question.
        placement: the answer, with a step.

    Raises:
        PlacementError: what is claimed, and what is true.
    """
    step, value = placement.step, placement.objective_value or 0.0
    assert step is not None  # check() has looked
    size = request.batch_size or request.chunks * request.profile.batch_size
    equal("step.batch_size", step.batch_size, size)
    equal("samples of all micro-batches", placement.chunks * placement.batch_size, size)
    if step.samples_per_s is not None:
        near("step.samples_per_s", step.samples_per_s * value, 1e3 * size)
    found = [one.objective_value for one in step.choices if one.objective_value is not None]
    near("the best of step.choices", min(found), value)
    bounds = [one.bound for one in step.choices if one.bound is not None]
    require(
        (placement.bound or 0.0) <= min(bounds),
        f"bound {placement.bound} is above a choice's bound",
    )
