"""Objective ``step``: micro-batches, schedule, interleaving and map, for the shortest whole batch.

    for every micro-batch size, schedule and kind of placement: a choice, with a lower bound
      every map        of few that are no row: each simulated
      hopeless         skipped if known memory limits leave some device too much work
      starts           cuts of the row with the lowest bound, the best maps by bottleneck, maps of
                       other choices
      cuts of a graph  every cut whose bound is below the best step, simulated: the others are
                       proven not better
      small changes    nodes to the other side of a cut, devices swapped, each simulated
      cuts of a row    likewise, with tighter bounds
    then, of choices that are no rows, a bound by the work of some device, and small changes from
    near the best again; choices whose bound is not below the best step are skipped

The bound of the answer is the lowest bound of its choices (see ``step_bounds.py``).

**Time to report.** An answer is reported and checked once it is found. This takes longer the more
passes its step has, and the more layers and devices there are. Time for it is set aside, and a map
is tried only if about as much time is left. With thousands of micro-batches, or a device with
hundreds of segments, one step may take longer than everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import inf
from random import Random
from time import monotonic
from typing import NamedTuple

from placer.schema import Infeasibility, Placement, PlacementRequest, TieBreaks
from placer.schema.base import PROVEN_GAP
from placer.solver import costs, every_map
from placer.solver.bounds import memory_bounds
from placer.solver.cpsat.runner import PER_WORK, Meter
from placer.solver.problem import ROUNDING, Problem
from placer.solver.replicas.replication import Replication
from placer.solver.search import Progress
from placer.solver.step import graph_cuts, step_answer, step_bounds, step_moves, step_ties
from placer.solver.step.choices import (
    Choice,
    bottleneck_of,
    bounded,
    choice_of,
    in_order,
    questions,
    work_alone,
)

REPORT_S_PER_PASS = 6e-5
"""Seconds per pass of a step to simulate, report and check it, as measured."""

SEGMENTS_FACTOR = 2
"""Factor of this time where a device has several segments: several orders are simulated."""

LATENESS_S = 1.0
"""The seconds that a better answer may be reported after the time limit."""


class Share(NamedTuple):
    """Until when one part of the search may go on: the time in seconds, and the work."""

    time_s: float
    work: float


def told_s(problem: Problem, devices: list[int]) -> float:
    """Return the seconds that it takes to simulate, report and check the step of an assignment.

    Args:
        problem: the placement problem.
        devices: by layer, its device.
    """
    used = len(set(devices))
    stages = used if problem.contiguous else len(list(groupby(devices)))
    # Passes of one micro-batch on one stage: forward, backward and, under zero-bubble, the weight-
    # gradient pass.
    passes = 1 + problem.training + (problem.request.schedule == "zero-bubble")
    orders = SEGMENTS_FACTOR if stages > used else 1
    return REPORT_S_PER_PASS * orders * passes * stages * problem.request.chunks


class _Shares(NamedTuple):
    """How the search divides its time.

    Attributes:
        first_bounds: share of the time for first bounds.
        choices: share of the remaining time that all choices together get at first.
        maps: share of a choice's work for enumerating all maps.
        bounds: share of the time then left for bounds by work. They gain nothing where maps are
            free and memory binds nowhere, as work can be shared out evenly.
        graphs: share of the remaining time for the first cuts of graphs.
        again: share of the remaining time for small changes of the best choice at the end, and
            of the time then left for the next one.
        bottleneck: share of a choice's time for the smallest bottleneck.
    """

    first_bounds: float = 0.3
    choices: float = 0.5
    maps: float = 0.5
    bounds: float = 0.5
    graphs: float = 0.4
    again: float = 0.6
    bottleneck: float = 0.3


class _Effort(NamedTuple):
    """Limits of the local search.

    Attributes:
        rounds: the most rounds through the devices in which layers are dealt out.
        starts: cuts of a row of stages from which small changes start.
        patience: climbs without improvement that end the search of a choice that is no row.
    """

    rounds: int = 8
    starts: int = 16
    patience: int = 4


SHARES, EFFORT = _Shares(), _Effort()


BottleneckSearch = Callable[[Problem, Meter, float | None], Placement]
"""Answers a question with objective ``throughput``, within some work; a bottleneck that is enough
ends the search."""


NO_CUT = Infeasibility(
    reason="no cut of the row of layers keeps to each device's memory and to what else is required"
)
"""Where every cut was looked at before the search for the smallest bottleneck came to an end."""

NO_MAP = Infeasibility(
    reason="no map of the layers keeps to each device's memory and to what else is required"
)
"""The same of every map, where they are few."""


@dataclass
class StepSearch:
    """The search over all choices: its parts, one after another, and the best step so far.

    Attributes:
        request: the question.
        search: answers a question with objective ``throughput``.
        progress: as for ``solve``.
        stop: set it to end the search with the best so far.
        meter: counts the work, and ends the search when its limit is reached.
        replication: what replicas of the devices cost; None without replicas.
        known_ms: a step that another search has found: choices that cannot be shorter are closed.
        choices: the choices that contain the answer.
        best: the choice with the shortest step so far.
        method: the method that found it.
        told_s: seconds to report and check it.
        alone_s: seconds to evaluate each device alone, which every answer includes.
    """

    request: PlacementRequest
    search: BottleneckSearch = field(kw_only=True)
    progress: Progress | None = None
    stop: threading.Event | None = None
    meter: Meter = field(default_factory=Meter)
    replication: Replication | None = None
    known_ms: float = inf
    began: float = field(default_factory=monotonic)
    choices: list[Choice] = field(init=False)
    best: Choice = field(init=False)
    method: str = "one device"
    told_s: float = 0.0
    alone_s: float = 0.0

    def answer(self) -> Placement:
        """Return the best placement of the best choice; not yet checked."""
        self.choices = in_order(
            choice_of(asked, self.replication) for asked in questions(self.request)
        )
        self.best = self.choices[0]
        self.random = Random(self.request.seed)
        # First a feasible answer, then bounds, then search: with a short time limit, something is
        # returned.
        self._offer_one_device()
        for number, choice in enumerate(self.choices):
            share = self._share(SHARES.first_bounds / (len(self.choices) - number))
            bounded(choice, partial(self._over, choice, share))
        self.choices = in_order(self.choices)
        self._cut_graphs()
        for number, choice in enumerate(self.choices):
            self._work(choice, self._share(SHARES.choices / (len(self.choices) - number)))
        rows = [choice for choice in self.choices if choice.is_row and choice.cuts is not None]
        for number, choice in enumerate(rows):
            share = self._share(1 / (len(rows) - number))
            self._climb_again(choice, share)
            self._all_cuts(choice, share)
        others = [
            choice for choice in self.choices if choice not in rows and not self._closed(choice)
        ]
        # Bounds by work help only where memory or contiguity keeps the work from being shared
        # evenly.
        loose = [
            choice
            for choice in others
            if choice.problem.contiguous or memory_bounds.can_bind(choice.problem)
        ]
        for number, choice in enumerate(loose):
            self._bound_by_work(choice, self._share(SHARES.bounds / (len(loose) - number)))
        placed = sorted(
            (one for one in others if one.devices is not None), key=lambda choice: choice.value
        )
        for choice in placed:
            self._climb_again(
                choice, self._share(SHARES.again if choice is not placed[-1] else 1.0)
            )
        for choice in others:
            self._all_cuts(choice, self._share(1.0))
        if self.best.devices is None:
            return step_answer.nothing(self.request, self.choices, self._time_s())
        broken = self._break_ties()
        return step_answer.found(
            self.request, self.choices, self.best, self.method, broken, self._time_s()
        )

    def _offer_one_device(self) -> None:
        """Offer each device alone, one of each kind: if one suffices, there is always an answer."""
        began = self._time_s()
        for choice in self.choices:
            kinds: dict[object, list[int]] = {}
            for number, device in enumerate(choice.problem.devices):
                devices = [number] * len(choice.problem.layers)
                if costs.allowed(choice.problem, devices):
                    kinds.setdefault(
                        (device.type, device.usable_bytes, choice.problem.recompute[number]),
                        devices,
                    )
            for devices in kinds.values():
                self._offer(choice, devices, "one device")
            if self._is_late():
                break
        self.alone_s = self._time_s() - began

    def _cut_graphs(self) -> None:
        """Try the cuts with the lowest bounds of choices whose stages form no row."""
        graphs = [
            choice
            for choice in self.choices
            if not self._closed(choice)
            and graph_cuts.applies(choice.problem)
            and not step_bounds.is_row(choice.problem, choice.nodes)
        ]
        for number, choice in enumerate(graphs):
            choice.cuts = graph_cuts.cuts(choice.problem, choice.bound)
            self._all_cuts(choice, self._share(SHARES.graphs / (len(graphs) - number)))

    def _break_ties(self) -> TieBreaks | None:
        """Look for a map with as short a step that transfers less, or is better balanced."""
        if not self.request.break_ties:
            return None

        def over() -> bool:
            self.meter.done += 1 / PER_WORK.maps
            return self._left_s() <= 0 or self.meter.left <= 0 or self._stopped()

        return step_ties.broken(self.best, over)

    def _work(self, choice: Choice, share: Share) -> None:
        """Search one choice, if it may be better."""
        if self._over(choice, share):
            return
        self._start(choice, share)
        if choice.devices is not None:
            self._climb(choice, choice.devices, share)
        if not choice.is_row:
            self._climb_again(choice, share)
        self._all_cuts(choice, share)

    def _climb(self, choice: Choice, start: list[int], share: Share) -> None:
        """Apply small changes that shorten the step, as long as there are any."""

        def over() -> bool:
            return self._over(choice, share)

        climbed = step_moves.climb(choice.problem, choice.nodes, start, self._step_of(choice), over)
        self._offer(choice, climbed, "small changes")

    def _climb_again(self, choice: Choice, share: Share) -> None:
        """Climb again from near the best, until that has not helped for a while."""
        idle = 0
        while (
            choice.devices is not None and idle < EFFORT.patience and not self._over(choice, share)
        ):
            before = choice.value
            start = step_moves.kicked(choice.problem, choice.nodes, choice.devices, self.random)
            self._climb(choice, start, share)
            idle = 0 if choice.value < before else idle + 1

    def _over_after_cuts(self, choice: Choice, share: Share) -> bool:
        """Try the first cuts of a row; return whether the share of the time is over."""
        for _ in range(EFFORT.starts):
            if not self._next_cut(choice):
                break
            if self._over(choice, share):
                return True
        return False

    def _start(self, choice: Choice, share: Share) -> None:
        """Try first maps: known ones, the lowest cuts of a row, the smallest bottleneck."""
        self._offer_known_maps(choice, share)
        if self._over(choice, share):
            return
        table = step_bounds.table(choice.problem, choice.nodes, choice.bottleneck)
        if table is not None:
            choice.is_row, choice.cuts = True, table.cuts()
            if self._over_after_cuts(choice, share):
                return
        elif self._all_maps(choice, share) or self._closed(choice):
            return
        if table is None and (not self._may_be_better(choice, share) or self._is_late()):
            return
        # A row has better starts: its cuts with the lowest bounds.
        near = self._by_bottleneck(choice, share) if table is None or choice.devices is None else []
        for devices in near if choice.devices is None and choice.reason is None else ():
            self._make_room(choice, devices, share)

    def _offer_known_maps(self, choice: Choice, share: Share) -> None:
        """Offer the maps of other choices, and layers dealt out in rounds."""
        for other in self.choices:
            if other.devices is not None and not self._over(choice, share):
                self._offer(choice, other.devices, "another choice's map")
        for devices in self._rounds(choice):
            if self._over(choice, share):
                return
            self._offer(choice, devices, "rounds")

    def _all_maps(self, choice: Choice, share: Share) -> bool:
        """Try every map, where they are so few that there is work left; whether all were."""
        most = SHARES.maps * (share.work - self.meter.done) * PER_WORK.maps
        every, proven = every_map.few(choice.problem, choice.nodes, most), True
        if every is None:
            return False
        for devices in every:
            if self._over(choice, share):
                return False
            result = self._offer(choice, devices, "every map")
            if proven and result is not None and costs.fits(choice.problem, result):
                proven = every_map.has_one_order(choice.problem, devices, result.stages)
        # No map is feasible. The bottleneck search may still find which requirements conflict.
        if choice.devices is None:
            self._by_bottleneck(choice, share)
            choice.reason = choice.reason or NO_MAP
        elif proven:
            choice.bound = max(choice.bound, min(choice.value, self._better()))
        return True

    def _by_bottleneck(self, choice: Choice, share: Share) -> list[list[int]]:
        """Try the map of the smallest bottleneck, or find a proof of infeasibility.

        Returns:
            The maps that were tried, by layer the device. None of them may be feasible where
            segments were taken to hold less.
        """
        found = self._searched(choice, choice.bottleneck, share)
        is_over = self._over(choice, share)
        if found and not is_over and choice.devices is None and costs.by_segment(choice.problem):
            found += self._searched(
                choice, bottleneck_of(choice.problem, choice.problem.request.chunks), share
            )
        return found

    def _bound_by_work(self, choice: Choice, share: Share) -> None:
        """Raise the bound by the work of some device, and try a map that has it.

        For a choice without a map, it only asks whether a better one may exist. It does not apply
        where devices may recompute: that depends on the order of stages, of which the smallest
        bottleneck knows one, and a step may have another.
        """
        problem = choice.problem
        if self._over(choice, share) or (problem.may_recompute and memory_bounds.can_bind(problem)):
            return
        self._ask_for_work(
            choice, share, 1.0, self._enough(choice) if choice.devices is None else None
        )

    def _may_be_better(self, choice: Choice, share: Share) -> bool:
        """Return whether it is worth while to look for the smallest bottleneck.

        Not where memory binds, and with so little work on every device that the step may be better
        nothing is found.
        """
        enough = self._enough(choice)
        if enough is None:
            return True
        self._ask_for_work(choice, share, SHARES.bottleneck, enough)
        return choice.devices is not None and not self._closed(choice)

    def _ask_for_work(
        self, choice: Choice, share: Share, part: float, enough: float | None
    ) -> None:
        """Return a bound by the work of some device, and a map to try."""
        placement = self._smallest_bottleneck(work_alone(choice.bottleneck), share, part, enough)
        choice.reason = placement.infeasible
        # The bottleneck is the work for one micro-batch.
        busy_ms = choice.problem.request.chunks * (placement.bound or 0.0)
        choice.bound = max(
            choice.bound, min(busy_ms * (1 - ROUNDING), choice.value, self._better())
        )
        self._try(choice, placement)

    def _enough(self, choice: Choice) -> float | None:
        """Return the work of a device, for one micro-batch, from which no step is better.

        The result is None where memory sets no limit.
        """
        limited = choice.problem.contiguous and memory_bounds.can_bind(choice.problem)
        if not limited or choice.problem.may_recompute or self.best.devices is None:
            return None
        return self._better() / choice.problem.request.chunks * (1 + 2 * ROUNDING)

    def _make_room(self, choice: Choice, start: list[int], share: Share) -> None:
        """Apply small changes that reduce the missing memory of devices."""

        def missing_bytes(devices: list[int]) -> float:
            self.meter.done += 1 / PER_WORK.maps
            return every_map.missing_bytes(choice.problem, devices)

        def over() -> bool:
            return self._over(choice, share)

        self._offer(
            choice,
            step_moves.climb(choice.problem, choice.nodes, start, missing_bytes, over),
            "small changes",
        )

    def _searched(self, choice: Choice, asked: Problem, share: Share) -> list[list[int]]:
        """Try the map of the smallest bottleneck of a question; it alone, or none."""
        placement = self._smallest_bottleneck(asked, share, SHARES.bottleneck)
        if asked == choice.bottleneck:  # what holds more can be infeasible by that
            choice.reason = placement.infeasible
        return self._try(choice, placement)

    def _try(self, choice: Choice, placement: Placement) -> list[list[int]]:
        """Try the map of a placement; it alone, or none if it has none."""
        if not placement.layer_devices:
            return []
        devices = choice.problem.assignment_of(placement.layer_devices)
        self._offer(choice, devices, "smallest bottleneck")
        return [devices]

    def _smallest_bottleneck(
        self, asked: Problem, share: Share, part: float, enough: float | None = None
    ) -> Placement:
        """Return the answer to a question for a bottleneck, in a part of the time and the work."""
        allowed = Meter(part * (share.work - self.meter.done))
        by_work = self.meter.limit < inf  # then the clock must not decide
        limit_s = max(0.01, self._left_s() if by_work else part * (share.time_s - self._time_s()))
        limited = replace(asked, request=asked.request.model_copy(update={"time_limit_s": limit_s}))
        placement = self.search(limited, allowed, enough)
        self.meter.done += allowed.done
        return placement

    def _rounds(self, choice: Choice) -> Iterator[list[int]]:
        """Yield layers dealt out in rounds, where devices may have several segments."""
        if choice.problem.contiguous:
            return
        devices = [list(range(len(choice.problem.devices)))]
        result = (
            costs.evaluate(self.best.problem, self.best.devices)
            if self.best.devices is not None
            else None
        )
        if result is not None and list(result.stages) != devices[0]:
            devices.append(list(result.stages))
        for used in devices:
            for times in range(1, EFFORT.rounds + 1):
                if len(used) <= choice.problem.most_devices and len(used) * times <= len(
                    choice.nodes.nodes
                ):
                    yield step_moves.rounds(choice.problem, choice.nodes, used, times)

    def _all_cuts(self, choice: Choice, share: Share) -> None:
        """Try every cut that may be better, the lowest bound first.

        None that follows is below it.
        """
        while choice.cuts is not None and not self._over(choice, share):
            if not self._next_cut(choice) and choice.cuts is not None:
                self._raise_bound(choice, inf)
                if choice.devices is None and choice.unproven == inf:
                    choice.reason = choice.reason or NO_CUT
                choice.cuts = None

    def _next_cut(self, choice: Choice) -> bool:
        """Try one more cut, if it has come to one; whether there may be others.

        None are left of too many.
        """
        assert choice.cuts is not None
        bound, devices = next(choice.cuts, (inf, []))
        if bound < inf:
            self._raise_bound(choice, bound)
            choice.cuts = None if devices == [] else choice.cuts
        if devices:
            result = self._offer(choice, devices, "cuts of a row" if choice.is_row else "cuts")
            # the same map may have a shorter step with its stages in another order
            if not choice.is_row and not (
                result is not None
                and every_map.has_one_order(choice.problem, devices, result.stages)
            ):
                choice.unproven = min(choice.unproven, bound)
        return devices != []

    def _raise_bound(self, choice: Choice, bound: float) -> None:
        """Raise the bound of a choice, all other cuts of which have at least this bound."""
        proven = min(bound, choice.unproven, choice.value, self._better())
        choice.bound = max(choice.bound, proven)

    # The best so far, and what is left of time and work

    def _offer(self, choice: Choice, devices: list[int], method: str) -> costs.Costs | None:
        """Keep an assignment if it meets every requirement and is better.

        What it costs, if it can be.

        Whether it fits is looked at last, of what is better alone: it takes long to tell.
        """
        self.meter.done += 1 / PER_WORK.maps
        result = (
            costs.evaluate(choice.problem, devices) if self._may_be_tried(choice, devices) else None
        )
        if result is None or result.objective_value >= choice.value:
            return result
        if not costs.fits(choice.problem, result):
            return result
        before = self.best.value
        choice.devices, choice.value = devices, result.objective_value
        if choice.value < before:
            self.best, self.method, self.told_s = choice, method, told_s(choice.problem, devices)
            if self.progress is not None:
                self.progress(
                    step_answer.incumbent(
                        self.request, self.choices, choice, method, self._time_s()
                    )
                )
        return result

    def _step_of(self, choice: Choice) -> Callable[[list[int]], float]:
        """Return the step of an assignment, infinite if it breaks a requirement."""

        def step_ms(devices: list[int]) -> float:
            self.meter.done += 1 / PER_WORK.maps
            result = (
                costs.judged(choice.problem, devices)
                if self._may_be_tried(choice, devices)
                else None
            )
            return inf if result is None else result.objective_value

        return step_ms

    def _may_be_tried(self, choice: Choice, devices: list[int]) -> bool:
        """Return whether it meets the plain requirements and can be answered in time."""
        has_time = (
            self.best.devices is None
            or told_s(choice.problem, devices) <= self._until_told_s() + LATENESS_S
        )
        return has_time and costs.allowed(choice.problem, devices)

    def _better(self) -> float:
        """Return the step from which a placement counts as better than the best so far."""
        return min(self.best.value, self.known_ms) * (1 - PROVEN_GAP / 2)

    def _closed(self, choice: Choice) -> bool:
        return choice.bound >= self._better() or choice.reason is not None

    def _over(self, choice: Choice, share: Share) -> bool:
        spent = self._time_s() > share.time_s or self.meter.done > share.work
        return spent or self._stopped() or self._closed(choice)

    def _share(self, part: float) -> Share:
        """Return a part of the time and of the work that are left."""
        by_work = self.meter.limit < inf
        # With a limit of work the answer must not depend on the machine's speed, so time is not
        # divided.
        time_s = self._time_s() + self._left_s() * (1.0 if by_work else part)
        return Share(time_s, self.meter.done + part * max(0.0, self.meter.left))

    def _stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def _is_late(self) -> bool:
        return self._left_s() <= 0 or self._stopped()

    def _time_s(self) -> float:
        return monotonic() - self.began

    def _left_s(self) -> float:
        """Return the time that is left for the search."""
        return max(0.0, self._until_told_s() - self.told_s)

    def _until_told_s(self) -> float:
        """Return the time until an answer must have been reported."""
        return self.request.time_limit_s - self._time_s() - 2 * self.alone_s
