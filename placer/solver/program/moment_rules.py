"""The worst moment of a training step as constraints of an integer program, for one device or one stage.

    kept[t]    what one micro-batch keeps there of the layers up to step t
    there[t]   kept[t], and the values that wait for a later reader
    back[t]    kept[t], and the gradients that wait for a later step backwards
    moment     at least there[t] + forward workspace and back[t] + backward workspace of every layer t that is there

``there`` and ``back`` change at few steps, so they are running sums: the constraints are linear in layers and values.

Recorded passes have memory of their own, so that forwards and backwards have a worst moment each:

    there[t]   without values that are made elsewhere, and with those that are sent, until the pass is over
    back[t]    the gradients that wait, or are to be sent, less what the layers up to step t have yet to leave to weight
               passes, where those run apart
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ortools.sat.python import cp_model

from placer.solver import memory
from placer.solver.problem import Problem, Value
from placer.solver.reduce import Reduction

Literal = cp_model.IntVar | None
"""None holds never."""

Term = cp_model.LinearExpr | int


class Place(Protocol):
    """A device, or a stage, in an integer program."""

    @property
    def cp(self) -> cp_model.CpModel:
        """The program."""

    def here(self, node: int) -> Literal:
        """A literal that holds if the node is there."""

    def share(self, node: int) -> Term:
        """1 if the node is there, else 0."""


@dataclass(frozen=True)
class _Row:
    """A step whose need may be the largest, forwards or backwards.

    Attributes:
        step: the layer.
        forwards: which of its two steps.
        workspace: the layer's, in bytes.
        waiting: whether something can wait there meanwhile.
    """

    step: int
    forwards: bool
    workspace: int
    waiting: bool


def moment_of_training(
    place: Place, problem: Problem, nodes: Reduction, unit: int, limit_bytes: int
) -> tuple[Term, Term]:
    """What one micro-batch keeps at a place, and what it needs there at its worst moment: at least, and in units.

    Args:
        place: a device or a stage.
        problem: what is asked, in training.
        nodes: its layers in nodes.
        unit: bytes are divided by it, and rounded down.
        limit_bytes: steps that leave a device within this, whatever is on it, are left out.
    """
    return _Moment(place, problem, nodes, unit).written(_rows(problem, nodes, limit_bytes))


def recorded(place: Place, problem: Problem, nodes: Reduction, unit: int, limit_bytes: int) -> tuple[Term, Term, Term]:
    """What recorded passes have at a place: at least, and in units, as ``memory.Recorded`` has it.

    Arguments are those of ``moment_of_training``.

    Returns:
        What each micro-batch has for itself; what it has beside where there are several; what they share.
    """
    moment = _Moment(place, problem, nodes, unit)
    ahead, back = moment.written_recorded(_rows_recorded(problem, nodes, limit_bytes))
    crossing, landing = _crossing(place, problem, nodes, unit)
    shared = _of_layers(place, nodes, problem.step_bytes, unit)
    if not problem.weights_apart:
        return ahead + crossing, landing, shared + back
    deferred = _of_layers(place, nodes, problem.deferred_bytes, unit)
    shared += _largest(place, nodes, [size // unit for size in problem.weights_workspace_bytes])
    return ahead + crossing + deferred + back, 0, shared


def _of_layers(place: Place, nodes: Reduction, sizes: Sequence[int], unit: int) -> Term:
    """The sum of the sizes of the layers that are there, each in units."""
    by_node = [sum(sizes[layer] // unit for layer in layers) for layers in nodes.nodes]
    return sum(size * place.share(node) for node, size in enumerate(by_node) if size)


def _largest(place: Place, nodes: Reduction, sizes: Sequence[int]) -> Term:
    """The largest of the sizes of the layers that are there."""
    by_node = [max(sizes[layer] for layer in layers) for layers in nodes.nodes]
    if not any(by_node):
        return 0
    largest = place.cp.new_int_var(0, max(by_node), "largest")
    for node, size in enumerate(by_node):
        if size:
            place.cp.add(largest >= size * place.share(node))
    return largest


def _crossing(place: Place, problem: Problem, nodes: Reduction, unit: int) -> tuple[Term, Term]:
    """What has its place beside passes, for one micro-batch: ``memory.crossing_bytes`` and ``landing_bytes``."""
    crossing: Term = 0
    landing: Term = 0
    for value in problem.values:
        source = nodes.node_of[value.source]
        readers = {nodes.node_of[reader] for reader in value.readers} - {source}
        comes = [place.share(reader) - place.share(source) for reader in sorted(readers)]
        here, back = value.held_bytes // unit, value.gradient_bytes // unit
        lands = 0 if problem.weights_apart else back
        if readers and (here or lands):
            enters = _at_least(place, comes)
            crossing, landing = crossing + here * enters, landing + lands * enters
        if readers and back:
            crossing += back * _at_least(place, [-one for one in comes])
    return crossing, landing


def _at_least(place: Place, terms: Sequence[Term]) -> cp_model.IntVar:
    """A literal that holds if any of the terms is 1."""
    literal = place.cp.new_bool_var("")
    for term in terms:
        place.cp.add(literal >= term)
    return literal


def _rows_recorded(problem: Problem, nodes: Reduction, limit_bytes: int) -> list[_Row]:
    """The steps that may need the most, in order, each of the two ways for itself."""
    everything = memory.Held(list(range(len(problem.layers))), list(problem.values))
    moments = memory.moments_recorded(problem, everything)
    chunks = problem.request.chunks
    all_bytes = memory.footprint(problem, everything).total_bytes(chunks)
    all_bytes += 2 * chunks * memory.most_crossing_bytes(problem)
    waits = _may_wait(problem)
    rows = []
    for forwards in (True, False):
        steps = [moment[not forwards] for moment in moments]
        often = chunks if forwards or problem.weights_apart else 1
        beside = all_bytes - often * max(0, *map(sum, steps))
        before = [-1 if forwards else 0] * len(nodes.nodes)
        # Of a node's steps the last one has kept the most forwards, the first one has the most to leave backwards.
        for step in reversed(range(len(steps))) if forwards else range(len(steps)):
            node, need = nodes.node_of[step], steps[step][1]
            wait = waits[not forwards][step]
            if need + wait > before[node] and beside + often * sum(steps[step]) > limit_bytes:
                rows.append(_Row(step, forwards, need, wait > 0))
            before[node] = max(before[node], need)
    return sorted(rows, key=lambda row: row.step)


def _rows(problem: Problem, nodes: Reduction, limit_bytes: int) -> list[_Row]:
    """The steps that may need the most, in order."""
    everything = memory.Held(list(range(len(problem.layers))), list(problem.values))
    kept = memory.kept_by_step(problem, everything)
    moments = memory.moments_of_training(problem, everything, kept)
    use = memory.footprint(problem, everything)
    further = (problem.request.chunks - 1) * use.kept_bytes
    beside = use.one.total_bytes + further - use.one.activation_bytes - use.one.workspace_bytes
    waits = _may_wait(problem)
    later = [0] * len(nodes.nodes)
    rows = []
    for step in reversed(range(len(problem.layers))):
        layer, node = problem.layers[step], nodes.node_of[step]
        # A device that may recompute may also not, and let the halves of its backward pass run apart.
        least = problem.back_workspace_bytes[step]
        needs = (layer.forward_workspace_bytes, min(layer.backward_workspace_bytes, least))
        for forwards in (False, True):
            there, need, wait = moments[step][not forwards], needs[not forwards], waits[not forwards][step]
            # A later step of the same node, or the other one of this, keeps no less.
            if need + wait > later[node] and beside + sum(there) > limit_bytes:
                rows.append(_Row(step, forwards, need, wait > 0))
            later[node] = max(later[node], need)
    return rows[::-1]


def _may_wait(problem: Problem) -> tuple[list[int], list[int]]:
    """By step, the most bytes of values that may wait there, and of gradients."""
    values: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    for value in problem.values:
        memory.between(values, value.source + 1, value.readers[-1], value.held_bytes)
        memory.between(gradients, value.source + 1, value.readers[-1], value.gradient_bytes)
        memory.between(gradients, value.rest_from, value.rest_until, value.rest_bytes)
    steps = range(len(problem.layers))
    return memory.sums(values, steps), memory.sums(gradients, steps)


@dataclass
class _Sum:
    """A running sum: terms by the step at which they are added, and what they came to at the steps asked for."""

    cp: cp_model.CpModel
    terms: dict[int, list[Term]] = field(default_factory=dict)
    total: Term = 0
    done: int = -1
    most: int = 0
    least: int = 0

    def add(self, step: int, size: int, term: Term) -> None:
        """So much more from a step on, where the term is 1."""
        self.terms.setdefault(step, []).append(size * term)
        self.most += max(size, 0)

    def at(self, step: int) -> Term:
        """The sum of all terms at a step or before; steps must be asked for in order."""
        news = [term for past in range(self.done + 1, step + 1) for term in self.terms.get(past, ())]
        self.done = max(self.done, step)
        if news:
            total = self.cp.new_int_var(self.least, self.most, "")
            self.cp.add(total == self.total + cp_model.LinearExpr.sum(news))
            self.total = total
        return self.total


class _Moment:
    """Writes the constraints of one place."""

    def __init__(self, place: Place, problem: Problem, nodes: Reduction, unit: int) -> None:
        self._place, self._problem, self._nodes, self._unit = place, problem, nodes, unit
        self._cp = place.cp
        self._either: dict[tuple[int, int], cp_model.IntVar] = {}

    def written(self, rows: Sequence[_Row]) -> tuple[Term, Term]:
        """The variables ``kept`` and ``moment``."""
        there, back, kept = (_Sum(self._cp) for _ in range(3))
        for step, layer in enumerate(self._problem.layers):
            size = layer.saved_bytes // self._unit
            if size:
                for total in (there, back, kept):
                    total.add(step, size, self._place.share(self._nodes.node_of[step]))
        for value in self._problem.values:
            self._add_pieces(there, value.held_bytes, self._held(value))
            self._add_pieces(back, value.held_bytes, self._kept(value))
            self._add_pieces(back, value.gradient_bytes, self._gradient(value))
            self._add_pieces(back, value.rest_bytes, self._rest(value))
            if value.keepers and value.held_bytes:
                self._add_pieces(kept, value.held_bytes, [(value.source, self._prefixes(value.keepers)[-1])])
        all_kept = kept.at(len(self._problem.layers))
        steps = [size // self._unit for size in self._problem.step_bytes]
        most = there.most + back.most + max((row.workspace for row in rows), default=0) // self._unit + sum(steps)
        if not most:
            return all_kept, 0
        moment = self._cp.new_int_var(0, most, "moment")
        self._cp.add(moment >= all_kept)
        if any(steps):  # of the optimizer, after all passes
            share = self._place.share
            self._cp.add(moment >= sum(size * share(self._nodes.node_of[layer]) for layer, size in enumerate(steps)))
        for row in rows:
            self._add_row(moment, row, (there if row.forwards else back).at(row.step))
        return all_kept, moment

    def written_recorded(self, rows: Sequence[_Row]) -> tuple[Term, Term]:
        """Two variables: the worst moment forwards, and that backwards."""
        there, back = _Sum(self._cp), _Sum(self._cp)
        for step, layer in enumerate(self._problem.layers):
            kept, left = layer.saved_bytes // self._unit, self._problem.deferred_bytes[step] // self._unit
            if kept:
                there.add(step, kept, self._place.share(self._nodes.node_of[step]))
            if left:
                back.add(step, -left, self._place.share(self._nodes.node_of[step]))
                back.least -= left
        for value in self._problem.values:
            self._add_pieces(there, value.held_bytes, self._own(value))
            self._add_pieces(back, value.gradient_bytes, self._staying(value))
        worst: list[Term] = []
        for forwards, held in ((True, there), (False, back)):
            mine = [row for row in rows if row.forwards == forwards]
            most = held.most + max((row.workspace for row in mine), default=0) // self._unit
            moment = self._cp.new_int_var(0, most, "moment")
            for row in mine:
                self._add_row(moment, row, held.at(row.step), may_fall=not forwards)
            if forwards:  # what is kept, and what is sent, stays when the pass is over
                self._cp.add(moment >= held.at(len(self._problem.layers)))
            worst.append(moment)
        return worst[0], worst[1]

    def _add_row(self, moment: cp_model.IntVar, row: _Row, held: Term, may_fall: bool = False) -> None:
        """If the layer is there, the moment is no less than what is held at its step and its workspace."""
        node, workspace = self._nodes.node_of[row.step], row.workspace // self._unit
        here = self._place.here(node)
        if here is None:
            return
        if row.waiting or may_fall:  # what is held at its step counts where the layer is
            self._cp.add(moment >= held + workspace).only_enforce_if(here)
        else:  # what is kept up to a step is never more than what is kept in all
            self._cp.add(moment >= held + workspace * self._place.share(node))

    def _add_pieces(self, total: _Sum, size_bytes: int, pieces: Iterable[tuple[int, Literal]]) -> None:
        """Add a size to a sum while a literal holds: the literal of each piece from its step on."""
        size, before = size_bytes // self._unit, None
        for step, literal in pieces if size else ():
            if literal is not before:
                if before is not None:
                    total.add(step, -size, before)
                if literal is not None:
                    total.add(step, size, literal)
                before = literal

    # What holds from a step on

    def _held(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Forwards: a layer that keeps the value is there, or one that reads it later."""
        if value.source in value.keepers:
            yield value.source, self._here(value.source)
        keeper = self._prefixes(value.keepers)[-1] if value.keepers else None
        passing = [reader for reader in value.readers if reader not in value.keepers]
        later = self._prefixes(passing[::-1])[::-1]
        for step in sorted({value.source + 1, *passing}):
            waits = next((later[i] for i, reader in enumerate(passing) if reader > step), None)
            yield step, self._any(keeper, waits)

    def _own(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Forwards, of recorded passes: the same where the value is made, or it is sent, until the pass is over."""
        source = self._here(value.source)
        sent = self._sent(value) if value.held_bytes // self._unit else None
        for step, held in self._held(value):
            own = self._both(source, held)
            yield step, self._any(own, sent) if step > value.source else own

    def _sent(self, value: Value) -> Literal:
        """The value is made here and kept by nobody here, and a reader is elsewhere."""
        node_of = self._nodes.node_of
        source, readers = node_of[value.source], {node_of[reader] for reader in value.readers}
        keepers = {node_of[keeper] for keeper in value.keepers}
        others = sorted(readers - {source})
        if source in keepers or not others:
            return None
        share = self._place.share
        kept = sum(share(keeper) for keeper in sorted(keepers))
        return _at_least(self._place, [share(source) - share(reader) - kept for reader in others])

    def _kept(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """A layer that keeps the value is there, and has run."""
        yield from zip(value.keepers, self._prefixes(value.keepers), strict=True)

    def _gradient(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Backwards: a reader's gradient waits for the source, or is here for an earlier reader's to be added."""
        source, readers = self._here(value.source), value.readers
        earlier, later = self._prefixes(readers), self._prefixes(readers[::-1])[::-1]
        if value.source + 1 < readers[0]:
            yield value.source + 1, source
        for place, reader in enumerate(readers[:-1]):
            yield reader, self._any(source, self._both(earlier[place], later[place + 1]))
        yield readers[-1], None

    def _rest(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Backwards: what the last reader's gradient is a slice of, while it waits here for the one before; or ties."""
        *others, last = value.source, *value.readers
        yield value.rest_from, self._both(self._here(last), self._prefixes(others)[-1])
        yield value.rest_until, None

    def _staying(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Backwards: the gradient of a reader that is here waits for the source, or is to be sent after the pass."""
        before = value.source + 1
        for reader, later in zip(value.readers, self._prefixes(value.readers[::-1])[::-1], strict=True):
            if before < reader:
                yield before, later
            before = reader
        yield before, None

    # Literals

    def _here(self, layer: int) -> Literal:
        return self._place.here(self._nodes.node_of[layer])

    def _prefixes(self, layers: Sequence[int]) -> list[Literal]:
        """For each layer, whether it or one before it in the list is here."""
        found: list[Literal] = []
        for layer in layers:
            found.append(self._any(found[-1] if found else None, self._here(layer)))
        return found

    def _any(self, one: Literal, other: Literal) -> Literal:
        """A literal that holds if one of two does."""
        if one is None or other is None or one is other:
            return other if one is None else one
        key = (min(one.index, other.index), max(one.index, other.index))
        if key not in self._either:
            self._either[key] = self._cp.new_bool_var("")
            self._cp.add_implication(one, self._either[key])
            self._cp.add_implication(other, self._either[key])
        return self._either[key]

    def _both(self, one: Literal, other: Literal) -> Literal:
        """A literal that holds if both do."""
        if one is None or other is None or one is other:
            return None if one is None else other
        both = self._cp.new_bool_var("")
        self._cp.add_bool_or(~one, ~other, both)
        return both
