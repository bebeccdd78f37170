"""The placement of objective ``step``: the best of all choices, with the state of each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from placer import schedule
from placer.schedule import Pipeline, Plan
from placer.schema import Infeasibility, Placement, PlacementRequest, SingleDevice, Step, TieBreaks
from placer.solver import answer, costs, pipelines
from placer.solver.cpsat import ties
from placer.solver.problem import Problem
from placer.solver.replicas.gradient_exchange import Exchange
from placer.solver.search import Incumbent
from placer.solver.step.choices import Choice, said
from placer.utils.units import count_text

NO_EXCHANGE = Exchange(*[0.0] * 5)
"""The exchange of a device without replicas."""


def found(
    request: PlacementRequest,
    choices: Sequence[Choice],
    best: Choice,
    method: str,
    broken: TieBreaks | None,
    time_s: float,
) -> Placement:
    """Return the answer: the best choice's placement under the original request, with all choices.

    Args:
        request: the question.
        choices: all choices.
        best: the choice whose placement is returned.
        method: the method that found it.
        broken: how far ties were broken.
        time_s: the duration of the search.
    """
    assert best.devices is not None
    bound = max(0.0, min(bound_of(choices), best.value))
    placement = answer.found(best.problem, best.devices, bound, method, time_s)
    single = single_device([choice.problem for choice in choices])
    speedup = single.objective_value / best.value if best.value else None
    # the answer may have renamed devices that are alike
    result = costs.costs_of(best.problem, best.problem.assignment_of(placement.layer_devices))
    assert result.pipeline is not None and result.plan is not None
    alone = dict.fromkeys(result.pipeline.places, 1)
    step = step_of(
        request, result.pipeline, result.plan, best.value, result.exchanges, alone
    ).model_copy(update={"choices": tuple(map(said, choices))})
    fields = {"id": request.content_hash(), "single_device": single, "speedup": speedup}
    return placement.model_copy(update=fields | {"step": step, "tie_breaks": broken})


def incumbent(
    request: PlacementRequest, choices: Sequence[Choice], best: Choice, method: str, time_s: float
) -> Incumbent:
    """Return a report of the best placement so far, with the current choices."""
    # The search goes on and changes the choices. The report must show the state of now, and it
    # builds the placement only if someone reads it.
    then = [replace(choice) for choice in choices]
    number = [choice is best for choice in choices].index(True)

    def placement() -> Placement:
        one = then[number]
        assert one.devices is not None
        return found(request, then, one, method, ties.unbroken(one.problem, one.devices), time_s)

    return Incumbent(best.value, min(bound_of(choices), best.value), time_s, placement)


def nothing(request: PlacementRequest, choices: Sequence[Choice], time_s: float) -> Placement:
    """Return an answer without a placement: infeasible if proven of every choice, else unknown.

    Args:
        request: the question.
        choices: all choices.
        time_s: the duration of the search.
    """
    open_choices = [choice for choice in choices if choice.reason is None]
    told = open_choices[-1] if open_choices else min(choices, key=_distance)
    reason = None if open_choices else _told(told, choices)
    placement = answer.nothing(told.problem, reason, bound_of(choices), "each choice", time_s)
    return placement.model_copy(
        update={
            "id": request.content_hash(),
            "single_device": single_device([choice.problem for choice in choices]),
        }
    )


def bound_of(choices: Sequence[Choice]) -> float:
    """Return a lower bound on the steps of all choices, in milliseconds."""
    return min((choice.bound for choice in choices if choice.reason is None), default=0.0)


def _told(choice: Choice, choices: Sequence[Choice]) -> Infeasibility | None:
    """Return the reason of the choice nearest to a placement; name the choice if it matters."""
    reason, asked = choice.reason, choice.problem.request
    if reason is None or not reason.missing_bytes or len(choices) == 1:
        return reason
    chunks = count_text(asked.chunks, "micro-batch", "micro-batches")
    which = f"the nearest choice is {chunks} of {asked.profile.batch_size} under {asked.schedule!r}"
    return reason.model_copy(update={"reason": f"{reason.reason}; {which}"})


def _distance(choice: Choice) -> tuple[bool, int]:
    """Return how far a choice is from a placement: its missing bytes, or more than any bytes."""
    short = choice.reason.missing_bytes if choice.reason is not None else 0
    return not short, short


def single_device(problems: Sequence[Problem]) -> SingleDevice:
    """Return the best that one device does, whatever the choice of which these are the problems."""
    singles = [answer.single_device(problem) for problem in problems]
    return min(singles, key=lambda single: (not single.fits, single.objective_value, single.device))


def step_of(
    request: PlacementRequest,
    pipeline: Pipeline,
    plan: Plan,
    step_ms: float,
    exchanges: Mapping[int, Exchange],
    devices_of: Mapping[int, int],
) -> Step:
    """Return the step of a pipeline as data, without choices.

    Args:
        request: the whole question.
        pipeline: its stages.
        plan: the order of their passes.
        step_ms: its time, isolated or steady-state as the request asks for.
        exchanges: by place of the pipeline, what it exchanges with its replicas; empty without
            replicas.
        devices_of: by place, the number of its devices.
    """
    optimizer_ms = pipeline.optimizer_by_device() | {
        place: one.optimizer_ms for place, one in exchanges.items()
    }
    longest = max(
        exchanges.values(),
        key=lambda one: (one.exposed_ms + one.waits_ms, one.total_ms),
        default=NO_EXCHANGE,
    )
    timeline = schedule.simulate(pipeline, plan)
    steady_state_ms, span_ms = schedule.steady_state_ms(pipeline, plan), timeline.step_ms
    busy_ms = sum(devices_of[place] * own for place, own in timeline.busy_ms.items())
    if request.step_kind == "steady-state":
        span_ms = steady_state_ms
        busy_ms += sum(devices_of[place] * own for place, own in optimizer_ms.items())
    bubble = 1 - busy_ms / (span_ms * sum(devices_of.values())) if span_ms else 0.0
    whole = request.whole_batch_size
    return Step(
        batch_size=whole,
        samples_per_s=pipelines.samples_per_s(whole, step_ms),
        bubble=min(1.0, max(0.0, bubble)),
        optimizer_ms=max(optimizer_ms.values(), default=0.0),
        reduction_ms=longest.total_ms,
        reduction_hidden_ms=max(0.0, longest.hidden_ms),
        kind=request.step_kind,
        isolated_ms=pipelines.isolated_ms(pipeline, plan),
        steady_state_ms=steady_state_ms,
        in_flight=plan.in_flight,
    )
