"""Search for contiguous placements of small bottleneck: thresholds that are met or refuted.

A threshold asks less than the optimum: does any placement have a bottleneck of at most T? The
smaller T is, the more nodes must be together and the fewer stages each node can be at. So a
threshold well below the best known placement is refuted quickly, and raises the bound. A sweep
first asks for anything better, also in parts (``redivision.py``), then halves the open interval::

    bound ├────────────┼──────┼───┼──────────────┤ best known
                   2. no    4. ? 3. ?          1. ?     so the bound is the T of 2., until the
                                                        next sweep

**Bounds from parts** of the model: the layers of the busiest stages, as if they were alone::

    stages    a │ b   C   d │ e      C is the busiest: the layers of b, C and d are placed
                                     optimally on all devices, as if a and e were not there

A placement without some of its layers is a placement of the rest, and no device of it takes longer.
So the optimum of a part is a lower bound of the whole. Values from a layer that is left out are
left out too, and so are readers. Few stages are busy, for instance, in a network whose first values
are large over slow links. The other layers, which fit in many ways, then make only the whole hard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import NamedTuple

from placer.solver import costs, every_map
from placer.solver.chain import initial_placements
from placer.solver.contiguous import ideals, stage_program
from placer.solver.contiguous.merges import merged
from placer.solver.contiguous.redivision import redivide
from placer.solver.contiguous.stage_program import StageModel
from placer.solver.contiguous.unordered_nodes import UnorderedModel, unordered_nodes
from placer.solver.cpsat.runner import Answer, Meter
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced
from placer.solver.search import Search
from placer.solver.values import Value


class _Sweep(NamedTuple):
    """Effort of sweeps; work is in the measure of ``cpsat.runner.Meter``.

    Attributes:
        first: work of each question of the first sweep.
        growth: factor of the work from sweep to sweep.
        questions: the most times that a sweep asks for anything better.
        wide_gap: relative gap above which short questions come first.
        short: work of the short question.
        group_share: share of a question's work for each group of stages that is redivided.
        best_share: share of a question's work for the best placement once a better one exists.
        cut_short: share of its work from which a question counts as cut short.
    """

    first: float = 2.5
    growth: float = 4.0
    questions: int = 2
    wide_gap: float = 0.2
    short: float = 1.0
    group_share: float = 0.08
    best_share: float = 0.3
    cut_short: float = 0.9


SWEEP = _Sweep()


THRESHOLD_STEP = 0.01
"""Least distance of a sweep's thresholds, relative to the best known: closer ones take long."""

IDEALS_STEP = 0.004
"""The same for chains of ideals, which fail quickly."""

MOST_TRIES = 2
"""The most thresholds with too many ideals that are tried one after another."""


def few_ideals(search: Search, *, all_nodes: bool = False) -> None:
    """Solve a problem if its ideals are few.

    The smaller the threshold, the fewer ideals there are. So with too many ideals it asks for
    smaller thresholds. A chain within the threshold is the best of all; a threshold without a chain
    is a bound.

    Args:
        search: with a placement, or nothing is done.
        all_nodes: whether ideals must have all nodes. Otherwise they leave out unordered nodes if
            there are too many of them, which takes longer.
    """
    threshold, tries = search.better(), 0
    while _worth_chains(search, threshold) and tries < MOST_TRIES and not search.over(1.0):
        nodes = nodes_within(search, threshold)
        left_out: list[int] = []
        if ideals.too_many_unordered(search.problem, nodes):
            if all_nodes:
                return
            left_out = unordered_nodes(search.problem, nodes)
        chain = ideals.best_chain(
            search.problem, nodes, threshold, search.meter, lambda: search.over(1.0), left_out
        )
        if chain is None:
            search.too_many, tries = threshold, tries + 1
        elif chain.devices is None:
            tries = 0
            search.prove(search.nothing_below() if threshold == search.better() else threshold)
            if len(nodes.nodes) == 1:
                # no ideals are needed to tell so; more orders find better thresholds sooner
                return
        else:
            search.prove(min(chain.bound, search.nothing_below()))
            if left_out:
                _place_unordered(search, nodes, chain.devices, left_out)
                # A better placement may join nodes, so that few unordered nodes remain.
                search.too_many = threshold
                return
            search.offer(chain.devices, "ideals")
            search.too_many = 0.0  # what is left open is more than ideals know
        # Halve the range between the bound and the threshold that had too many ideals.
        threshold = (search.bound + search.too_many) / 2


