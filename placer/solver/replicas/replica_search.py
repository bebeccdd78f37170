"""The search over shapes: one device, replicas, stages, and replicated stages.

    R equal pipelines      for each R, most replicas first: the search for one pipeline, on its
                           devices and its part of the batch, with the exchange between replicas
    unlike devices         the best shares of devices that each hold the whole model
    by stage               if asked for: stages that each have a number of replicas of their own
    without replicas       the search without replicas

A search is given the best step so far, and closes what cannot be shorter. Time is divided equally;
what a search leaves goes to the next. With the time that is left at the end, shapes that may still
be better are searched again. The bound of the answer is the lowest bound of all shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

from placer.schema import Placement, PlacementRequest, SingleDevice, StepChoice
from placer.schema.base import PROVEN_GAP
from placer.solver import answer
from placer.solver.bounds import work_sharing
from placer.solver.cpsat.runner import PER_WORK, Meter
from placer.solver.problem import ROUNDING, Problem
from placer.solver.replicas import replica_answer, replica_shapes
from placer.solver.replicas.group_search import GroupSearch
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
class _Task:
    """One shape, and what is known of it.

    Attributes:
        asked: what one of its pipelines is asked for.
        shape: the pipelines; None without replicas.
        bound: a lower bound on its objective.
        choices: that were considered, by their values.
        answer: of the latest search; None before the first one.
    """

    asked: PlacementRequest
    shape: Shape | None = None
    bound: float = 0.0
    choices: dict[tuple[object, ...], StepChoice] = field(default_factory=dict)
    answer: Placement | None = None

    @property
    def scale(self) -> int:
        """The objective of one pipeline is so many times the objective of all."""
        is_step = self.asked.objective == "step"
        return 1 if is_step or self.shape is None else self.shape.replicas

    @property
    def is_infeasible(self) -> bool:
        """True if it is proven that the shape has no placement."""
        return self.answer is not None and self.answer.infeasible is not None

    def keep(self, result: Answered) -> None:
        """Keep what a search has found and proven."""
        self.answer = result.placement
        self.bound = max(self.bound, (result.placement.bound or 0.0) / self.scale)
        for choice in result.choices:
            key = choice.batch_size, choice.schedule, choice.contiguous
            self.choices[key] = _better_known(choice, self.choices.get(key))

    def known(self) -> list[StepChoice]:
        """Return the choices; the bound of the shape is a bound of each."""
        return [
            choice
            if choice.bound is None
            else choice.model_copy(
                update={"bound": max(choice.bound, min(self.bound, choice.objective_value or inf))}
            )
            for choice in self.choices.values()
        ]


def _better_known(new: StepChoice, old: StepChoice | None) -> StepChoice:
    """Return a choice with the shorter step and the higher bound of two searches."""
    if old is None or new.bound is None:
        return new
    best = new
    if old.objective_value is not None and old.objective_value < (new.objective_value or inf):
        best = old
    bound = min(max(new.bound, old.bound or 0.0), best.objective_value or inf)
    return best.model_copy(update={"bound": bound})


def _least_of_all_shapes(request: PlacementRequest) -> float:
    """Return a lower bound on the objective of all shapes: the work of a batch, shared evenly."""
    if request.objective == "throughput":
        return _shared_work(Problem.from_request(request))
    by_chunks = {asked.chunks: asked for asked in questions(request)}
    return min(
        chunks * _shared_work(Problem.from_request(asked)) for chunks, asked in by_chunks.items()
    )


def _shared_work(problem: Problem) -> float:
    """Return the work of a micro-batch on each device, if layers could be cut anywhere."""
    owners = [
        (
            len(alike),
            [problem.compute_ms(layer, alike[0]) for layer in range(len(problem.layers))],
        )
        for alike in problem.alike_devices()
    ]
    return sum(work_sharing.prices_of_work(owners)) * (1 - ROUNDING)


@dataclass
class ReplicaSearch:
    """One solve over all shapes.

    Attributes:
        request: the question; one for which ``replica_shapes.may_replicate`` holds.
        search: for the placement of one pipeline.
        progress: as for ``solve``.
        stop: set it to end the search with the best so far.
        meter: counts the work.
        equal_shares: whether only equal shares count, as in other engines.
        best: the best placement so far, without what is known of all shapes.
        shares: the best shares of unlike devices; None if devices are alike.
        groups: the best stages with numbers of replicas of their own; None if not asked for.
    """

    request: PlacementRequest
    search: PipelineSearch
    progress: Progress | None
    stop: threading.Event | None
    meter: Meter
    equal_shares: bool = False
    best: Placement | None = None
    shares: UnevenShares | None = None
    groups: GroupSearch | None = None
    began: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self._tasks: list[_Task] = []

    def answer(self) -> Placement:
        """Search all shapes; the placement is not yet checked."""
        least = _least_of_all_shapes(self.request)
        alone = _Task(self.request, bound=least)
        shapes = [
            _Task(asked, shape, least) for shape, asked in replica_shapes.shapes(self.request)
        ]
        self._tasks = [*shapes, alone]
        self._in_equal_parts(
            [
                *(partial(self._search_task, task) for task in shapes),
                self._share_unevenly,
                partial(self._search_by_stage, least),
                partial(self._search_task, alone),
            ]
        )
        again = [task for task in self._tasks if self._is_open(task)]
        self._in_equal_parts([partial(self._search_again, task) for task in again])
        if self.best is None:
            return self._nothing(alone)
        time_s = monotonic() - self.began
        return replica_answer.finished(
            self.best, min(self._bounds()), self._single, self._choices(), time_s
        )

    @property
    def _value(self) -> float:
        value = None if self.best is None else self.best.objective_value
        return inf if value is None else value

    def _is_open(self, task: _Task) -> bool:
        """Return whether a shape may be better than the best."""
        is_over = self._is_stopped() or self.meter.left <= 0
        return not (task.is_infeasible or is_over or task.bound >= self._value * (1 - PROVEN_GAP))

    def _in_equal_parts(self, searches: Sequence[Callable[[float], None]]) -> None:
        """Do searches one after another, each with an equal part of the time that is left."""
        for number, search in enumerate(searches):
            search(1 / (len(searches) - number))

    def _search_again(self, task: _Task, part: float) -> None:
        """Search a shape again, if it may still be better and there is time."""
        if self._left_s() > SHORTEST_S and self._is_open(task):
            self._search_task(task, part)

    def _search_task(self, task: _Task, part: float) -> None:
        """Search for the best placement of a shape.

        Args:
            task: the shape.
            part: of the time and work that is left.
        """

        def report(found: Incumbent) -> None:
            self._report(found, task)

        progress = None if self.progress is None else report
        meter = Meter(part * self.meter.left)
        costs = None if task.shape is None else task.shape.replication
        asked = self._limited(task.asked, part)
        task.keep(self.search(asked, progress, meter, costs, task.scale * self._value))
        self.meter.done += meter.done
        if task.answer is not None and task.answer.layer_devices:
            self._offer(self._whole(task, task.answer))

    def _whole(self, task: _Task, inner: Placement) -> Placement:
        """Return the placement of all pipelines, from the placement of one."""
        if task.shape is None:
            return inner.model_copy(update={"id": self.request.content_hash()})
        return replica_answer.placement_of_shape(self.request, task.shape, inner)

    def _share_unevenly(self, part: float) -> None:
        """Search for the best shares of unlike devices, in a part of the time that is left."""
        if self.request.objective != "step":
            return
        rest_s = (1 - part) * self._left_s()
        shares = UnevenShares(
            self.request,
            lambda: self._left_s() <= rest_s or self._is_stopped(),
            self.equal_shares,
        )
        if not shares.applies():
            return
        self.shares = shares
        shares.search(self._value)
        for found in shares.found.values():
            if found.step_ms < self._value:
                self._offer(replica_answer.placement_of_shares(self.request, shares, found))

    def _search_by_stage(self, least: float, part: float) -> None:
        """Search for the best stages with numbers of replicas of their own.

        Args:
            least: a bound on their objective.
            part: of the time and work that is left.
        """
        if self.request.replicas != "by-stage":
            return
        began_s, most_s = self._left_s(), part * self._left_s()
        began_work, most_work = self.meter.done, part * self.meter.left

        def is_over(part: float = 1.0) -> bool:
            self.meter.done += 1 / PER_WORK.maps
            if self.meter.limit < inf:  # then the clock must not decide
                return self.meter.done - began_work >= part * most_work or self._is_stopped()
            return began_s - self._left_s() >= part * most_s or self._is_stopped()

        groups = GroupSearch(self.request, is_over, least)
        if not groups.applies():
            return
        self.groups = groups
        groups.search(self._value)
        best = groups.best
        if best is not None:
            assert best.groups is not None and best.costs is not None
            self._offer(
                replica_answer.placement_of_groups(
                    self.request, best.model, best.groups, best.costs
                )
            )

    def _bounds(self) -> list[float]:
        """Return a bound of each shape that is not proven infeasible."""
        bounds = [task.bound for task in self._tasks if not task.is_infeasible]
        if self.shares is not None:
            bounds += [bound for bound in self.shares.bounds.values() if bound < inf]
        if self.groups is not None and self.groups.bound < inf:
            bounds.append(self.groups.bound)
        return bounds

    def _choices(self) -> list[StepChoice]:
        """Return what is known of all choices so far."""
        found = [choice for task in self._tasks for choice in task.known()]
        if self.shares is not None:
            found += replica_answer.choices_of_shares(self.request, self.shares)
        if self.groups is not None and self.request.objective == "step":
            found += replica_answer.choices_of_groups(self.groups)
        return found

    def _offer(self, placement: Placement) -> None:
        assert placement.objective_value is not None
        if placement.objective_value < self._value:
            self.best = placement

    def _report(self, found: Incumbent, task: _Task) -> None:
        """Report a placement that a search has found, if it is better than the best shape."""
        value = found.objective_value / task.scale
        if value >= self._value or self.progress is None:
            return
        choices = self._choices()

        def placement() -> Placement:
            # other shapes are still to be searched, so nothing is proven of them
            single, time_s = self._single, monotonic() - self.began
            whole = self._whole(task, found.placement())
            own = whole.step.choices if whole.step is not None else ()
            return replica_answer.finished(whole, 0.0, single, (*choices, *own), time_s)

        self.progress(Incumbent(value, 0.0, monotonic() - self.began, placement))

    @cached_property
    def _single(self) -> SingleDevice:
        """The best that one device does."""
        if self.request.objective == "step":
            return step_answer.single_device(
                [Problem.from_request(asked) for asked in questions(self.request)]
            )
        return answer.single_device(Problem.from_request(self.request))

    def _nothing(self, alone: _Task) -> Placement:
        """Return an answer without a placement: infeasible if every shape is proven to be."""
        assert alone.answer is not None
        changed: dict[str, object] = {
            "id": self.request.content_hash(),
            "solve_time_s": monotonic() - self.began,
        }
        bounds = self._bounds()
        if bounds:
            changed |= {"status": "unknown", "infeasible": None, "bound": min(bounds)}
        return alone.answer.model_copy(update=changed)

    # Limits

    def _limited(self, asked: PlacementRequest, part: float) -> PlacementRequest:
        """Return a question with a part of the time that is left."""
        by_work = self.meter.limit < inf  # then the clock must not decide
        time_s = max(SHORTEST_S, self._left_s() * (1.0 if by_work else part))
        return asked.model_copy(update={"time_limit_s": time_s})

    def _left_s(self) -> float:
        return self.request.time_limit_s - (monotonic() - self.began)

    def _is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()
