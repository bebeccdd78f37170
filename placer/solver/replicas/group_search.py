"""The search for stages that each have a number of replicas of their own, best bound first.

    for every measured size, schedule and units of a micro-batch: a model of costs, with bounds
    plans grow by one stage at a time, the plan with the lowest bound first
    a plan of all layers has its costs computed, on devices that are neighbours
    plans whose bound is not below the best objective are left out

Stages begin and end at ideals (``stage_ideals.py``), so these are all plans. Where there are too
many ideals, plans end at some of them, and only the shared work bounds the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, lcm
from typing import Protocol

from placer.schema import PlacementRequest, Profile, Schedule
from placer.schema.base import PROVEN_GAP
from placer.solver.problem import Problem
from placer.solver.replicas.group_bounds import GroupBounds, Part
from placer.solver.replicas.group_costs import Group, GroupCosts, GroupModel, units_of
from placer.solver.replicas.stage_ideals import stage_ideals
from placer.solver.replicas.stage_tables import StageTables
from placer.solver.step.choices import TRAINING, question

MOST_UNITS = 5_040
"""The most units of a micro-batch: the least common multiple of 1 to 10, less a factor. More are
only needed by numbers of replicas that have next to no common divisor."""

Stages = tuple[tuple[int, int, int], ...]
"""The ideals before and at the end of stages, and numbers of replicas."""

BOUNDS_PART = 0.4
"""The part of the time after which no more bounds are computed."""

Open = tuple[float, int, int, "GroupChoice", Part, Iterator[Part]]


class IsOver(Protocol):
    """Whether the time is over."""

    def __call__(self, part: float = 1.0) -> bool:
        """Return whether this part of the time is over."""


@dataclass(eq=False)
class GroupChoice:
    """One measured size, schedule and number of units in a micro-batch.

    Attributes:
        model: of its costs.
        bounds: of its plans.
        bound: the lowest bound of its plans that are left out or still open.
        groups: of the best plan; None without one.
        costs: of the best plan.
    """

    model: GroupModel
    bounds: GroupBounds
    bound: float = inf
    groups: tuple[Group, ...] | None = None
    costs: GroupCosts | None = None

    @property
    def value(self) -> float:
        """The objective of the best plan."""
        return inf if self.costs is None else self.costs.value

    @property
    def request(self) -> PlacementRequest:
        """The question, of one unit on all devices."""
        return self.model.problem.request


@dataclass
class GroupSearch:
    """The search for the best plan.

    Attributes:
        request: the question.
        is_over: whether some part of the time is over, by default all.
        least: a bound that holds for every plan.
        choices: with their best plans.
        bound: a bound on all plans but the best ones; infinite if there is no other.
    """

    request: PlacementRequest
    is_over: IsOver
    least: float
    choices: list[GroupChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bound = self.least
        self._numbers = itertools.count()
        self._problem = Problem.from_request(self.request)
        self._cluster = {(link.source, link.target): link for link in self.request.placed_on.links}
        rules = self.request.constraints
        self._most = min(rules.max_devices or inf, len(self.request.devices))

    def applies(self) -> bool:
        """Return whether all devices are alike, and stages are contiguous."""
        kinds = {
            (device.type, device.usable_bytes, rule)
            for device, rule in zip(self._problem.devices, self._problem.recompute, strict=True)
        }
        return (
            len(kinds) == 1
            and self.request.constraints.contiguous is not False
            and self._most > 2
            and len(self._problem.layers) > 1
        )

    def search(self, known: float) -> None:
        """Search for plans that are better than a known objective.

        Args:
            known: an objective; plans that are not below it are left out.
        """
        models = self._models()
        heap = self._begun(models)
        is_complete = next(models, None) is None
        self._best_first(heap, known)
        for bound, _, _, choice, _, _ in heap:
            if choice.bounds.tables.ideals.is_complete:
                choice.bound = min(choice.bound, max(bound, self.least))
        if is_complete:
            self.bound = min((choice.bound for choice in self.choices), default=inf)

    def _begun(self, models: Iterator[GroupChoice]) -> list[Open]:
        """Return the plans without stages of all choices for which there is time."""
        heap: list[Open] = []
        for choice in models:
            self.choices.append(choice)
            if not choice.bounds.tables.ideals.is_complete:
                choice.bound = self.least
            begin = choice.bounds.first()
            if begin.bound < inf:
                heap.append((begin.bound, 0, next(self._numbers), choice, begin, iter(())))
            if self.is_over(BOUNDS_PART):
                break
        heapq.heapify(heap)
        return heap

    def _best_first(self, heap: list[Open], known: float) -> None:
        """Extend the plan with the lowest bound, as long as it may be better than the best."""
        while heap and not self.is_over():
            # at least one plan, to be compared
            if heap[0][0] >= self._limit(known) and self.best is not None:
                break
            _, _, _, choice, part, siblings = heapq.heappop(heap)
            self._open(heap, choice, siblings)
            if part.position == len(choice.bounds.tables.ideals.members) - 1:
                self._offer(choice, part.stages, part.bound)
            else:
                self._open(heap, choice, choice.bounds.following(part))

    @property
    def best(self) -> GroupChoice | None:
        """The choice with the best plan; None without one."""
        found = [choice for choice in self.choices if choice.costs is not None]
        return min(found, key=lambda choice: choice.value, default=None)

    def _open(self, heap: list[Open], choice: GroupChoice, parts: Iterator[Part]) -> None:
        """Add the next of some plans, which come lowest bound first."""
        part = next(parts, None)
        if part is not None:
            number = next(self._numbers)
            heapq.heappush(heap, (part.bound, -len(part.stages), number, choice, part, parts))

    def _limit(self, known: float) -> float:
        """Return the bound from which on plans are left out."""
        best = min([known, *(choice.value for choice in self.choices)])
        return best * (1 - PROVEN_GAP / 2)

    def _offer(self, choice: GroupChoice, stages: Stages, bound: float) -> None:
        """Compute the costs of a plan, and keep it if it is the best of its choice.

        Args:
            choice: that the plan belongs to.
            stages: of the plan.
            bound: of the plan on whatever devices.
        """
        # Plans with one number of replicas for all stages belong to the search for equal pipelines.
        counts = [count for _, _, count in stages]
        least = self.request.constraints.min_devices or 1
        is_own = len(set(counts)) > 1 and units_of(counts) == choice.model.units
        if not is_own or not least <= sum(counts) <= self._most:
            return
        if choice.bounds.tables.ideals.is_complete and self._problem.one_link is None:
            choice.bound = min(choice.bound, max(bound, self.least))  # of other groups of devices
        for groups in self._seated(choice, stages):
            result = choice.model.evaluate(groups, choice.value)
            if result is not None:
                choice.groups, choice.costs = groups, result

    def _seated(self, choice: GroupChoice, stages: Stages) -> Iterator[tuple[Group, ...]]:
        """Yield the groups of a plan on devices: stages in order, and large stages in one host."""
        counts = [count for _, _, count in stages]
        layers = choice.bounds.tables.ideals.stages([0, *(stop for _, stop, _ in stages)])
        hosts: dict[str, list[int]] = {}
        for number, device in enumerate(self._problem.devices):
            hosts.setdefault(device.host, []).append(number)
        free = itertools.chain.from_iterable(hosts.values())
        seats = [[tuple(itertools.islice(free, count)) for count in counts]]
        if len(hosts) > 1:
            seats.append(_by_host(counts, list(hosts.values())))
        for devices in seats if seats[0] != seats[-1] else seats[:1]:
            yield tuple(Group(*stage) for stage in zip(layers, devices, strict=True))

    # Models

    def _models(self) -> Iterator[GroupChoice]:
        """Yield every measured size, schedule and number of units."""
        for profile, units_in_batch in self._sizes():
            asked = question(self.request, profile, units_in_batch, TRAINING[0], contiguous=True)
            ideals = stage_ideals(Problem.from_request(asked))
            tables: dict[bool, StageTables] = {}
            for units, counts in self._units(units_in_batch):
                known: dict[bool, GroupBounds] = {}
                for schedule in self._schedules():
                    asked = question(self.request, profile, units_in_batch // units, schedule, True)
                    model = GroupModel(Problem.from_request(asked), units, self._cluster)
                    apart = schedule == "zero-bubble"
                    if apart not in tables:  # other schedules have the same
                        tables[apart] = StageTables(model.problem, ideals)
                    if apart not in known:
                        known[apart] = GroupBounds(model, counts, tables[apart], int(self._most))
                    yield GroupChoice(model, known[apart])

    def _sizes(self) -> list[tuple[Profile, int]]:
        if self.request.objective == "step":
            return self.request.micro_batches()
        return [(self.request.profile, self.request.chunks)]

    def _schedules(self) -> tuple[Schedule, ...]:
        asked = self.request.schedule
        if asked == "auto":
            return TRAINING
        return () if asked == "interleaved" else (asked,)

    def _units(self, units_in_batch: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield numbers of units, with the numbers of replicas that divide them.

        They are least common multiples of numbers of replicas, and divide the batch.
        """
        possible = [n for n in range(1, int(self._most)) if units_in_batch % n == 0]
        multiples = {1}
        for count in possible:
            multiples |= {n for one in multiples if (n := lcm(one, count)) <= MOST_UNITS}
        # the most first: they leave the most numbers of replicas to choose from
        for units in sorted(multiples - {1}, reverse=True):
            if units_in_batch % units == 0:
                yield units, tuple(count for count in possible if units % count == 0)


def _by_host(counts: Sequence[int], hosts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Return devices of stages with so many replicas: large stages first, each in one host.

    A stage takes the host with the fewest free devices that suffice, or the hosts with the most.
    """
    free = [list(members) for members in hosts]
    found: dict[int, tuple[int, ...]] = {}
    for stage in sorted(range(len(counts)), key=lambda stage: -counts[stage]):
        taken: list[int] = []
        while len(taken) < counts[stage]:
            missing = counts[stage] - len(taken)
            enough = [host for host in free if len(host) >= missing]
            host = min(enough, key=len) if enough else max(free, key=len)
            part, host[:] = host[:missing], host[missing:]
            taken += part
        found[stage] = tuple(sorted(taken))
    return [found[stage] for stage in range(len(counts))]
