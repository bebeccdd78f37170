"""Objective ``step``: micro-batches, schedule, interleaving and map together, for the shortest whole batch.

    for every micro-batch size, schedule and kind of placement: a choice, with a lower bound on its steps
      starts           cuts of the row where the bound is lowest, the best map by bottleneck, maps of other choices
      small changes    nodes to the other side of a cut, devices swapped, each simulated
      cuts of a row    every cut whose bound is below the best step, simulated: what is left out is proven not better
    choices whose bound is not below the best step found are left alone

The bound of the answer is the lowest of its choices' (see ``step_bounds``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from random import Random
from time import monotonic

from placer import schedule
from placer.schema import Infeasibility, Placement, PlacementRequest, Profile, Schedule, SingleDevice, Step, StepChoice
from placer.solver import answer, costs, pipelines, step_bounds, step_moves
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced

BottleneckSearch = Callable[[Problem], Placement]
Found = Callable[[float, float, float], None]
"""Called with the step of a better placement, the bound so far, and the time in seconds."""

TRAINING: tuple[Schedule, ...] = ("1f1b", "zero-bubble", "fill-drain")
"""The schedules of contiguous placements."""

SHORTEST_MS = 1e-9
"""Of a shorter step it is not said how many samples it does in a second."""

MOST_ROUNDS = 4
STARTS = 16
"""Cuts of a row from which small changes start."""

PATIENCE = 4
"""So many climbs in a row that bring nothing better end the search of a choice that is no row."""

FIRST_SHARE = 0.5
"""How much of the time that is left all choices together get at first."""

SEARCH_SHARE = 0.3
"""How much of a choice's time the search for the smallest bottleneck may take."""


@dataclass
class Choice:
    """One micro-batch size, schedule and kind of placement.

    Attributes:
        problem: the question with these.
        nodes: its layers in nodes.
        bound: no step of it is shorter, in ms.
        devices: by layer, the device in the best placement found.
        value: its step, in ms.
        reason: why there is none, where that is proven.
        cuts: those of a row that were not looked at yet, with their bounds; None where the model is none.
    """

    problem: Problem
    nodes: Reduction
    bound: float
    devices: list[int] | None = None
    value: float = inf
    reason: Infeasibility | None = None
    cuts: Iterator[tuple[float, list[int]]] | None = None

    @property
    def bottleneck(self) -> Problem:
        """The same question with objective ``throughput``."""
        asked = self.problem.request.model_copy(update={"objective": "throughput", "transfers": "overlapped"})
        if asked.schedule == "interleaved" and not self.problem.contiguous:
            asked = asked.model_copy(update={"chunks": 1})  # at least one is in flight: infeasible is infeasible
        return replace(self.problem, request=asked)


def questions(request: PlacementRequest) -> Iterator[PlacementRequest]:
    """What is asked, with one profile, number of micro-batches, schedule and kind of placement at a time."""
    for profile, chunks in request.micro_batches():
        for contiguous, order in _kinds(request):
            yield question(request, profile, chunks, order, contiguous)


def question(
    request: PlacementRequest, profile: Profile, chunks: int, order: Schedule, contiguous: bool
) -> PlacementRequest:
    """What is asked, with all that objective ``step`` chooses chosen, but the map."""
    fixed = {
        "profile": profile,
        "profiles": (),
        "batch_size": None,
        "cluster": request.placed_on,
        "chunks": chunks,
        "schedule": order,
        "constraints": request.constraints.model_copy(update={"contiguous": contiguous}),
        "explain": False,
    }
    return request.model_copy(update=fixed)


def best_for(request: PlacementRequest, where: Mapping[str, str]) -> PlacementRequest:
    """What is asked, with the micro-batches and the schedule chosen that make the step of a map shortest.

    Args:
        request: the question.
        where: by layer, its device.
    """

    def rank(asked: PlacementRequest) -> tuple[bool, float]:
        problem = Problem.from_request(asked)
        index = {device.name: number for number, device in enumerate(problem.devices)}
        result = costs.evaluate(problem, [index[where[layer.name]] for layer in problem.layers])
        return (True, inf) if result is None else (not costs.fits(problem, result), result.objective_value)

    return min(questions(request), key=rank)


def _kinds(request: PlacementRequest) -> Iterator[tuple[bool, Schedule]]:
    """Whether placements are contiguous, and the schedule."""
    asked, may_be_free = request.schedule, request.constraints.contiguous is not True
    if not request.is_training:
        yield True, "fill-drain" if asked == "auto" else asked
        return
    for order in TRAINING if asked == "auto" else (asked,):
        yield True, order
    if may_be_free and asked in ("auto", "interleaved"):
        yield False, "interleaved"


