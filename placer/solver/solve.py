"""The portfolio: from a request to a checked placement, with its bound.

    reduce ─▶ plain reasons ─▶ bounds ─▶ best cuts of ─▶ free: pairs of ─▶ integer program ─▶ check
              against it       (work,    linear orders   devices divide    (in rounds; stages
                │              min cut)                  again, prices     are redivided between)
                ▼                          │                                 │
            infeasible                     ▼                                 ▼
                                        optimal        infeasible: why, by lifting requirements

The integer program is in stage-prefix form (``contiguous/stage_program.py``) where possible. It is
asked for thresholds on merged graphs (``merges.py``) and for parts of the placement
(``stage_search.py``, ``redivision.py``). Otherwise it has a variable per node and device
(``cpsat/model.py``). Graphs with few ideals need no program (``contiguous/ideals.py``), nor do
devices of few classes over unlike links (``order_search.py``). Objectives ``step`` and ``devices``
have their own searches (``step_search.py``, ``fewest_devices.py``), which use this one for small
bottlenecks. Where replicas are asked for, ``replica_search.py`` runs these searches for each shape.
Objective ``generation`` asks for the latency and the bottleneck of a mean pass
(``latency/generation.py``). Where ``host_memory_bytes`` or ``disk_bytes`` is given, parameters
may rest on the host (``host_weights.py``), as may optimizer state (``step/state_on_host.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import NamedTuple

from placer.errors import InputError, kind_of
from placer.exports.restriction import expressible, restricted_reason
from placer.schema import Infeasibility, Placement, PlacementRequest, TieBreaks
from placer.solver import answer, every_map
from placer.solver.bounds import simple_bounds
from placer.solver.chain import initial_placements, optimal_cuts
from placer.solver.check import check
from placer.solver.contiguous import stage_program, stage_search
from placer.solver.contiguous.order_search import none_in_any_order
from placer.solver.contiguous.redivision import redivide
from placer.solver.contiguous.stage_program import StageModel, stage_links
from placer.solver.cpsat import ties
from placer.solver.cpsat.model import MOST_RULES, PlacementModel, worth_building
from placer.solver.cpsat.runner import Answer, Meter
from placer.solver.explain import conflict, limits
from placer.solver.explain.infeasible import (
    CONTRADICTION,
    Searcher,
    plain_reason,
    reason_of_closest,
    searched_reason,
)
from placer.solver.fewest_devices import FewestSearch, Outcome
from placer.solver.free import free_search
from placer.solver.latency import generation, host_weights, latency_search
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced
from placer.solver.replicas.gradient_exchange import with_amortised_exchanges
from placer.solver.replicas.group_maps import (
    group_map,
    is_by_stage,
    unit_profile,
    units_of_map,
)
from placer.solver.replicas.replica_answer import placement_of_groups, placement_of_shape
from placer.solver.replicas.replica_search import Answered, PipelineSearch, ReplicaSearch
from placer.solver.replicas.replica_shapes import (
    Shape,
    may_replicate,
    pipelines_of,
    question_of_replicas,
    replication_of,
)
from placer.solver.replicas.replication import Replication
from placer.solver.replicas.sharding import with_sharded_step
from placer.solver.search import Incumbent, Progress, Search
from placer.solver.step import state_on_host
from placer.solver.step.choices import questions, said
from placer.solver.step.step_search import StepSearch
from placer.utils.option_checks import require_functions


class _TimeShares(NamedTuple):
    """How the portfolio divides its time.

    Attributes:
        finer_cuts: share of the time after which finer cuts of a long order end.
        only_order: the same where the order is the only one, so that cuts can prove.
        relaxed: share of the time after which the stage program does not relax memory or links.
        stages: share of the remaining time for the stage program that relaxes memory or links.
        relaxed_work: work of each question to that program: its answers prove less.
        conflict: share of the time for the conflicting requirements, once infeasibility is known.
    """

    finer_cuts: float = 0.5
    only_order: float = 0.9
    relaxed: float = 0.4
    stages: float = 0.7
    relaxed_work: float = 1.0
    conflict: float = 0.2


SHARES = _TimeShares()


__all__ = ["Incumbent", "Portfolio", "predict_pipelines", "solve"]

ROUNDS_WORK = (16.0, inf, inf, inf)
"""Work limits of the program's rounds: a better placement narrows the next, with finer steps."""


