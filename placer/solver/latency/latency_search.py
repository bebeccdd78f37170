"""The search for a small latency, around the integer program.

list schedules ─▶ few nodes: a first look of the program ─▶ local search
                                                               │
                      integer program, if worth building ◀─────┤
                      else more local search             ◀─────┘
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import NamedTuple

from placer.schema.base import PROVEN_GAP
from placer.solver.cpsat.model import worth_building
from placer.solver.cpsat.runner import PER_WORK
from placer.solver.free import free_search
from placer.solver.latency import latency_moves
from placer.solver.latency.list_schedule import list_schedules
from placer.solver.search import Search


class _Ends(NamedTuple):
    """Shares of the time, or of the work, at which phases end.

    Attributes:
        lists: list schedules, of which one takes long for large models.
        moves: local search before the integer program, which needs the rest for a proof.
    """

    lists: float = 0.1
    moves: float = 0.6


ENDS = _Ends()


PATIENCE = 8
"""Rounds of local search without improvement after which the integer program follows."""

MOST_ENDS = 3_000_000
"""Ends of values times devices above which a list schedule would take longer than a second."""


def start(search: Search) -> None:
    """Offer list schedules."""
    problem = search.problem
    ends = len(problem.devices) * (
        len(problem.layers) + sum(len(value.readers) for value in problem.values)
    )
    for devices in list_schedules(problem, search.nodes) if ends <= MOST_ENDS else ():
        search.offer(devices, "list schedule")
        search.meter.done += ends / PER_WORK.scheduled_ends
        if not search.open() or search.over(ENDS.lists):
            return


def before_the_program(search: Search) -> None:
    """Go on from the best start.

    To the end of the time where there is no integer program to come.
    """
    if search.best is not None and not free_search.has_many_nodes(search.problem, search.nodes):
        free_search.look(search)
    _move_layers(search, ENDS.moves, PATIENCE)
    if not worth_building(search.problem, search.nodes, search.left_s()):
        _move_layers(search, 1.0)


def _move_layers(search: Search, share: float, patience: float = inf) -> None:
    """Search locally from the best placement, until a share of the time or work is over."""
    if search.best is None or not search.open() or search.over(share):
        return

    over = partial(search.counted, share=share)
    enough = search.bound * (1 + PROVEN_GAP / 2)
    for devices in latency_moves.improved(
        search.problem, search.nodes, search.best, over, enough, patience
    ):
        search.offer(devices, "local search")
