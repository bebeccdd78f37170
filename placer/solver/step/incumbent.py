"""The best step so far, and the time and work that are left for a better one.

An answer is reported and checked once it is found. This takes longer the more passes its step has,
and the more layers and devices there are. Time for it is set aside, and a map is tried only if
about as much time is left. With thousands of micro-batches, or a device with hundreds of segments,
one step may take longer than everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from time import monotonic
from typing import NamedTuple

from placer.schema import PlacementRequest
from placer.schema.base import PROVEN_GAP
from placer.solver import costs
from placer.solver.cpsat.runner import PER_WORK, Meter
from placer.solver.problem import Problem
from placer.solver.replicas.replication import Replication
from placer.solver.search import Progress
from placer.solver.step import step_answer
from placer.solver.step.choices import Choice

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


@dataclass
class BestStep:
    """The state of the search over all choices.

    Attributes:
        request: the question.
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