def _place_unordered(
    search: Search, nodes: Reduction, devices: list[int], unordered: list[int]
) -> None:
    """Offer the best placement of the unordered nodes while the other nodes stay."""
    problem = search.problem
    if stage_program.applies(problem) and stage_program.worth_building(problem, nodes):
        model = UnorderedModel(problem, nodes, search.better(), devices, unordered)
        search.offer(model.solve(search.quietly(SWEEP.short)).devices, "ideals")


def _worth_chains(search: Search, threshold: float) -> bool:
    """Return whether ideals may tell more about a threshold than is known."""
    if search.best is None or not search.open() or not ideals.applies(search.problem):
        return False
    return search.bound < threshold < search.too_many * (1 - IDEALS_STEP)


def sweep(search: Search, *, parts: bool = True) -> None:
    """Go on until the best is proven, time or work is over, or nothing more can be learnt.

    Args:
        search: with a placement, or with a sufficient bottleneck; of a problem that
            ``stage_program.applies`` to.
        parts: whether parts of the model are searched alone for bounds.
    """
    for turn in count():
        if not search.open() or search.over(1.0):
            return
        work = SWEEP.first * SWEEP.growth**turn
        known, done = (search.value, search.bound), search.meter.done
        wide = has_wide_gap(search)
        _anything_better(search, SWEEP.short if wide else work)
        if parts and wide and search.open():
            _bound_by_parts(search, work)
        _improve(search, work, wide)
        if (
            known == (search.value, search.bound)
            and search.meter.done - done < SWEEP.cut_short * work
        ):
            # no question was cut short: asked again, each has the same answer, which costs do not
            # bear out
            return


def has_wide_gap(search: Search) -> bool:
    """Return whether the best known is so far from the bound that short questions come first."""
    return search.value - search.bound > SWEEP.wide_gap * search.value


def _bound_by_parts(search: Search, work: float) -> None:
    """Raise the bound by growing parts around the busiest stages, until they are too hard.

    Args:
        search: with a placement, or nothing is done.
        work: the most work of each part, in the measure of ``cpsat.runner.Meter``.
    """
    for layers in parts(search.problem, search.best) if search.best is not None else ():
        part = _part(search, layers, work)
        # The layers may be placed so well that they prove nothing.
        if part.best is None or part.value <= search.bound + THRESHOLD_STEP * search.value:
            continue
        few_ideals(part)
        if part.open():
            sweep(part, parts=False)
        if part.open():
            every_map.try_all(part)
        search.meter.done += part.meter.done
        search.prove(min(part.bound, search.nothing_below()))
        if part.open() or not search.open() or search.over(1.0):
            return


def _part(search: Search, layers: list[int], work: float) -> Search:
    """Return a search over some layers alone, which knows first placements of them."""
    problem = part_of(search.problem, layers)
    limited = search.request.model_copy(update={"time_limit_s": search.left_s()})
    part = Search(
        replace(problem, request=limited),
        stop=search.stop,
        meter=Meter(min(work, search.meter.left)),
        bound=search.bound,
        enough=search.enough,
    )
    assert search.best is not None
    part.offer([search.best[layer] for layer in layers], search.method)
    for start in initial_placements.starts(part.problem, part.nodes, part.counted):
        part.prove(start.bound)
        part.offer(start.devices, start.method)
    return part


def _anything_better(search: Search, work: float) -> None:
    """Ask whether any placement is better than the best known, and improve it if one is."""
    for _ in range(SWEEP.questions):
        if (
            not search.open()
            or search.over(1.0)
            or _within(search, search.better(), work).devices is None
        ):
            return
        if search.open():
            model = StageModel(search.problem, nodes_within(search), search.better())
            answer = model.solve(search.limits(SWEEP.best_share * work))
            search.prove(search.nothing_below() if answer.infeasible else answer.bound)
            search.offer(answer.devices, "integer program")


