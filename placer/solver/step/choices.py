"""The choices of objective ``step`` besides the map: micro-batches, schedule, kind of placement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from placer.schema import (
    Infeasibility,
    Placement,
    PlacementRequest,
    Profile,
    Schedule,
    StepChoice,
)
from placer.solver import costs
from placer.solver.problem import FREE_LINK, Problem
from placer.solver.reduce import Reduction, reduced
from placer.solver.replicas.replica_shapes import pipelines_of, question_of_replicas
from placer.solver.replicas.replication import Replication
from placer.solver.step import step_bounds

TRAINING: tuple[Schedule, ...] = ("1f1b", "zero-bubble", "fill-drain")
"""The schedules of contiguous placements."""

LIKELY: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble", "fill-drain")
"""All schedules, first the one with the least memory and then the one that is usually fastest: the
search can then reject the others early."""

ON_ONE_DEVICE: tuple[Schedule, ...] = ("zero-bubble", "1f1b", "fill-drain", "interleaved")
"""The same for one device, on which all schedules take equally long by the model. Weight gradients
with a pass of their own use two streams: on an H100, a step of ResNet-101 takes 3% less, one of a
U-Net 2%, one of a GPT no less."""


@dataclass
class Choice:
    """One micro-batch size, schedule and kind of placement.

    Attributes:
        problem: the question with these.
        nodes: its layers in nodes.
        bound: a lower bound on its steps, in ms.
        devices: by layer, the device in the best placement found.
        value: its step, in ms.
        reason: the reason if it is proven infeasible.
        is_row: whether stages form a row, with cuts of low bounds as the best starts.
        cuts: the cuts into stages that are still to be tried, with their bounds; None if all were
            tried, or they are not searched.
        unproven: the lowest bound of a cut that may have a shorter step than the one simulated, in
            ms.
    """

    problem: Problem
    nodes: Reduction
    bound: float = 0.0
    devices: list[int] | None = None
    value: float = inf
    reason: Infeasibility | None = None
    is_row: bool = False
    cuts: Iterator[tuple[float, list[int] | None]] | None = None
    unproven: float = inf

    @property
    def bottleneck(self) -> Problem:
        """The same question with objective ``throughput``."""
        return bottleneck_of(self.problem)


def bottleneck_of(problem: Problem, held: int = 1) -> Problem:
    """Return a question of objective ``step`` as one for a small bottleneck with the same maps.

    Args:
        problem: the placement problem.
        held: where micro-batches in flight are counted segment by segment, the assumed number of
            each. With one, an infeasible result is proven. With all, a placement is feasible.
    """
    changed = {"objective": "throughput", "transfers": "overlapped", "break_ties": False}
    # Transfers have lanes of their own in a step, so they overlap with compute.
    asked = problem.request.model_copy(update=changed)
    if costs.by_segment(problem):
        asked = asked.model_copy(update={"chunks": held})
    return replace(problem, request=asked)


def work_alone(problem: Problem) -> Problem:
    """Return the same question without transfer times: several lanes may overlap on a device."""
    numbers = range(len(problem.devices))
    links = tuple(
        tuple(FREE_LINK if a != b and problem.links[a][b] is not None else None for b in numbers)
        for a in numbers
    )
    return replace(problem, links=links)


def questions(request: PlacementRequest) -> Iterator[PlacementRequest]:
    """Return the request once for each profile, micro-batches, schedule and kind of placement."""
    for profile, chunks in request.micro_batches():
        for contiguous, order in kinds(request):
            yield question(request, profile, chunks, order, contiguous)


def question(
    request: PlacementRequest, profile: Profile, chunks: int, order: Schedule, contiguous: bool
) -> PlacementRequest:
    """Return the request with everything chosen but the map."""
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


def question_of(request: PlacementRequest, placement: Placement) -> PlacementRequest | None:
    """Return the question with everything but the map chosen as in a placement.

    ``best_for`` is no substitute: the search may have stopped before it tried the placement's map
    under other choices, one of which may be shorter.

    Args:
        request: the question that the placement answers.
        placement: its micro-batches, schedule and contiguity are the choice. Only objective
            ``step`` leaves one.

    Returns:
        The question, or None if the request does not allow this choice. Of a placement with
        replicas it is the question that the first pipeline answers.
    """
    if placement.replicas:
        pipelines = pipelines_of(request, placement.replicas)
        chosen = placement.chunks, placement.schedule, placement.contiguous
        return question_of_replicas(request, pipelines[0], len(pipelines), *chosen)
    if request.objective != "step":
        return request
    choice = (placement.batch_size, placement.chunks, placement.schedule, placement.contiguous)
    for asked in questions(request):
        if choice == (
            asked.profile.batch_size,
            asked.chunks,
            asked.schedule,
            asked.constraints.contiguous,
        ):
            return asked
    return None


def best_for(request: PlacementRequest, where: Mapping[str, str]) -> PlacementRequest:
    """Return the request with the micro-batches and schedule that make a map's step shortest.

    Args:
        request: the question.
        where: by layer, its device.
    """

    def rank(asked: PlacementRequest) -> tuple[bool, float]:
        problem = Problem.from_request(asked)
        result = costs.evaluate(problem, problem.assignment_of(where))
        return (
            (True, inf)
            if result is None
            else (not costs.fits(problem, result), result.objective_value)
        )

    return min(questions(request), key=rank)


def kinds(request: PlacementRequest) -> Iterator[tuple[bool, Schedule]]:
    """Return whether placements are contiguous, and the schedule."""
    asked = request.schedule
    # A device that must recompute does so for whole stages, so segments are not possible there.
    by_rule = any(
        request.constraints.recompute_on(device.name) == "always" for device in request.devices
    )
    may_be_free = request.constraints.contiguous is not True and not by_rule
    if not request.is_training:
        yield True, "fill-drain" if asked == "auto" else asked
        return
    for order in TRAINING if asked == "auto" else (asked,):
        yield True, order
    if may_be_free and asked in ("auto", "interleaved"):
        yield False, "interleaved"


def choice_of(asked: PlacementRequest, replication: Replication | None = None) -> Choice:
    """Return a question with all chosen but the map; nothing is known of it yet.

    Args:
        asked: the question.
        replication: what replicas of its devices cost; None without replicas.
    """
    problem = replace(Problem.from_request(asked), replication=replication)
    return Choice(problem, reduced(problem))


def bounded(choice: Choice, over: Callable[[], bool] = lambda: False) -> Choice:
    """Return the choice with its first bound, as far as there is time for it.

    Args:
        choice: gets the bound.
        over: asked between the parts of the bound.
    """
    if all(choice.nodes.allowed):
        choice.bound = step_bounds.any_placement(choice.problem, choice.nodes, over)
    return choice


def in_order(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices in search order: lowest bound first, then likely schedules."""
    by_chunks: dict[int, list[Choice]] = defaultdict(list)
    for choice in sorted(choices, key=_likely):
        by_chunks[choice.problem.request.chunks].append(choice)
    # Choices with equal micro-batches have similar bounds and maps: the map of the first one is
    # often a good start for the next, so they follow one another.
    alike = sorted(by_chunks.values(), key=lambda several: min(choice.bound for choice in several))
    return [choice for several in alike for choice in several]


def _likely(choice: Choice) -> int:
    schedule = choice.problem.request.schedule
    assert schedule != "auto"  # that is chosen
    order = ON_ONE_DEVICE if len(choice.problem.devices) == 1 else LIKELY
    return order.index(schedule)


def said(choice: Choice) -> StepChoice:
    """Return the state of the choice as data."""
    request = choice.problem.request
    assert request.schedule != "auto"
    found = choice.devices is not None
    replication = choice.problem.replication
    replicas = 1 if replication is None else replication.replicas
    stages = len(set(choice.devices)) if choice.devices is not None else None
    return StepChoice(
        batch_size=replicas * request.profile.batch_size,
        chunks=request.chunks,
        schedule=request.schedule,
        contiguous=choice.problem.contiguous,
        replicas=replicas,
        stages=stages if request.replicas != "never" else None,
        objective_value=choice.value if found else None,
        bound=min(choice.bound, choice.value) if choice.reason is None else None,
    )
