"""A search for a placement: the best so far, what is proven, and what is left of the time.

Each part of the portfolio (``solve.py``) is given it, offers what it finds and proves what it can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, nextafter
from time import monotonic

from placer.schema import Placement, PlacementRequest
from placer.schema.base import PROVEN_GAP
from placer.solver import answer, costs
from placer.solver.cpsat import ties
from placer.solver.cpsat.runner import Limits, Meter
from placer.solver.problem import SAME, Problem
from placer.solver.reduce import Reduction, reduced

Progress = Callable[["Incumbent"], None]


@dataclass(frozen=True)
class Incumbent:
    """The best placement so far.

    Attributes:
        objective_value: in the objective's unit.
        bound: the proven lower bound at that time.
        time_s: seconds since the solve began.
        placement: makes the placement that ``solve`` would return if it ended now, without a check.
            It may be called from any thread, and takes a while.
    """

    objective_value: float
    bound: float
    time_s: float
    placement: Callable[[], Placement] = field(repr=False, compare=False)


@dataclass
class Search:
    """One solve: the incumbent, the bound and the time.

    Attributes:
        problem: the placement problem.
        progress: as for ``solve``.
        stop: as for ``solve``.
        best: by layer, the device in the best placement so far.
        value: its objective.
        rank: its transfer and spread, which break ties.
        bound: the proven lower bound.
        method: the method that found the best placement.
        enough: a sufficient bottleneck: a placement within it ends the search, and so does a proof
            against one. None asks for the smallest.
        meter: counts the work, and ends the search when its limit is reached.
        too_many: the least known bottleneck with too many ideals.
        merged: the nodes of the latest threshold, with that threshold.
        began: the start, by the monotonic clock.
        request: the request of the problem.
        nodes: the layers, merged where they must be on one device.
    """

    problem: Problem
    progress: Progress | None = None
    stop: threading.Event | None = None
    best: list[int] | None = None
    value: float = inf
    rank: ties.Rank = (inf, inf)
    bound: float = 0.0
    method: str = ""
    enough: float | None = None
    meter: Meter = field(default_factory=Meter)
    too_many: float = inf
    merged: tuple[float, Reduction] | None = None
    began: float = field(default_factory=monotonic)
    request: PlacementRequest = field(init=False)
    nodes: Reduction = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.problem.request
        self.nodes = reduced(self.problem)

    def limits(self, work: float) -> Limits:
        """Return limits of a search with this work that offers placements as it finds them."""
        request = self.request
        return Limits(
            self.left_s(), request.workers, request.seed, self.stop, self._found, work, self.meter
        )

    def quietly(self, work: float) -> Limits:
        """Return limits for a search of this much work whose placements are used when it ends."""
        return replace(self.limits(work), progress=None)

    def over(self, share: float) -> bool:
        """Return whether a share of the time, or of the work, is over."""
        if self.meter.done > share * self.meter.limit:
            return True
        return self._stopped() or self._time_s() > share * self.request.time_limit_s

    def counted(self, work: float, share: float = 1.0) -> bool:
        """Count so much work, in the measure of ``cpsat.runner.Meter``.

        Whether a share of the time, or of the work, is over.
        """
        self.meter.done += work
        return self.over(share)

    def _stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def better(self) -> float:
        """Return the objective from which a placement counts as better than the best so far."""
        better = (
            self.value - 1
            if self.request.objective == "memory"
            else self.value * (1 - PROVEN_GAP / 2)
        )
        return better if self.enough is None else min(better, self.enough)

    def nothing_below(self) -> float:
        """Return the bound that is proven if nothing is better; bytes are integers."""
        if self.enough is not None and self.better() == self.enough:
            return nextafter(self.enough, inf)
        return self.value if self.request.objective == "memory" else self.better()

    def _found(self, devices: list[int], bound: float) -> None:
        self.prove(bound)
        self.offer(devices, "integer program")

    def offer(self, devices: list[int] | None, method: str) -> None:
        """Keep an assignment if it meets every requirement and is better."""
        if devices is None or not costs.allowed(self.problem, devices):
            return
        result = costs.evaluate(self.problem, devices)
        if result is None or not self._beats(result) or not costs.fits(self.problem, result):
            return  # in this order, as what fits takes longest to tell
        better = result.objective_value < self.value
        self.best, self.value, self.method = (
            devices,
            result.objective_value,
            method if better else self.method,
        )
        self.rank = ties.rank(result)
        if better and self.progress is not None:
            self.progress(
                incumbent(
                    self.problem, devices, self.value, self.bound, self.method, self._time_s()
                )
            )

    def _beats(self, result: costs.Costs) -> bool:
        """Return whether a placement is better than the best, or equal with a smaller rank."""
        if self.best is not None and abs(result.objective_value - self.value) <= SAME * self.value:
            return ties.rank(result) < self.rank
        return result.objective_value < self.value

    def prove(self, bound: float) -> None:
        """Keep a lower bound if it is higher."""
        if bound > self.bound:
            self.bound = bound

    def open(self) -> bool:
        """Return whether there may be something better that is wanted."""
        if self.enough is not None and (self.value <= self.enough or self.bound > self.enough):
            return False
        return self.value - self.bound > PROVEN_GAP * self.value or self.best is None

    def _time_s(self) -> float:
        return monotonic() - self.began

    def left_s(self) -> float:
        """Return the time that is left, in seconds."""
        return self.request.time_limit_s - self._time_s()


def incumbent(
    problem: Problem, devices: list[int], value: float, bound: float, method: str, time_s: float
) -> Incumbent:
    """Return a report of the best placement so far, with unbroken ties."""

    def placement() -> Placement:
        found = answer.found(problem, devices, bound, method, time_s)
        return found.model_copy(update={"tie_breaks": ties.unbroken(problem, devices)})

    return Incumbent(value, min(bound, value), time_s, placement)
