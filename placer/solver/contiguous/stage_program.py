"""The integer program in stage-prefix form: exact if all links are alike, else a lower bound.

    y[n, p]     node n is at stage p or before: x[n, p] = y[n, p] - y[n, p - 1]
    t[e, p]     net e touches stage p and another: its transfer keeps stage p busy
    kind[p, c]  stage p is a device of class c; devices of a class may be swapped

A net is a value with its source and readers; values with the same ends are one net. Stages are
numbered along the pipeline. This leaves no symmetry between alike devices, and needs far fewer
variables than one per node and device. Times are integers, rounded down, so their bounds hold for
the true times.

**Unlike links** give a lower bound, which is exact where values have one reader. Every transfer
takes at least its time over the quickest link. A class of devices, which may be swapped, is of one
host. Where a value's source and reader are at stages of unlike classes, the transfer takes at least
its time over the quickest link between two classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import cast

from ortools.sat.python import cp_model

from placer.schema import Link
from placer.solver.bounds import memory_bounds
from placer.solver.contiguous.transfer_windows import narrowed_windows
from placer.solver.cpsat.model import MOST_RULES
from placer.solver.cpsat.peak_constraints import PeakConstraints
from placer.solver.cpsat.runner import Answer, Limits, run
from placer.solver.cpsat.variables import BYTE_STEPS, TIME_STEPS
from placer.solver.problem import Problem
from placer.solver.reduce import Net, Reduction, best_link, joined_nets
from placer.solver.values import arcs_of

MOST_CLASSES = 3
"""The most classes of devices: with more, a variable per node and device is no worse."""


def applies(problem: Problem) -> bool:
    """Return whether the stage-prefix form can state the problem."""
    return bounds(problem) and problem.one_link is not None and knows_memory(problem)


def bounds(problem: Problem) -> bool:
    """Return whether the form can state a relaxation of the problem, so that its bound holds."""
    return (
        problem.contiguous
        and problem.request.objective == "throughput"
        and len(problem.alike_devices()) <= MOST_CLASSES
        and stage_links(problem) is not None
    )


def knows_memory(problem: Problem) -> bool:
    """Return whether the form can state the limits of memory; it does not know copies."""
    return not memory_bounds.can_bind(problem) or (
        problem.training and _steady(problem) and not problem.shared
    )


def worth_building(problem: Problem, nodes: Reduction) -> bool:
    """Return whether the integer program of this problem is small enough to be written down."""
    return (len(nodes.nodes) + len(problem.values)) * problem.most_devices <= MOST_RULES


def _steady(problem: Problem) -> bool:
    """Return whether all stages have equally many micro-batches in flight, and whole passes."""
    one = problem.request.chunks == 1 and not problem.weights_apart
    return problem.request.schedule == "fill-drain" or one or problem.may_recompute


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


Literal = cp_model.IntVar
Prefix = cp_model.IntVar | bool
Sum = cp_model.LinearExpr | int


class StageModel:
    """A CP-SAT model of one problem.

    Args:
        problem: the placement problem, of the kind that ``stage_program.bounds`` names.
        nodes: its layers, joined where they must be together.
        upper: a bottleneck that is known; only placements at least as good are searched.
        links: as ``stage_links`` gives them; their ``between`` may be left out for a quicker, lower
            bound.
        any_will_do: with it, there is no objective.
    """

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        upper: float,
        links: StageLinks | None = None,
        *,
        any_will_do: bool = False,
    ) -> None:
        self.problem, self.nodes, self.upper = problem, nodes, upper
        given = links or stage_links(problem)
        assert given is not None  # stage_program.bounds() was asked before
        self.links = given
        self.cp = cp_model.CpModel()
        self._at: dict[tuple[int, int], Literal] = {}
        self.stages = range(problem.most_devices)
        self.classes = problem.alike_devices()
        self.steps_per_ms = TIME_STEPS / upper if upper > 0 else 1.0
        self.windows = self._windows()
        self.possible = all(first <= last for first, last in self.windows)
        if not self.possible:
            return
        self._choose_stages()
        self._choose_kinds()
        self._values_run_forwards()
        self._first_stages_are_used_first()
        self._stages_hold_enough_and_not_too_much()
        self.makespan = self.cp.new_int_var(0, TIME_STEPS, "bottleneck")
        self._loads()
        if memory_bounds.can_bind(problem) and knows_memory(problem):
            self._memory()
        if not any_will_do:
            self.cp.minimize(self.makespan)

    def steps(self, time_ms: float) -> int:
        """Return a time in the model's unit, rounded down, capped above the known bottleneck."""
        return min(floor(time_ms * self.steps_per_ms), TIME_STEPS + 1)

    # Variables

    def _windows(self) -> list[tuple[int, int]]:
        """Return, by node, the first and the last stage that it can be at."""
        return narrowed_windows(self.problem, self.nodes, self.upper)

    def _choose_stages(self) -> None:
        self.y: list[list[Prefix]] = []
        for node, (first, last) in enumerate(self.windows):
            row: list[Prefix] = [
                self.cp.new_bool_var(f"y{node},{p}") if first <= p < last else p >= last
                for p in self.stages
            ]
            self.y.append(row)
            for p in range(first + 1, last):
                self.clause(self.negated(row[p - 1]), row[p])

    def _choose_kinds(self) -> None:
        """Give every stage one class that its nodes allow, within each class's size."""
        classes = range(len(self.classes))
        if len(self.classes) == 1:
            self.kind: list[list[Prefix]] = [[True] for _ in self.stages]
        else:
            kinds = [[self.cp.new_bool_var(f"kind{p},{c}") for c in classes] for p in self.stages]
            for row in kinds:
                self.cp.add_exactly_one(row)
            for c in classes:
                self.cp.add(sum(row[c] for row in kinds) <= len(self.classes[c]))
            self.kind = [list(row) for row in kinds]
        # Members of a class may be swapped, so the first one stands for all.
        for node, devices in enumerate(self.nodes.allowed):
            for c, members in enumerate(self.classes):
                work = self.steps(self._work(node, members[0]))
                if members[0] not in devices or work > TIME_STEPS:
                    for p in self.stages:
                        self.clause(*self.absent(node, p), self.negated(self.kind[p][c]))

    def _work(self, node: int, device: int) -> float:
        return self.problem.work_ms(self.nodes.nodes[node], device)

    # Clauses

    def clause(self, *literals: Prefix) -> None:
        """Require at least one of the literals to hold."""
        if not any(literal is True for literal in literals):
            self.cp.add_bool_or([literal for literal in literals if literal is not False])

    @staticmethod
    def negated(literal: Prefix) -> Prefix:
        """Return the literal that holds if this one does not."""
        if isinstance(literal, bool):
            return not literal
        # a literal too, though not of that class
        return cast("cp_model.IntVar", ~literal)

    def _before(self, node: int, stage: int) -> Prefix:
        """Return whether the node is before the stage."""
        return self.y[node][stage - 1] if stage else False

    def absent(self, node: int, stage: int) -> tuple[Prefix, Prefix]:
        """Return two literals; at least one holds if and only if the node is not at the stage."""
        return self.negated(self.y[node][stage]), self._before(node, stage)

    def can_be(self, node: int, stage: int) -> bool:
        """Return whether the node can be at the stage at all."""
        first, last = self.windows[node]
        return first <= stage <= last

    # Rules

    @cached_property
    def arcs(self) -> list[tuple[int, int]]:
        """The pairs of nodes whose second must not be at an earlier stage."""
        return sorted(self.nodes.arcs(arcs_of(self.problem.values)))

    def _values_run_forwards(self) -> None:
        """Require every reader to be at its source's stage or later."""
        for source, reader in self.arcs:
            for p in self.stages:
                self.clause(self.negated(self.y[reader][p]), self.y[source][p])

    def _first_stages_are_used_first(self) -> None:
        """Require the stages behind an empty stage to be empty.

        All ends of the pipeline are before it.
        """
        inner = {source for source, _ in self.arcs}
        ends = [node for node in self._nodes if node not in inner]
        used = [self.cp.new_bool_var(f"used{p}") for p in self.stages]
        for p in self.stages[1:]:
            self.cp.add_implication(used[p], used[p - 1])
            for node in ends:
                self.clause(used[p], self.y[node][p - 1])

    def _stages_hold_enough_and_not_too_much(self) -> None:
        """Require nodes at the stages that must be used, and limit the layers of each stage."""
        one = [(node, 1) for node in self._nodes]
        for p in range(self.problem.least_devices if self.problem.least_devices > 1 else 0):
            self.cp.add(self._sum_at(p, one) >= 1)
        if self.problem.most_layers is not None:
            sizes = [(node, len(layers)) for node, layers in enumerate(self.nodes.nodes)]
            for p in self.stages:
                self.cp.add(self._sum_at(p, sizes) <= self.problem.most_layers)

    def _loads(self) -> None:
        """Require the bottleneck to be at least the load of every stage on its class of device."""
        transfers = self._transfers()
        for p in self.stages:
            for c, members in enumerate(self.classes):
                compute = self._sum_at(
                    p, [(node, self.steps(self._work(node, members[0]))) for node in self._nodes]
                )
                sent, received = ([], []) if members[0] in self.problem.untaxed else transfers[p]
                if self.problem.request.transfers == "overlapped":
                    parts = [compute, sum(sent), sum(received)]
                else:
                    parts = [compute + sum(sent) + sum(received)]
                for part in parts:
                    self._enforce(self.cp.add(part <= self.most(p)), self.kind[p][c])

    def most(self, stage: int) -> Sum:
        """Return the longest that a stage may take, in steps."""
        return self.makespan

    @property
    def _nodes(self) -> range:
        return range(len(self.nodes.nodes))

    def _sum_at(self, stage: int, weights: Iterable[tuple[int, int]]) -> Sum:
        """Return the sum of weights of the nodes at the stage: y[n, p] - y[n, p - 1] of each."""
        constant, literals, factors = 0, [], []
        for node, weight in weights:
            for literal, factor in (
                (self.y[node][stage], weight),
                (self._before(node, stage), -weight),
            ):
                if isinstance(literal, bool):
                    constant += factor * literal
                elif factor:
                    literals.append(literal)
                    factors.append(factor)
        return cp_model.LinearExpr.weighted_sum(literals, factors) + constant

    @staticmethod
    def _enforce(constraint: cp_model.Constraint, given: Prefix) -> None:
        if not isinstance(given, bool):
            constraint.only_enforce_if(given)

    def _transfers(self) -> list[tuple[list[Sum], list[Sum]]]:
        """Return, by stage, what it sends and what it receives."""
        terms: list[tuple[list[Sum], list[Sum]]] = [([], []) for _ in self.stages]
        shared: dict[tuple[int, ...], float] = defaultdict(float)
        for net in joined_nets(self.problem, self.nodes, self.links.quickest):
            if self._costs_all_alike(net):
                shared[tuple(sorted((net.source, *net.readers)))] += net.there_ms + net.back_ms
            else:
                self._cut_by_reader(net, terms)
        for pins, time_ms in shared.items():
            for p in self.stages:
                touched = self._touched(pins, p)
                if touched is not None:
                    terms[p][0].append(self.steps(time_ms) * touched)
        if self.links.between is not None:
            _surcharges(self, self.links.between, terms)
        return terms

    def _costs_all_alike(self, net: Net) -> bool:
        """Return whether a cut net costs every stage that it touches the same, source or reader."""
        if self.problem.request.transfers == "overlapped":
            return False
        return len(net.readers) == 1 or (self.problem.multicast and not net.back_ms)

    def _touched(self, pins: Sequence[int], stage: int) -> Literal | None:
        """Return whether a net is cut and has a pin at the stage; None if it cannot be so."""
        if all(not self.can_be(node, stage) for node in pins):
            return None
        touched = self.cp.new_bool_var("")
        centre, *others = pins
        for node in others:
            self._apart(node, centre, stage, touched)
            self._apart(centre, node, stage, touched)
        return touched

    def _apart(self, node: int, other: int, stage: int, then: Prefix) -> None:
        """Require ``then`` if one node is at the stage and the other is not."""
        if not self.can_be(node, stage):
            return
        absent = self.absent(node, stage)
        if (node, other) not in self._ordered:  # the other may be before
            self.clause(*absent, self.negated(self._before(other, stage)), then)
        if (other, node) not in self._ordered:  # the other may be behind
            self.clause(*absent, self.y[other][stage], then)

    @cached_property
    def _ordered(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.arcs)

    def _cut_by_reader(self, net: Net, terms: list[tuple[list[Sum], list[Sum]]]) -> None:
        """Add the terms of a net that costs its source's stage once per stage that reads it."""
        there, back = self.steps(net.there_ms), self.steps(net.back_ms)
        taken = [self._taken(net, p) for p in self.stages]
        most = min(len(net.readers), len(self.stages) - 1)
        for p in self.stages:
            sent, received = terms[p]
            if self.can_be(net.source, p):
                cut, times = self._cut(net, p, sum(t for t in taken if t is not None), most)
                sent.append(there * (cut if self.problem.multicast else times))
                received.append(back * times)
            reader = taken[p]
            if reader is not None:
                received.append(there * reader)
                sent.append(back * reader)

    def _taken(self, net: Net, stage: int) -> Literal | None:
        """Return whether a reader is at the stage and the source is not."""
        able = [reader for reader in net.readers if self.can_be(reader, stage)]
        if not able:
            return None
        taken = self.cp.new_bool_var("")
        for reader in able:
            self._apart(reader, net.source, stage, taken)
        return taken

    def _cut(self, net: Net, stage: int, takers: Sum, most: int) -> tuple[Literal, Literal]:
        """Return literals for whether another stage reads the source's net, and for how many do."""
        cut = self.cp.new_bool_var("")
        for reader in net.readers:
            self._apart(net.source, reader, stage, cut)
        if most < 2:
            return cut, cut
        times = self.cp.new_int_var(0, most, "")
        self.cp.add(times >= cut)
        away = self.absent(net.source, stage)
        here = self.cp.new_bool_var("")
        self.clause(*away, here)
        self.cp.add(times >= takers).only_enforce_if(here)
        return cut, times

    def _memory(self) -> None:
        """Require every stage to stay within its device's limit; all have the same in flight."""
        problem = self.problem
        unit = max(1, -(-memory_bounds.most_use_bytes(problem) // BYTE_STEPS))
        held = memory_bounds.state_of_nodes(problem, self.nodes)
        state = [(node, size // unit) for node, size in enumerate(held)]
        limits = [problem.devices[members[0]].usable_bytes for members in self.classes]
        moments = PeakConstraints(problem, self.nodes, unit)
        for p in self.stages:
            use = self._sum_at(p, state) + self._passing(p, moments, min(limits))
            for c, limit in enumerate(limits):
                self._enforce(self.cp.add(use <= limit // unit), self.kind[p][c])

    def _passing(self, stage: int, moments: PeakConstraints, limit: int) -> Sum:
        """Return the bytes that passes take at a stage with all micro-batches in flight."""
        problem, place, chunks = self.problem, _AtStage(self, stage), self.problem.request.chunks
        if memory_bounds.holds_state_alone(problem):
            return 0
        if problem.may_recompute:  # what is found is evaluated
            return moments.of_training(place, limit)[1]
        each, landing, shared = moments.recorded(place, limit)
        return chunks * (each + (landing if chunks > 1 else 0)) + shared

    def here(self, node: int, stage: int) -> Literal | None:
        """Return a literal that holds if the node is at the stage; None if it cannot be."""
        if not self.can_be(node, stage):
            return None
        if (node, stage) not in self._at:
            self._at[node, stage] = self.cp.new_bool_var("")
            self.clause(*self.absent(node, stage), self._at[node, stage])
        return self._at[node, stage]

    def share(self, node: int, stage: int) -> Sum:
        """1 if the node is at the stage, else 0."""
        return self._sum_at(stage, [(node, 1)]) if self.can_be(node, stage) else 0

    # Search

    def solve(self, limits: Limits) -> Answer:
        """Search within limits."""
        if not self.possible:
            return Answer(None, 0.0, infeasible=True, complete=True)
        return run(self, limits)

    def read(self, value: Callable[[cp_model.IntVar], int]) -> list[int]:
        """Return, by layer, its device, from the values of a solution."""

        def holds(literal: Prefix) -> bool:
            return literal if isinstance(literal, bool) else bool(value(literal))

        free = [list(members) for members in self.classes]
        device_of = [
            free[next(c for c, kind in enumerate(row) if holds(kind))].pop(0) for row in self.kind
        ]
        return self.nodes.spread(
            [device_of[next(p for p in self.stages if holds(row[p]))] for row in self.y]
        )

    def in_unit(self, bound: float) -> float:
        """Return a bound in milliseconds."""
        return max(0.0, bound) / self.steps_per_ms


class _AtStage:
    """A stage, as the rules of its moments see it."""

    def __init__(self, model: StageModel, stage: int) -> None:
        self.cp, self._model, self._stage = model.cp, model, stage

    def here(self, node: int) -> Literal | None:
        """Return a literal that holds if the node is there; None if it cannot be."""
        return self._model.here(node, self._stage)

    def share(self, node: int) -> Sum:
        """1 if the node is there, else 0."""
        return self._model.share(node, self._stage)


# Links between unlike classes of devices


def _surcharges(model: StageModel, between: Link, terms: list[tuple[list[Sum], list[Sum]]]) -> None:
    """Add the extra time of transfers between unlike classes, once for each stage and net.

    Literals:

        of[n, c]      node n is at a stage of class c
        apart[n, r]   node n and its reader r are of unlike classes
    """
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
