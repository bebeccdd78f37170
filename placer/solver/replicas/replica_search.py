"""The search over shapes: one device, replicas, stages, and replicated stages.

    R equal pipelines      for each R, most replicas first: the search for one pipeline, on its
                           devices and its part of the batch, with the exchange between replicas
    unlike devices         the best shares of devices that each hold the whole model
    without replicas       the search without replicas

A search is given the best step so far, and closes what cannot be shorter. Each has a share of the
time in proportion to the devices of its pipeline; what it leaves goes to the next. The bound of the
answer is the lowest bound of all shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

from placer.schema import Placement, PlacementRequest, SingleDevice, StepChoice
from placer.solver import answer
from placer.solver.cpsat.runner import Meter
from placer.solver.problem import Problem
from placer.solver.replicas import replica_answer, replica_shapes
from placer.solver.replicas.replica_shapes import Shape
from placer.solver.replicas.replication import Replication
from placer.solver.replicas.uneven_shares import UnevenShares
from placer.solver.search import Incumbent, Progress
from placer.solver.step import step_answer
from placer.solver.step.choices import questions

SHORTEST_S = 0.05
"""The least time of a shape, in seconds: enough to find a placement of a small model."""


class Answered(NamedTuple):
    """The answer of one search, with the choices that it considered."""

    placement: Placement
    choices: tuple[StepChoice, ...]


class PipelineSearch(Protocol):
    """A search for the placement of one pipeline."""

    def __call__(
        self,
        asked: PlacementRequest,
        progress: Progress | None,
        meter: Meter,
        replication: Replication | None,
        known_ms: float,
    ) -> Answered:
        """Return the answer.

        Args:
            asked: what the pipeline is asked for.
            progress: called with each better placement.
            meter: limits the work.
            replication: what replicas of its devices cost.
            known_ms: an objective that another shape has, in the unit of this search.
        """


@dataclass
class ReplicaSearch:
    """One solve over all shapes.

    Attributes:
        request: the question; one for which ``replica_shapes.may_replicate`` holds.
        search: for the placement of one pipeline.
        progress: as for ``solve``.
        stop: set it to end the search with the best so far.
        meter: counts the work.
        best: the best placement so far, without what is known of all shapes.
        choices: of all shapes that were searched.
        bounds: of all shapes that were searched and are not proven infeasible.
    """

    request: PlacementRequest
    search: PipelineSearch
    progress: Progress | None
    stop: threading.Event | None
    meter: Meter
    best: Placement | None = None
    choices: list[StepChoice] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    began: float = field(default_factory=monotonic)

    def answer(self) -> Placement:
        """Search all shapes; the placement is not yet checked."""
        shapes = list(replica_shapes.shapes(self.request))
        weights = [len(shape.pipelines[0]) for shape, _ in shapes] + [len(self.request.devices)]
        for number, (shape, asked) in enumerate(shapes):
            part = weights[number] / sum(weights[number:])
            self._search_shape(shape, self._limited(asked, part), self._part(part))
        self._share_unevenly()
        alone = self._search_alone()
        if self.best is None:
            return self._nothing(alone)
        return self._finished(self.best, min(self.bounds))

    @property
    def _value(self) -> float:
        value = None if self.best is None else self.best.objective_value
        return inf if value is None else value

    def _search_shape(self, shape: Shape, asked: PlacementRequest, meter: Meter) -> None:
        """Search for the best pipeline of a shape."""
        scale = shape.replicas if self.request.objective == "throughput" else 1

        def report(found: Incumbent) -> None:
            self._report(found, scale, lambda inner: self._of_shape(shape, inner))

        progress = None if self.progress is None else report
        result = self.search(asked, progress, meter, shape.replication, scale * self._value)
        self.meter.done += meter.done
        self._keep(result, scale)
        if result.placement.layer_devices:
            self._offer(self._of_shape(shape, result.placement))

    def _of_shape(self, shape: Shape, inner: Placement) -> Placement:
        return replica_answer.placement_of_shape(self.request, shape, inner)

    def _share_unevenly(self) -> None:
        """Search for the best shares of unlike devices."""
        if self.request.objective != "step":
            return
        shares = UnevenShares(self.request, lambda: self._left_s() <= 0 or self._is_stopped())
        if not shares.applies():
            return
        shares.search(self._value)
        self.choices += replica_answer.choices_of_shares(self.request, shares)
        self.bounds += [bound for bound in shares.bounds.values() if bound < inf]
        for found in shares.found.values():
            if found.step_ms < self._value:
                self._offer(replica_answer.placement_of_shares(self.request, shares, found))

    def _search_alone(self) -> Placement:
        """Search for the best placement without replicas."""

        def report(found: Incumbent) -> None:
            self._report(found, 1, lambda inner: inner)

        progress = None if self.progress is None else report
        asked = self._limited(self.request, 1.0)
        result = self.search(asked, progress, self._part(1.0), None, self._value)
        self._keep(result, 1)
        if result.placement.layer_devices:
            changed = {"id": self.request.content_hash()}
            self._offer(result.placement.model_copy(update=changed))
        return result.placement

    def _keep(self, result: Answered, scale: int) -> None:
        """Keep what a search has proven."""
        self.choices += result.choices
        if result.placement.infeasible is None:
            self.bounds.append((result.placement.bound or 0.0) / scale)

    def _offer(self, placement: Placement) -> None:
        assert placement.objective_value is not None
        if placement.objective_value < self._value:
            self.best = placement

    def _report(
        self, found: Incumbent, scale: int, whole: Callable[[Placement], Placement]
    ) -> None:
        """Report a placement that a search has found, if it is better than the best shape."""
        value = found.objective_value / scale
        if value >= self._value or self.progress is None:
            return
        choices = tuple(self.choices)

        def placement() -> Placement:
            # other shapes are still to be searched, so nothing is proven of them
            single, time_s = self._single, monotonic() - self.began
            inner = whole(found.placement())
            own = inner.step.choices if inner.step is not None else ()
            return replica_answer.finished(inner, 0.0, single, (*choices, *own), time_s)

        self.progress(Incumbent(value, 0.0, monotonic() - self.began, placement))

    @cached_property
    def _single(self) -> SingleDevice:
        """The best that one device does."""
        if self.request.objective == "step":
            return step_answer.single_device(
                [Problem.from_request(asked) for asked in questions(self.request)]
            )
        return answer.single_device(Problem.from_request(self.request))

    def _finished(self, placement: Placement, bound: float) -> Placement:
        time_s = monotonic() - self.began
        return replica_answer.finished(placement, bound, self._single, self.choices, time_s)

    def _nothing(self, alone: Placement) -> Placement:
        """Return an answer without a placement: infeasible if every shape is proven to be."""
        changed: dict[str, object] = {
            "id": self.request.content_hash(),
            "solve_time_s": monotonic() - self.began,
        }
        if self.bounds and alone.infeasible is not None:
            changed |= {"status": "unknown", "infeasible": None, "bound": min(self.bounds)}
        elif self.bounds:
            changed |= {"bound": min(self.bounds)}
        return alone.model_copy(update=changed)

    # Limits

    def _limited(self, asked: PlacementRequest, part: float) -> PlacementRequest:
        """Return a question with a part of the time that is left."""
        by_work = self.meter.limit < inf  # then the clock must not decide
        time_s = max(SHORTEST_S, self._left_s() * (1.0 if by_work else part))
        return asked.model_copy(update={"time_limit_s": time_s})

    def _part(self, part: float) -> Meter:
        """Return a meter for a part of the work that is left."""
        return Meter(part * self.meter.left)

    def _left_s(self) -> float:
        return self.request.time_limit_s - (monotonic() - self.began)

    def _is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()