def solve(
    request: PlacementRequest,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Placement:
    """Return the best placement for a request, or the reason that none exists.

    Args:
        request: the question; ``time_limit_s``, ``workers`` and ``seed`` bound the search.
        progress: called with each better placement, maybe from another thread.
        stop: set it to end the search at any moment with the best so far.

    Returns:
        A placement with its status: ``optimal``, ``feasible`` (the time ran out or ``stop`` was
        set), ``infeasible`` with the reason, or ``unknown`` (the time ran out before any was
        found). It is the same for the same request unless the time runs out, or the share of time
        that local search may use. Every placement has passed ``check``.

    Raises:
        InputError: ``request`` is not a PlacementRequest, or its figures are too large to add up.
    """
    began = monotonic()
    if not isinstance(request, PlacementRequest):
        raise InputError(
            f"solve was given {kind_of(request)}; give a placer.PlacementRequest(profile=profile)"
        )
    require_functions(progress=progress)
    if not hasattr(stop, "is_set") and stop is not None:
        raise InputError(f"stop is {kind_of(stop)}; give a threading.Event, or leave it out")
    placement = state_on_host.solved(
        request, lambda asked: _answer(asked, progress, stop, monotonic())
    )
    if request.objective == "step":
        placement = with_sharded_step(request, placement)
    if request.explain and placement.layer_devices:
        left_s = request.time_limit_s - (monotonic() - began)
        found = limits.limits_of(request, placement, partial(solve, stop=stop), left_s)
        placement = placement.model_copy(update={"limits": found})
    check(request, placement)
    return placement


def _answer(
    request: PlacementRequest,
    progress: Progress | None,
    stop: threading.Event | None,
    began: float,
    passes: Sequence[host_weights.WeightedPass] = (),
    equal_shares: bool = False,
) -> Placement:
    """Return the placement without its limits; it is not yet checked.

    Args:
        request: the question.
        progress: as for ``solve``.
        stop: as for ``solve``.
        began: when the solve began, by the monotonic clock.
        passes: of which the request asks for the mean; empty for a single pass.
        equal_shares: whether replicas have equal shares only.
    """
    asked = expressible(request)
    # The narrowed request is internal: the answer has the id of the caller's request.
    if asked is not request:
        # all engines give replicas equal shares
        placement = _answer(asked, progress, stop, began, equal_shares=True)
        changed: dict[str, object] = {"id": request.content_hash()}
        if placement.infeasible is not None:
            changed["infeasible"] = restricted_reason(request, placement.infeasible)
        return placement.model_copy(update=changed)
    if request.objective == "generation":
        # Where parameters rest, a pass's time is not the mean pass's, so that search gets both
        # passes.
        both = generation.weighted_passes(request)
        return generation.solved(
            request,
            lambda asked, report: _answer(asked, report, stop, monotonic(), both),
            progress,
        )
    if request.may_rest:
        return host_weights.solved(
            request, lambda asked: _answer(asked, None, stop, monotonic()), stop, passes
        )
    meter = Meter(request.work_limit or inf)
    if may_replicate(request):
        placement = _replica_search(request, progress, stop, meter, equal_shares).answer()
    elif request.objective == "step":
        placement = _step_search(request, progress, stop, meter).answer()
    elif request.objective == "devices":
        placement = _fewest_search(request, progress, stop, meter).answer()
    else:
        placement = _smallest(Problem.from_request(request), progress, stop, meter)
    if placement.infeasible is not None:
        why = _conflict(request, placement.infeasible, stop, meter, began)
        placement = placement.model_copy(update={"infeasible": why})
    return placement


def _conflict(
    request: PlacementRequest,
    reason: Infeasibility,
    stop: threading.Event | None,
    meter: Meter,
    began: float,
) -> Infeasibility:
    """Return the reason, with the smallest conflicting set of requirements if time allows."""
    until = min(monotonic() + SHARES.conflict * request.time_limit_s, began + request.time_limit_s)

    def left_s() -> float:
        return until - monotonic()

    def over() -> bool:
        return left_s() <= 0 or meter.left <= 0 or (stop is not None and stop.is_set())

    search = Searcher(left_s, request.workers, request.seed, stop, meter)
    alternatives = questions(request) if request.objective == "step" else [request]
    return conflict.explained(
        [Problem.from_request(way) for way in alternatives], reason, search, over
    )


def _smallest(
    problem: Problem, progress: Progress | None, stop: threading.Event | None, meter: Meter
) -> Placement:
    """Return the placement with the smallest objective, contiguous but for colocated layers.

    So tied embeddings leave a chain a chain. The best of all free maps would take far longer to
    find, would hardly be better, and would change devices much more often.
    """
    pipeline = problem.but_for_groups()
    if pipeline is None:
        return Portfolio(problem, progress, stop, meter=meter).answer()
    search = Portfolio(pipeline, progress, stop, meter=meter)
    placement = search.answer()
    # Contiguity, which the request does not demand, may be the only reason.
    if placement.status != "infeasible":
        return placement
    return Portfolio(problem, progress, stop, meter=meter, began=search.began).answer()


def _replica_search(
    request: PlacementRequest,
    progress: Progress | None,
    stop: threading.Event | None,
    meter: Meter,
    equal_shares: bool,
) -> ReplicaSearch:
    """Return the search over shapes, with searches for the placement of one pipeline inside."""
    return ReplicaSearch(request, _pipeline_search(stop), progress, stop, meter, equal_shares)


def _pipeline_search(stop: threading.Event | None) -> PipelineSearch:
    """Return the search for the placement of one of several pipelines."""

    def pipeline(
        asked: PlacementRequest,
        progress: Progress | None,
        meter: Meter,
        replication: Replication | None,
        known_ms: float,
    ) -> Answered:
        if asked.objective == "step":
            search = _step_search(asked, progress, stop, meter, replication, known_ms)
            return Answered(search.answer(), tuple(map(said, search.choices)))
        problem = Problem.from_request(asked)
        if replication is not None:
            problem = with_amortised_exchanges(problem, replication)
        return Answered(_smallest(problem, progress, stop, meter), ())

    return pipeline


def predict_pipelines(request: PlacementRequest, placement: Placement) -> Placement | None:
    """Return a placement with replicas with what a request predicts of it.

    Args:
        request: the question, whose profile counts.
        placement: of the request's layers; its replicas are on alike devices and have equal shares.

    Returns:
        The placement of the same map, or None if the request's devices and links, limits of memory
        or measured sizes do not allow it.
    """
    if is_by_stage(placement.layer_devices, placement.replicas):
        return _predict_groups(request, placement)
    rows = pipelines_of(request, placement.replicas)
    how = placement.chunks, placement.schedule, placement.contiguous
    asked = question_of_replicas(request, rows[0], len(rows), *how)
    exchange = replication_of(request, placement.replicas)
    if asked is None or exchange is None:
        return None
    rules = asked.constraints.model_copy(update={"pinned": dict(placement.layer_devices)})
    pinned = asked.model_copy(update={"constraints": rules})
    meter = Meter(request.work_limit or inf)
    inner = _pipeline_search(None)(pinned, None, meter, exchange, inf).placement
    if not inner.layer_devices:
        return None
    device_of = {device.name: device for device in request.devices}
    members = tuple(tuple(device_of[one.device] for one in row) for row in rows)
    return placement_of_shape(request, Shape(members, exchange), inner)


def _predict_groups(request: PlacementRequest, placement: Placement) -> Placement | None:
    """Return what ``predict_pipelines`` does, for stages with different numbers of replicas."""
    where, replicas = placement.layer_devices, placement.replicas
    profile = unit_profile(request, placement.batch_size // units_of_map(where, replicas))
    if profile is None:
        return None
    how = placement.chunks, placement.schedule
    mapped = group_map(request, where, replicas, profile, *how)
    found = None if mapped is None else mapped.model.evaluate(mapped.groups, inf)
    if mapped is None or found is None:
        return None
    return placement_of_groups(request, mapped.model, mapped.groups, found)


def _step_search(
    request: PlacementRequest,
    progress: Progress | None,
    stop: threading.Event | None,
    meter: Meter,
    replication: Replication | None = None,
    known_ms: float = inf,
) -> StepSearch:
    """Return the search over micro-batches, schedules and maps, with bottleneck searches inside."""

    def bottleneck(problem: Problem, allowed: Meter, enough: float | None) -> Placement:
        return Portfolio(problem, None, stop, enough=enough, meter=allowed).answer()

    return StepSearch(
        request,
        progress,
        stop,
        meter,
        replication=replication,
        known_ms=known_ms,
        search=bottleneck,
    )


def _fewest_search(
    request: PlacementRequest, progress: Progress | None, stop: threading.Event | None, meter: Meter
) -> FewestSearch:
    """Return the search for the fewest devices, with bottleneck searches inside."""

    def look(problem: Problem, enough: float | None) -> Outcome:
        search = Portfolio(problem, None, stop, enough=enough, meter=meter)
        reason = search.answer().infeasible
        return search.best, search.bound, reason

    return FewestSearch(request, look, progress, stop, meter)


class Portfolio(Search):
    """The parts of the portfolio, one after another."""

    def answer(self) -> Placement:
        """Go through the portfolio; the placement is not yet checked."""
        reason = plain_reason(self.problem, self.nodes)
        if reason is not None:
            return self._nothing(reason, "arithmetic")
        self._start()
        if self.open() and self.request.objective == "latency":
            latency_search.before_the_program(self)
        elif self.open() and not self.problem.contiguous:
            free_search.before_the_program(self)
        if self.open():
            reason = self._program()
        if self.open() and reason is None:
            reason = self._every_map()
        if self.best is None:
            return self._nothing(reason, "integer program")
        broken = self._break_ties() if self.request.break_ties else None
        found = answer.found(self.problem, self.best, self.bound, self.method, self._time_s())
        return found.model_copy(update={"tie_breaks": broken}) if broken is not None else found

    def _start(self) -> None:
        """Offer the only possible placement, or cuts of a linear order with their bounds."""
        self.prove(simple_bounds.lower_bound(self.problem, self.nodes))
        if all(len(allowed) == 1 for allowed in self.nodes.allowed):
            self.offer(self.nodes.spread([device for (device,) in self.nodes.allowed]), "no choice")
            if self.best is not None:
                self.prove(self.value)
                return
        if self.request.objective == "latency":
            latency_search.start(self)
        for start in (
            initial_placements.starts(self.problem, self.nodes, self.counted) if self.open() else ()
        ):
            self.prove(start.bound)
            self.offer(start.devices, start.method)
            if not self.open() or (self.best is not None and self.over(1.0)):
                return
        if self.problem.contiguous:
            only_order = optimal_cuts.is_only_order(self.problem, self.nodes)
            self._cut_finer(SHARES.only_order if only_order else SHARES.finer_cuts)
            # Better placements of other orders make ideals without unordered nodes quicker.
            stage_search.few_ideals(self, all_nodes=True)
            if not only_order:
                self._cut(initial_placements.other_orders)
            stage_search.few_ideals(self)

    def _cut_finer(self, share: float) -> None:
        """Offer finer cuts of an order with many nodes, in a share of the time."""

        def left_s() -> float:
            return (
                0.0 if self.over(share) else self.left_s() - (1 - share) * self.request.time_limit_s
            )

        for cut in optimal_cuts.finer_cuts(self.problem, self.nodes, self.best, left_s):
            self.prove(cut.bound)
            self.offer(cut.devices, "linear order")
            if not self.open():
                return

    def _cut(
        self,
        orders: Callable[
            [Problem, Reduction, initial_placements.Over], Iterable[initial_placements.Start]
        ],
    ) -> None:
        """Offer cuts of other linear orders, with nodes merged that may as well be together."""
        if self.open() and not self.over(1.0):
            for start in orders(self.problem, stage_search.nodes_within(self), self.counted):
                self.offer(start.devices, start.method)
                if not self.open() or self.over(SHARES.finer_cuts):
                    return

    def _program(self) -> Infeasibility | None:
        """Run the integer program; return the reason if it proves that there is no placement."""
        if none_in_any_order(self):
            return self._reason()
        small = stage_program.worth_building(self.problem, self.nodes)
        staged = small and stage_program.applies(self.problem)
        if small and not staged and stage_program.bounds(self.problem):
            self._relax()
        if not staged and not worth_building(self.problem, self.nodes):
            return None
        return self._rounds(staged) if self.open() else None

    def _rounds(self, staged: bool) -> Infeasibility | None:
        """Run the program in rounds, each narrowed by the last; return the reason if infeasible.

        Args:
            staged: whether the stage-prefix form takes over once a placement is known.
        """
        # Where it is staged, nothing else finds a first placement, however large the program is.
        most = inf if staged else MOST_RULES
        for turn, work in enumerate(ROUNDS_WORK):
            if staged and self._has_target() and self.better() > 0:
                stage_search.sweep(self)
                return None
            if not worth_building(self.problem, self.nodes, self.left_s(), most):
                return None
            if turn == 1:
                free_search.between_rounds(self)
                if not self.open():
                    return None
            result = self._one_round(work)
            # With a target, an infeasible program only says that no placement is better than it.
            if result.infeasible and not self._has_target():
                return self._reason()
            self.prove(self.nothing_below() if result.infeasible else result.bound)
            self.offer(result.devices, "integer program")
            if not self.open() or self.over(1.0):
                return None
        return None

    def _one_round(self, work: float) -> Answer:
        """Return the program's answer for this much work, below the best known placement."""
        upper = self.better() if self._has_target() else None
        known = self.value if self.enough is None else min(self.value, self.enough)
        nodes = reduced(self.problem, known)
        return PlacementModel(self.problem, nodes, upper=upper).solve(self.limits(work))

    def _has_target(self) -> bool:
        """Return whether a placement, or a sufficient bottleneck, limits the objective."""
        return self.best is not None or self.enough is not None

    def _reason(self) -> Infeasibility:
        """Return why there is no placement."""
        # free placements are looked for next, and the reason is theirs
        if self.problem.loose:
            return Infeasibility(reason=CONTRADICTION)
        return searched_reason(self.problem, self.nodes, self._searcher())

    def _every_map(self) -> Infeasibility | None:
        """Return every map, where they are few; the reason if none is a placement."""
        nearest = every_map.try_all(self)
        if nearest is None:
            return None
        return (
            reason_of_closest(self.problem, nearest)
            if nearest
            else Infeasibility(reason=CONTRADICTION)
        )

    def _relax(self) -> None:
        """Prove a bound, and maybe find better placements, with relaxed links and memory."""
        links = stage_links(self.problem)
        if links is None or self.best is None or self.value <= 0 or self.over(SHARES.relaxed):
            return
        redivide(self, stage_search.nodes_within(self), SHARES.relaxed_work, busiest_alone=True)
        if not self.open() or self.over(1.0):
            return
        model = StageModel(self.problem, stage_search.nodes_within(self), self.better(), links)
        result = model.solve(replace(self.limits(inf), time_s=SHARES.stages * self.left_s()))
        self.prove(
            self.nothing_below() if result.infeasible else min(result.bound, self.nothing_below())
        )
        self.offer(result.devices, "integer program")
        if self.open() and not self.over(1.0):
            stage_search.halve(self, SHARES.relaxed_work)

    def _break_ties(self) -> TieBreaks:
        """Look for a placement as good that transfers less, or is better balanced."""
        assert self.best is not None

        def kept(devices: list[int] | None) -> list[int]:
            self.offer(devices, self.method)
            assert self.best is not None
            return self.best

        return ties.broken(self.problem, self.best, self.quietly, kept)

    def _searcher(self) -> Searcher:
        """Return the search for reasons; it has half of the time, the conflict the other."""
        return Searcher(
            lambda: self.left_s() / 2,
            self.request.workers,
            self.request.seed,
            self.stop,
            self.meter,
        )

    def _nothing(self, reason: Infeasibility | None, method: str) -> Placement:
        return answer.nothing(self.problem, reason, self.bound, method, self._time_s())
