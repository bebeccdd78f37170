"""The smallest set of requirements that cannot hold together, in words.

First, requirements are left out one by one, as long as the others cannot hold. Then a smaller set
is sought. For a set of requirements, a search can try whether some placement meets them all. The
requirements that a placement leaves unmet are a correction: every conflicting set contains one of
them. So the search takes a smallest set that hits every known correction. If no placement meets it,
it is the answer; otherwise the placement gives another correction.

Under objective ``step`` a placement may have any number of micro-batches, any schedule and kind, so
there are several questions::

    corrections {a, c} {b, c}  ->  {c} is tried: a placement meets it, without d
                               ->  {a, c} {b, c} {d}  ->  {c, d} ...

Source: Ignatiev et al., "Smallest MUS extraction with minimal hitting set dualization", CP 2015.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from placer.schema import Infeasibility, PlacementRequest
from placer.schema.base import LARGEST_BYTES
from placer.solver import costs
from placer.solver.bounds import memory_bounds
from placer.solver.chain import optimal_cuts
from placer.solver.components import closed_groups
from placer.solver.cpsat.model import PlacementModel, worth_building
from placer.solver.cpsat.runner import Answer
from placer.solver.explain.infeasible import CONTRADICTION, listed, plain_reason
from placer.solver.problem import FREE_LINK, ROUNDING, Problem
from placer.solver.reduce import Reduction, reduced
from placer.solver.step.choices import bottleneck_of
from placer.utils.units import bytes_text

Numbers = frozenset[int]
IMPOSSIBLE: Numbers = frozenset({-1})
"""Stands for the requirements that a placement meets where no placement exists."""
Search = Callable[[PlacementModel], Answer]


@dataclass(frozen=True)
class Requirement:
    """One thing that is asked of a placement.

    Attributes:
        words: it, for people.
        kind: ``pin``, ``ban``, ``group``, ``limit``, ``contiguous``, ``most``, ``least``,
            ``layers``, ``links`` or ``bottleneck``.
        layers: the layers that it is about.
        device: the device that it is about; -1 for none.
    """

    words: str
    kind: str
    layers: tuple[int, ...] = ()
    device: int = -1


def explained(
    alternatives: Sequence[Problem], reason: Infeasibility, search: Search, over: Callable[[], bool]
) -> Infeasibility:
    """Return the reason with the smallest conflicting set of requirements, if time allows.

    Args:
        alternatives: the infeasible problems; a placement for any of them would answer the request.
        reason: the reason that is known so far.
        search: looks for a placement.
        over: whether the time is over.
    """
    conflict = Conflict(alternatives, search, over)
    group = conflict.irreducible()
    smallest = conflict.smallest(group) if group else None
    words = tuple(
        conflict.all[number].words for number in sorted(group if smallest is None else smallest)
    )
    if not words:
        return reason
    found = {"requirements": words, "minimal": smallest is not None}
    if reason.reason == CONTRADICTION:  # nothing else is known
        found["reason"] = f"cannot hold together: {'; '.join(words)}"
    return reason.model_copy(update=found)


def requirements(alternatives: Sequence[Problem]) -> list[Requirement]:
    """Return all that is asked of a placement, whatever the way, but what every placement meets."""
    every = [
        [*_of_layers(problem), *_of_numbers(problem), *_of_devices(problem)]
        for problem in alternatives
    ]
    required = dict.fromkeys(itertools.chain(*every))
    # then it is a way's own, and nobody's rule
    if not all(problem.contiguous for problem in alternatives):
        return [requirement for requirement in required if requirement.kind != "contiguous"]
    return list(required)


def _of_layers(problem: Problem) -> Iterator[Requirement]:
    rules = problem.request.constraints
    layer_of = {layer.name: index for index, layer in enumerate(problem.layers)}
    device_of = {device.name: index for index, device in enumerate(problem.devices)}
    for name, device in rules.pinned.items():
        yield Requirement(
            f"layer {name!r} is pinned to {device!r}", "pin", (layer_of[name],), device_of[device]
        )
    for name, banned in rules.forbidden.items():
        layers = tuple(layer_of.values()) if name == "*" else (layer_of[name],)
        subject = "every layer" if name == "*" else f"layer {name!r}"
        for device in dict.fromkeys(banned):
            yield Requirement(
                f"{subject} is forbidden on {device!r}", "ban", layers, device_of[device]
            )
    for group in (*problem.request.profile.colocated, *rules.colocated):
        if len(set(group)) > 1:
            layers = tuple(sorted({layer_of[name] for name in group}))
            yield Requirement(f"layers {listed(tuple(group))} are colocated", "group", layers)


def _of_numbers(problem: Problem) -> Iterator[Requirement]:
    if problem.contiguous:
        chosen = problem.request.constraints.contiguous is not None
        unless = "" if chosen else " (unless contiguous=False)"
        yield Requirement(
            f"stages are contiguous{unless}: values never come back to a device", "contiguous"
        )
    if problem.most_devices < min(len(problem.devices), len(problem.layers)):
        yield Requirement(f"max_devices = {problem.most_devices}", "most")
    if problem.least_devices > 1:
        yield Requirement(f"min_devices = {problem.least_devices}", "least")
    if problem.most_layers is not None:
        yield Requirement(f"max_layers = {problem.most_layers}", "layers")
    if problem.request.bottleneck_ms is not None:
        yield Requirement(f"bottleneck_ms = {problem.request.bottleneck_ms:g}", "bottleneck")


def _of_devices(problem: Problem) -> Iterator[Requirement]:
    count = range(len(problem.devices))
    if any(problem.links[a][b] is None for a in count for b in count if a != b):
        yield Requirement("values pass only where there is a link: some are missing", "links")
    most = memory_bounds.most_use_bytes(problem)
    for index, device in enumerate(problem.devices):
        if device.usable_bytes < most:
            yield Requirement(
                f"{device.name!r} holds at most {bytes_text(device.usable_bytes)}",
                "limit",
                (),
                index,
            )


class Conflict:
    """The requirements of a request that cannot be met together.

    Args:
        alternatives: alternative problems; a placement for any of them would answer the request.
        search: looks for a placement.
        over: whether the time is over.
    """

    def __init__(
        self, alternatives: Sequence[Problem], search: Search, over: Callable[[], bool]
    ) -> None:
        self._alternatives, self._search, self._over = alternatives, search, over
        self.all = requirements(alternatives)
        self._corrections: list[Numbers] = []

    def irreducible(self) -> Numbers:
        """Return a group of which none can be left out, as far as time allows.

        Empty if all of it is not known to conflict.
        """
        group = self._everyone
        if self._met_with(group) != IMPOSSIBLE:
            return frozenset()
        for number in sorted(group):
            met = None if self._over() else self._met_with(group - {number})
            if met == IMPOSSIBLE:
                group -= {number}
            elif met is not None:
                self._corrections.append(self._everyone - met)
        return group

    def smallest(self, known: Numbers) -> Numbers | None:
        """Return a smallest group; None if the time does not suffice.

        Args:
            known: a group, which is taken if none is smaller.
        """
        while not self._over():
            group = _hitting_set(len(self.all), self._corrections)
            if len(group) >= len(known):
                return known
            met = self._met_with(group)
            if met is None or met == IMPOSSIBLE:
                return None if met is None else group
            self._corrections.append(self._everyone - self._grown(met))
        return None

    @property
    def _everyone(self) -> Numbers:
        return frozenset(range(len(self.all)))

    def _grown(self, met: Numbers) -> Numbers:
        """Return a maximal superset of these requirements that one found placement meets."""
        for number in sorted(self._everyone - met):
            more = (
                self._met_with(met | {number}) if number not in met and not self._over() else None
            )
            met = met if more is None or more == IMPOSSIBLE else more
        return met

    def _met_with(self, numbers: Numbers) -> Numbers | None:
        """Return all requirements that a placement for some of them meets, or None if unknown."""
        known = True
        for problem in self._alternatives:
            for shape in self._shapes(problem, numbers):
                met = self._met_in(self._only(problem, numbers, shape), numbers)
                if met is not None and met != IMPOSSIBLE:
                    return met
                known = known and met is not None
        return IMPOSSIBLE if known else None

    def _shapes(self, problem: Problem, numbers: Numbers) -> list[bool]:
        """Return whether stages may be contiguous, and otherwise, as nothing else is required."""
        if not any(requirement.kind == "contiguous" for requirement in self.all):
            return [problem.contiguous]
        asked = any(self.all[number].kind == "contiguous" for number in numbers)
        # One that need not be contiguous may be: fewer micro-batches are in flight then.
        return [True] if asked else [True, False]

    def _met_in(self, easier: Problem, numbers: Numbers) -> Numbers | None:
        """Return the same for one way that has no other requirements."""
        loose = bottleneck_of(easier) if easier.request.objective == "step" else easier
        nodes = reduced(loose)
        if plain_reason(loose, nodes) is not None:
            return IMPOSSIBLE
        for devices in self._quick(loose, nodes):
            met = self._met_by(devices, easier)
            if met >= numbers:
                return met
        if not worth_building(loose, nodes):
            return None
        answer = self._search(self._model(loose, nodes, numbers))
        if answer.devices is None:
            return IMPOSSIBLE if answer.infeasible else None
        met = self._met_by(answer.devices, easier)
        # where devices may recompute, the program allows too much
        return met if met >= numbers else None

    @staticmethod
    def _quick(easier: Problem, nodes: Reduction) -> Iterator[list[int]]:
        """Yield placements that need no search."""
        if easier.contiguous:
            cut = optimal_cuts.best_cut(replace(easier, request=_timed(easier)), nodes)
            if cut.devices is not None and costs.evaluate(easier, cut.devices) is not None:
                yield cut.devices
        for alike in easier.alike_devices():
            yield [alike[0]] * len(easier.layers)

    def _model(self, easier: Problem, nodes: Reduction, numbers: Numbers) -> PlacementModel:
        most_ms = easier.request.bottleneck_ms
        if most_ms is None or not any(self.all[number].kind == "bottleneck" for number in numbers):
            return PlacementModel(easier, nodes, any_will_do=True)
        return PlacementModel(
            replace(easier, request=_timed(easier)), nodes, upper=most_ms * (1 + ROUNDING)
        )

    def _only(self, problem: Problem, numbers: Numbers, contiguous: bool) -> Problem:
        """Return the problem with no other requirements than these."""
        count = len(problem.devices)
        asked = [self.all[number] for number in sorted(numbers)]
        kinds = {requirement.kind for requirement in asked}
        limited = {requirement.device for requirement in asked if requirement.kind == "limit"}
        ample = {"memory_bytes": LARGEST_BYTES, "reserve_bytes": 0}
        return replace(
            problem,
            allowed=_allowed(problem, asked),
            groups=closed_groups(_together(asked)),
            contiguous=contiguous,
            most_devices=problem.most_devices
            if "most" in kinds
            else min(count, len(problem.layers)),
            least_devices=problem.least_devices if "least" in kinds else 1,
            most_layers=problem.most_layers if "layers" in kinds else None,
            links=problem.links if "links" in kinds else ((FREE_LINK,) * count,) * count,
            devices=tuple(
                device if index in limited else device.model_copy(update=ample)
                for index, device in enumerate(problem.devices)
            ),
        )

    def _met_by(self, devices: Sequence[int], easier: Problem) -> Numbers:
        """Return the requirements that an answer to an easier problem meets."""
        result = costs.costs_of(easier, devices)  # the model refuses missing links and cycles
        use = [memory.total_bytes for memory in result.least_memory]
        layers = Counter(devices).values()
        # all alternatives have the same requirements for devices and layers
        problem = self._alternatives[0]
        in_time = _in_time(easier, result)
        holds: dict[str, Callable[[Requirement], bool]] = {
            "pin": lambda r: devices[r.layers[0]] == r.device,
            "ban": lambda r: all(devices[layer] != r.device for layer in r.layers),
            "group": lambda r: len({devices[layer] for layer in r.layers}) == 1,
            "contiguous": lambda _: easier.contiguous,
            "most": lambda _: len(layers) <= problem.most_devices,
            "least": lambda _: len(layers) >= problem.least_devices,
            "layers": lambda _: max(layers) <= (problem.most_layers or len(devices)),
            "links": lambda _: _passes(replace(easier, links=problem.links), devices, in_time),
            "bottleneck": lambda _: in_time,
            "limit": lambda r: use[r.device] <= problem.devices[r.device].usable_bytes,
        }
        return frozenset(
            number for number, asked in enumerate(self.all) if holds[asked.kind](asked)
        )


def _in_time(problem: Problem, result: costs.Costs) -> bool:
    """Return whether no device is busier than is asked for."""
    most_ms = problem.request.bottleneck_ms
    return most_ms is None or max(result.load_ms) <= most_ms * (1 + ROUNDING)


def _passes(problem: Problem, devices: Sequence[int], in_time: bool) -> bool:
    """Return whether values pass over the links that there are.

    Where all was in time without, in time over them.
    """
    result = costs.evaluate(problem, devices)
    return result is not None and (_in_time(problem, result) or not in_time)


def _allowed(problem: Problem, requirements: Sequence[Requirement]) -> tuple[frozenset[int], ...]:
    """Return, by layer, the devices that pins and bans leave."""
    allowed = [frozenset(range(len(problem.devices)))] * len(problem.layers)
    for requirement in requirements:
        for layer in requirement.layers if requirement.kind in ("pin", "ban") else ():
            only = frozenset({requirement.device})
            allowed[layer] = (
                allowed[layer] & only if requirement.kind == "pin" else allowed[layer] - only
            )
    return tuple(allowed)


def _together(requirements: Sequence[Requirement]) -> Iterator[tuple[int, ...]]:
    """Return layers that share a device: colocated, or pinned to one."""
    for device in {requirement.device for requirement in requirements if requirement.kind == "pin"}:
        yield tuple(r.layers[0] for r in requirements if r.kind == "pin" and r.device == device)
    for requirement in requirements:
        if requirement.kind == "group":
            yield requirement.layers


def _timed(problem: Problem) -> PlacementRequest:
    """Return the request without its objective of a small bottleneck."""
    return problem.request.model_copy(update={"objective": "throughput"})


def _hitting_set(count: int, sets: Sequence[Numbers]) -> Numbers:
    """Return a smallest set of numbers that has one of each set.

    Of those the one with the smallest numbers.
    """
    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in range(count)]
    for numbers in sets:
        model.add_bool_or([chosen[number] for number in sorted(numbers)])
    model.minimize(
        sum(literal * ((count + 1) * count + number) for number, literal in enumerate(chosen))
    )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    # no set is empty: then everything would hold together
    assert status == cp_model.OPTIMAL
    return frozenset(number for number, literal in enumerate(chosen) if solver.value(literal))