def halve(search: Search, work: float) -> None:
    """Ask thresholds between the proven bound and the best known or undecided bottleneck.

    Args:
        search: with a placement, of a problem that ``stage_program.bounds``.
        work: of each question, in the measure of ``cpsat.runner.Meter``.
    """
    hard = search.better()
    while (
        search.open()
        and hard - search.bound > THRESHOLD_STEP * search.value
        and not search.over(1.0)
    ):
        threshold = (search.bound + hard) / 2
        if not _within(search, threshold, work).infeasible:
            hard = search.better() if search.value <= threshold else threshold


def _within(search: Search, threshold: float, work: float) -> Answer:
    """Return whether a placement is within a threshold; what is found or proven is the search's."""
    nodes = nodes_within(search, threshold)
    answer = StageModel(search.problem, nodes, threshold, any_will_do=True).solve(
        search.limits(work)
    )
    if answer.infeasible:
        search.prove(search.nothing_below() if threshold == search.better() else threshold)
    search.offer(answer.devices, "integer program")
    return answer


def nodes_within(search: Search, threshold: float | None = None) -> Reduction:
    """Return the layers in as few nodes as a placement within a threshold, or a better one, has."""
    upper = search.better() if threshold is None else threshold
    if search.request.objective != "throughput" or not 0 < upper < inf:
        return search.nodes
    if search.merged is None or search.merged[0] != upper:
        nodes = merged(
            search.problem, reduced(search.problem, upper), upper, lambda: search.over(1.0)
        )
        search.merged = upper, nodes
    return search.merged[1]


def _improve(search: Search, work: float, wide: bool) -> None:
    """Apply the searches after the bounds, each only while the answer is open.

    Args:
        search: with a placement, or with a sufficient bottleneck.
        work: of each search.
        wide: whether the gap is wide, so that another search for a better placement pays.
    """
    if search.open():
        # To place parts of the best known placement again is quicker than to place all layers.
        redivide(search, nodes_within(search), SWEEP.group_share * work)
    if search.open() and wide:
        _anything_better(search, work)
    if search.open():
        few_ideals(search)
    if search.open() and not search.over(1.0):
        halve(search, work)


GROWTH = 1.5
"""Factor of a part's layers over the part before: few parts, none much too large."""


def parts(problem: Problem, devices: list[int]) -> Iterator[list[int]]:
    """Yield ever more layers around the busiest stage, ascending; never all of them.

    Args:
        problem: the placement problem.
        devices: by layer, the device in a placement.
    """
    result = costs.costs_of(problem, devices)  # it was found, so it can be
    stage_of = {device: stage for stage, device in enumerate(result.stages)}
    busiest = stage_of[max(stage_of, key=lambda device: result.load_ms[device])]

    def distance(layer: int) -> tuple[int, int]:
        stage = stage_of[devices[layer]]
        return abs(stage - busiest), layer if stage >= busiest else -layer

    nearest = sorted(range(len(devices)), key=distance)
    size = float(1 + sum(stage_of[device] == busiest for device in devices))
    while size < len(devices):
        yield sorted(nearest[: int(size)])
        size *= GROWTH


def part_of(problem: Problem, layers: Sequence[int]) -> Problem:
    """Return the problem of some layers alone.

    Args:
        problem: the placement problem.
        layers: ascending.
    """
    number = {layer: index for index, layer in enumerate(layers)}

    def some(of: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[layer] for layer in of if layer in number)

    def within(value: Value) -> Value:
        part = replace(
            value,
            source=number[value.source],
            readers=some(value.readers),
            keepers=some(value.keepers),
            unbound=frozenset(some(sorted(value.unbound))),
        )
        if not number.keys() >= {value.retained_from, value.retained_until, value.readers[-1]}:
            return replace(part, retained_bytes=0)  # less may be held
        return replace(
            part,
            retained_from=number[value.retained_from],
            retained_until=number[value.retained_until],
        )

    return replace(
        problem,
        layers=tuple(problem.layers[layer] for layer in layers),
        values=tuple(
            within(value)
            for value in problem.values
            if value.source in number and some(value.readers)
        ),
        forward_ms=tuple(problem.forward_ms[layer] for layer in layers),
        backward_ms=tuple(problem.backward_ms[layer] for layer in layers),
        allowed=tuple(problem.allowed[layer] for layer in layers),
        groups=tuple(some(group) for group in problem.groups if len(some(group)) > 1),
        loose=frozenset(some(sorted(problem.loose))),
        most_devices=min(problem.most_devices, len(layers)),
        least_devices=1,
        shared=(),  # less is held without copies
    )
