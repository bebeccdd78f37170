"""Unlike links in the stage-prefix form: a lower bound, exact where values have one reader.

Every transfer takes at least its time over the quickest link. A class of devices, which may be
swapped, is of one host. Where a value's source and reader are at stages of unlike classes, the
transfer takes at least its time over the quickest link between two classes. Literals:

    of[n, c]      node n is at a stage of class c
    apart[n, r]   node n and its reader r are of unlike classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from placer.schema import Link
from placer.solver.nets import Net, best_link, joined_nets
from placer.solver.problem import LARGEST_BYTES, Problem

if TYPE_CHECKING:
    from placer.solver.contiguous.stage_program import Literal, StageModel, Sum


@dataclass(frozen=True)
class StageLinks:
    """The links as the stages see them.

    Attributes:
        quickest: no transfer takes less than over this.
        between: nor any between two classes of devices less than over this; None where that is the
            same.
    """

    quickest: Link
    between: Link | None = None


def stage_links(problem: Problem) -> StageLinks | None:
    """Return the links of a problem; None if no devices are linked."""
    classes = problem.alike_devices()
    place = {device: index for index, members in enumerate(classes) for device in members}
    links = {
        (source, target): link
        for source, row in enumerate(problem.links)
        for target, link in enumerate(row)
        if link is not None and source != target
    }
    if not links:
        return None
    across = [link for (source, target), link in links.items() if place[source] != place[target]]
    quickest, between = best_link(list(links.values())), best_link(across) if across else None
    return StageLinks(quickest, None if between == quickest else between)


def quickest_everywhere(problem: Problem, quickest: Link, time_limit_s: float) -> Problem:
    """Return the problem with that link between all devices and no limits of memory.

    No harder, and links all alike.

    Args:
        problem: the placement problem.
        quickest: as good as any link.
        time_limit_s: for the search of its answer.
    """
    room = LARGEST_BYTES
    numbers = range(len(problem.devices))
    return replace(
        problem,
        request=problem.request.model_copy(
            update={"time_limit_s": time_limit_s, "break_ties": False}
        ),
        devices=tuple(
            device.model_copy(update={"memory_bytes": room, "reserve_bytes": 0})
            for device in problem.devices
        ),
        links=tuple(tuple(quickest if a != b else None for b in numbers) for a in numbers),
    )


def surcharges(model: StageModel, between: Link, terms: list[tuple[list[Sum], list[Sum]]]) -> None:
    """Add the extra time of transfers between unlike classes, once for each stage and net."""
    of = [_classes_of(model, node) for node in range(len(model.nodes.nodes))]
    quick = joined_nets(model.problem, model.nodes, model.links.quickest)
    slow = {
        (net.source, net.readers): net for net in joined_nets(model.problem, model.nodes, between)
    }
    for net in quick:
        longer = slow[net.source, net.readers]
        there = model.steps(longer.there_ms - net.there_ms)
        back = model.steps(longer.back_ms - net.back_ms)
        if there or back:
            _surcharge(model, net, there, back, of, terms)


def _surcharge(
    model: StageModel,
    net: Net,
    there: int,
    back: int,
    of: Sequence[Sequence[Literal]],
    terms: list[tuple[list[Sum], list[Sum]]],
) -> None:
    apart = {reader: _apart(model, of[net.source], of[reader]) for reader in net.readers}
    for stage in model.stages:
        sent, received = terms[stage]
        sends = _any(model, stage, [(net.source, literal) for literal in apart.values()])
        takes = _any(model, stage, list(apart.items()))
        if sends is not None:
            sent.append(there * sends)
            received.append(back * sends)
        if takes is not None:
            received.append(there * takes)
            sent.append(back * takes)


def _classes_of(model: StageModel, node: int) -> list[Literal]:
    """Return, by class, whether the node's stage is of it."""
    found = [model.cp.new_bool_var("") for _ in model.classes]
    model.cp.add_exactly_one(found)
    for stage in model.stages:
        if model.can_be(node, stage):
            for kind, literal in zip(model.kind[stage], found, strict=True):
                model.clause(*model.absent(node, stage), model.negated(kind), literal)
    return found


def _apart(model: StageModel, one: Sequence[Literal], other: Sequence[Literal]) -> Literal:
    apart = model.cp.new_bool_var("")
    for mine, its in zip(one, other, strict=True):
        model.clause(model.negated(mine), its, apart)
    return apart


def _any(model: StageModel, stage: int, pairs: Sequence[tuple[int, Literal]]) -> Literal | None:
    """Return a literal that holds if a node is at the stage and its own literal holds.

    The result is None if none can be there.
    """
    able = [(node, literal) for node, literal in pairs if model.can_be(node, stage)]
    if not able:
        return None
    found = model.cp.new_bool_var("")
    for node, literal in able:
        model.clause(*model.absent(node, stage), model.negated(literal), found)
    return found