@dataclass
class StepSearch:
    """One search for the shortest step.

    Attributes:
        request: the question.
        search: answers a question with objective ``throughput``.
        found: told of better placements.
        stop: set it to end the search with the best so far.
    """

    request: PlacementRequest
    search: BottleneckSearch
    found: Found | None = None
    stop: threading.Event | None = None
    began: float = field(default_factory=monotonic)

    def answer(self) -> Placement:
        """The best placement of the best choice; not yet checked."""
        self.choices = sorted(map(_choice, questions(self.request)), key=lambda choice: choice.bound)
        self.best: Choice = self.choices[0]
        self.method = "one device"
        for choice in self.choices:
            for device in range(len(choice.problem.devices)):
                self._offer(choice, [device] * len(choice.problem.layers), "one device")
        for number, choice in enumerate(self.choices):
            self._work(choice, self._time_s() + FIRST_SHARE * self._left_s() / (len(self.choices) - number))
        rows = [choice for choice in self.choices if choice.cuts is not None]
        for number, choice in enumerate(rows):
            self._all_cuts(choice, self._time_s() + self._left_s() / (len(rows) - number))
        return self._placement() if self.best.devices is not None else self._nothing()

    def _work(self, choice: Choice, until: float) -> None:
        """Search one choice, if it may be better."""
        if self._closed(choice):
            return

        self._start(choice, until)
        if choice.devices is not None:
            self._climb(choice, choice.devices, until)
        if choice.cuts is None:
            self._climb_again(choice, until)
        self._all_cuts(choice, until)

    def _climb(self, choice: Choice, start: list[int], until: float) -> None:
        """Small changes that shorten the step, as long as there are any."""

        def over() -> bool:
            return self._over(choice, until)

        climbed = step_moves.climb(choice.problem, choice.nodes, start, _step_of(choice), over)
        self._offer(choice, climbed, "small changes")

    def _climb_again(self, choice: Choice, until: float) -> None:
        """The same from near the best, until that has not helped for a while."""
        random = Random(self.request.seed)
        idle = 0
        while choice.devices is not None and idle < PATIENCE and not self._over(choice, until):
            before = choice.value
            start = step_moves.kicked(choice.problem, choice.nodes, choice.devices, random)
            self._climb(choice, start, until)
            idle = 0 if choice.value < before else idle + 1

    def _start(self, choice: Choice, until: float) -> None:
        """Placements to change: maps of other choices, the lowest cuts of a row, the smallest bottleneck, rounds."""
        for other in self.choices:
            if other.devices is not None:
                self._offer(choice, other.devices, "another choice's map")
        table = step_bounds.table(choice.problem, choice.nodes, choice.bottleneck)
        if table is not None:
            choice.cuts = table.cuts()
            for bound, devices in islice(choice.cuts, STARTS):
                choice.bound = max(choice.bound, min(bound, choice.value, self._better()))
                self._offer(choice, devices, "cuts of a row")
                if self._over(choice, until):
                    return
        if table is None or choice.devices is None:
            for devices in self._by_bottleneck(choice, until):
                self._offer(choice, devices, "smallest bottleneck")
        for devices in self._rounds(choice):
            self._offer(choice, devices, "rounds")

    def _by_bottleneck(self, choice: Choice, until: float) -> Iterator[list[int]]:
        """The map of the smallest bottleneck; or the proof that there is none at all."""
        asked = choice.bottleneck
        limit_s = max(0.01, SEARCH_SHARE * (until - self._time_s()))
        limited = replace(asked, request=asked.request.model_copy(update={"time_limit_s": limit_s}))
        placement = self.search(limited)
        choice.reason = placement.infeasible
        if placement.layer_devices:
            index = {device.name: number for number, device in enumerate(choice.problem.devices)}
            yield [index[device] for device in placement.layer_devices.values()]

    def _rounds(self, choice: Choice) -> Iterator[list[int]]:
        """Where a device may have several segments: the layers dealt out to the devices, round after round."""
        if choice.problem.contiguous:
            return
        devices = [list(range(len(choice.problem.devices)))]
        result = costs.evaluate(self.best.problem, self.best.devices) if self.best.devices is not None else None
        if result is not None and list(result.stages) != devices[0]:
            devices.append(list(result.stages))
        for used in devices:
            for times in range(1, MOST_ROUNDS + 1):
                if len(used) <= choice.problem.most_devices and len(used) * times <= len(choice.nodes.nodes):
                    yield step_moves.rounds(choice.problem, choice.nodes, used, times)

    def _all_cuts(self, choice: Choice, until: float) -> None:
        """Try every cut of a row that may be better, the lowest bound first: none that follows is below it."""
        while choice.cuts is not None and not self._over(choice, until):
            bound, devices = next(choice.cuts, (inf, None))
            choice.bound = max(choice.bound, min(bound, choice.value, self._better()))
            if devices is None:
                choice.cuts = None
            else:
                self._offer(choice, devices, "cuts of a row")

    def _over(self, choice: Choice, until: float) -> bool:
        return self._stopped() or self._time_s() > until or self._closed(choice)

    def _offer(self, choice: Choice, devices: list[int], method: str) -> None:
        """Keep an assignment if it meets every requirement and is better."""
        result = _judged(choice.problem, devices)
        if result is None or result.objective_value >= choice.value:
            return
        before = self.best.value
        choice.devices, choice.value = devices, result.objective_value
        if choice.value < before:
            self.best, self.method = choice, method
            if self.found is not None:
                self.found(choice.value, min(self._bound(), choice.value), self._time_s())

    def _better(self) -> float:
        """The step from which a placement counts as better than the best so far."""
        return self.best.value * (1 - answer.PROVEN_GAP / 2)

    def _closed(self, choice: Choice) -> bool:
        return choice.bound >= self._better() or choice.reason is not None

    def _bound(self) -> float:
        return min((choice.bound for choice in self.choices if choice.reason is None), default=0.0)

    def _stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    def _time_s(self) -> float:
        return monotonic() - self.began

    def _left_s(self) -> float:
        return max(0.0, self.request.time_limit_s - self._time_s())

    def _placement(self) -> Placement:
        """The best as it is returned: under the whole question's name, with all choices."""
        best = self.best
        assert best.devices is not None
        bound = max(0.0, min(self._bound(), best.value))
        placement = answer.found(best.problem, best.devices, bound, self.method, self._time_s())
        single = self._single_device()
        speedup = single.objective_value / best.value if best.value else None
        fields = {"id": self.request.content_hash(), "single_device": single, "speedup": speedup}
        return placement.model_copy(update=fields | {"step": self._step()})

    def _nothing(self) -> Placement:
        """There is none, if that is proven of every choice; else none was found."""
        open_choices = [choice for choice in self.choices if choice.reason is None]
        last = (open_choices or self.choices)[-1]
        reason = None if open_choices else last.reason
        placement = answer.nothing(last.problem, reason, self._bound(), "each choice", self._time_s())
        return placement.model_copy(update={"id": self.request.content_hash(), "single_device": self._single_device()})

    def _single_device(self) -> SingleDevice:
        """The best that one device does, whatever the choice."""
        singles = [answer.single_device(choice.problem) for choice in self.choices]
        return min(singles, key=lambda single: (not single.fits, single.objective_value, single.device))

    def _step(self) -> Step:
        best, problem = self.best, self.best.problem
        assert best.devices is not None
        result = costs.evaluate(problem, best.devices)
        assert result is not None
        pipeline = pipelines.pipeline_of(problem, best.devices, result.stages, result.recompute)
        timeline = schedule.simulate(pipeline, pipelines.plan_of(problem, pipeline))
        return Step(
            batch_size=self.request.whole_batch_size,
            samples_per_s=1e3 * self.request.whole_batch_size / best.value if best.value > SHORTEST_MS else None,
            bubble=min(1.0, max(0.0, timeline.bubble)),
            optimizer_ms=pipelines.optimizer_ms(problem, best.devices),
            choices=tuple(map(_said, self.choices)),
        )


