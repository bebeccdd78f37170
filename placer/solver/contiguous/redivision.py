"""Redivision of neighbouring stages: the busiest and a few neighbours are placed optimally.

    stages    a │ b   C   d │ e      C is the busiest: the nodes of b, C and d are divided again,
                                     so that none takes as long. Where devices are left over,
                                     into one stage more, and e moves on

Each time the busiest stage of the group gets faster, another stage is the busiest. Small groups
come first.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", 1998, for large neighbourhoods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placer.solver import costs
from placer.solver.components import closed_groups
from placer.solver.contiguous.stage_program import StageModel, Sum
from placer.solver.cpsat.variables import TIME_STEPS
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Reduction, joined
from placer.solver.search import Search

MOST = 4
"""The most neighbouring stages of a group: five take as long as all."""

IN_ALL = 30.0
"""Work of all groups together, as a multiple of the work of one."""

GAIN = 2e-4
"""Relative gain of a group's busiest stage below which a group does not change."""


Tried = tuple[frozenset[int], int]
"""The layers of a group, and how many stages they may take."""


@dataclass(frozen=True)
class Group:
    """Neighbouring stages.

    Attributes:
        first: the first stage.
        end: the stage behind the last.
        room: how many stages more they may become.
    """

    first: int
    end: int
    room: int

    def window(self, stage: int) -> tuple[int, int]:
        """Return the first and last stage that a stage's nodes may have afterwards."""
        if stage < self.first:
            return stage, stage
        if stage >= self.end:
            return stage + self.room, stage + self.room
        return self.first, self.end - 1 + self.room

    @property
    def stages(self) -> range:
        """The stages of the group afterwards."""
        return range(self.first, self.end + self.room)


class GroupModel(StageModel):
    """The integer program of a group: all other stages stay where they are, within ``upper``.

    Args:
        problem: the placement problem.
        nodes: its layers; none is at two stages.
        upper: the known bottleneck.
        stage_of: by node, its stage.
        group: the stages that are redivided.
        below_ms: each of them must take less than this.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        upper: float,
        stage_of: list[int],
        group: Group,
        below_ms: float,
    ) -> None:
        self._stage_of, self._group = stage_of, group
        super().__init__(problem, nodes, upper * (1 + ROUNDING))
        self.cp.add(self.makespan <= self.steps(below_ms))

    def _windows(self) -> list[tuple[int, int]]:
        return [self._group.window(stage) for stage in self._stage_of]

    def most(self, stage: int) -> Sum:
        """Return the longest that the stage may take, in steps."""
        return self.makespan if stage in self._group.stages else TIME_STEPS


def redivide(search: Search, nodes: Reduction, work: float, *, busiest_alone: bool = False) -> None:
    """Make the busiest stages quicker, then those that are next, as long as that helps.

    Args:
        search: with a placement, of a problem that ``stage_program.bounds``.
        nodes: its layers, joined where they may as well be together.
        work: of each group, in the measure of ``cpsat.runner.Meter``; all groups get ``IN_ALL``
            times as much.
        busiest_alone: to end where the busiest stage gets no quicker.
    """
    if search.best is None:
        return
    until = search.meter.done + IN_ALL * work
    current, failed = _Current(search.problem, search.best), set[Tried]()
    while search.open() and search.meter.done < until and not search.over(1.0):
        groups = current.groups(1 if busiest_alone else len(current.load_ms))
        group = next((group for group in groups if current.tried(group) not in failed), None)
        if group is None:
            return
        better = _quicker(search, nodes, current, group, work)
        if better is None or better.busy >= current.busy:
            failed.add(current.tried(group))
        else:
            search.offer(better.devices, "integer program")
            current = better


@dataclass
class _Current:
    """A placement, and what its stages take."""

    problem: Problem
    devices: list[int]

    def __post_init__(self) -> None:
        result = costs.costs_of(self.problem, self.devices)  # it was found, so it can be
        self.load_ms = [result.load_ms[device] for device in result.stages]
        self.place = {device: stage for stage, device in enumerate(result.stages)}

    @property
    def busy(self) -> list[float]:
        """The loads of the stages, the busiest first."""
        return sorted(self.load_ms, reverse=True)

    def groups(self, some: int) -> Iterator[Group]:
        """Yield groups around the busiest stages: small groups first, then idle neighbours.

        Args:
            some: the number of busiest stages to consider.
        """
        count = len(self.load_ms)
        room = min(1, self.problem.most_devices - count)
        for busiest in sorted(range(count), key=lambda stage: -self.load_ms[stage])[:some]:
            for size in range(min(2, count), min(MOST, count) + 1):
                firsts = range(max(0, busiest - size + 1), min(busiest, count - size) + 1)
                for first in sorted(
                    firsts, key=lambda first: sum(self.load_ms[first : first + size])
                ):
                    group = Group(first, first + size, room)
                    if self.most_ms(group) == self.load_ms[busiest]:
                        yield group

    def most_ms(self, group: Group) -> float:
        """Return the load of a group's busiest stage."""
        return max(self.load_ms[group.first : group.end])

    def tried(self, group: Group) -> Tried:
        """Return a key of a group that does not depend on how its stages are divided."""
        stages = range(group.first, group.end)
        held = (layer for layer, device in enumerate(self.devices) if self.place[device] in stages)
        return frozenset(held), len(group.stages)


def _quicker(
    search: Search, nodes: Reduction, current: _Current, group: Group, work: float
) -> _Current | None:
    """Return the placement with a group divided better; None if no better way is found."""
    problem = search.problem
    alike = _together(problem, nodes, current.devices)
    stage_of = [current.place[current.devices[layers[0]]] for layers in alike.nodes]
    below_ms = current.most_ms(group) * (1 - GAIN)
    answer = GroupModel(problem, alike, max(current.load_ms), stage_of, group, below_ms).solve(
        search.quietly(work)
    )
    if answer.devices is None or costs.judged(problem, answer.devices) is None:
        return None
    return _Current(problem, answer.devices)


def _together(problem: Problem, nodes: Reduction, devices: list[int]) -> Reduction:
    """Return the nodes that are each on one device, and the layers of the others."""
    whole = [layers for layers in nodes.nodes if len({devices[layer] for layer in layers}) == 1]
    return joined(problem, closed_groups([*problem.groups, *whole]))