def _choice(asked: PlacementRequest) -> Choice:
    problem = Problem.from_request(asked)
    nodes = reduced(problem)
    bound = step_bounds.any_placement(problem, nodes) if all(nodes.allowed) else 0.0
    return Choice(problem, nodes, bound)


def _judged(problem: Problem, devices: list[int]) -> costs.Costs | None:
    """What an assignment costs; None if it breaks a requirement."""
    if not costs.allowed(problem, devices):
        return None
    result = costs.evaluate(problem, devices)
    return result if result is not None and costs.fits(problem, result) else None


def _step_of(choice: Choice) -> Callable[[list[int]], float]:
    """What an assignment's step takes; infinite if it breaks a requirement."""

    def step_ms(devices: list[int]) -> float:
        result = _judged(choice.problem, devices)
        return inf if result is None else result.objective_value

    return step_ms


def _said(choice: Choice) -> StepChoice:
    request = choice.problem.request
    assert request.schedule != "auto"
    found = choice.devices is not None
    return StepChoice(
        batch_size=request.profile.batch_size,
        chunks=request.chunks,
        schedule=request.schedule,
        contiguous=choice.problem.contiguous,
        objective_value=choice.value if found else None,
        bound=min(choice.bound, choice.value) if choice.reason is None else None,
    )
