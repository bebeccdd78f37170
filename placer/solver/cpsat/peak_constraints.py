"""The peak memory of a pass as constraints of an integer program, for one device or one stage.

    kept[t]    what one micro-batch keeps there of the layers up to step t
    there[t]   kept[t], and the values that wait for a later reader
    back[t]    kept[t], and the gradients that wait for a later step backwards
    peak       at least there[t] + forward workspace and back[t] + backward workspace of every
               layer t that is there

``there`` and ``back`` change at few steps, so they are running sums: the constraints are linear in
layers and values.

Recorded passes have memory of their own, so forwards and backwards each have a peak::

    there[t]   without values that are made elsewhere, and with sent values, until the pass ends
    back[t]    the gradients that wait, or are to be sent, less what the layers up to step t have
               yet to leave to weight-gradient passes, where those run apart
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol

from ortools.sat.python import cp_model

from placer.solver.cpsat.peak_steps import (
    PeakStep,
    inference_peak_steps,
    recorded_peak_steps,
    training_peak_steps,
)
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.solver.values import Value

Literal = cp_model.IntVar | None
"""None holds never."""

Term = cp_model.LinearExpr | int


class Place(Protocol):
    """A device, or a stage, in an integer program."""

    @property
    def cp(self) -> cp_model.CpModel:
        """The program."""

    def here(self, node: int) -> Literal:
        """Return a literal that holds if the node is there."""

    def share(self, node: int) -> Term:
        """1 if the node is there, else 0."""


class PeakConstraints:
    """The worst moments of the places of one program.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        unit: bytes are divided by it, and rounded down.
    """

    def __init__(self, problem: Problem, nodes: Reduction, unit: int) -> None:
        self._problem, self._nodes, self._unit = problem, nodes, unit
        self._of_training = cache(partial(training_peak_steps, problem, nodes))
        self._recorded = cache(partial(recorded_peak_steps, problem, nodes))
        self._of_inference = cache(partial(inference_peak_steps, problem))

    def of_training(self, place: Place, limit_bytes: int) -> tuple[Term, Term]:
        """Return what one micro-batch keeps at a place, and its peak there: lower bounds, in units.

        Args:
            place: a device or a stage.
            limit_bytes: steps that leave a device within this, whatever is on it, are left out.
        """
        return self._at(place).written(self._of_training(limit_bytes))

    def recorded(self, place: Place, limit_bytes: int) -> tuple[Term, Term, Term]:
        """Return the memory of recorded passes at a place, as in ``memory.Recorded``.

        The terms are lower bounds, in units. It takes the arguments of ``of_training``.

        Returns:
            The bytes of each micro-batch, its further bytes where there are several, and the bytes
            that all share.
        """
        problem, nodes, unit = self._problem, self._nodes, self._unit
        ahead, back = self._at(place).written_recorded(self._recorded(limit_bytes))
        crossing, landing = _crossing(place, problem, nodes, unit)
        back += _of_layers(place, nodes, problem.deferred_bytes, unit)
        shared = _of_layers(place, nodes, problem.step_bytes, unit)
        shared += _largest(
            place, nodes, [size // unit for size in problem.weight_grad_workspace_bytes]
        )
        # each micro-batch in flight has memory for its own
        # Concurrent backward passes each have their own memory. Otherwise one backward pass at a
        # time reuses the same memory, and gradients that arrive meanwhile wait (landing).
        if problem.backwards(problem.request.chunks) > 1:
            return ahead + crossing + back, 0, shared
        return ahead + crossing, landing, shared + back

    def of_inference(self, place: Place, limit_bytes: int) -> Iterator[Term]:
        """Yield the memory of a place, without its state, at each step that may be its peak.

        The terms are lower bounds, in units. It takes the arguments of ``of_training``.
        """
        return self._at(place).of_inference(self._of_inference(limit_bytes))

    def _at(self, place: Place) -> _PlacePeaks:
        return _PlacePeaks(place, self._problem, self._nodes, self._unit)


def _of_layers(place: Place, nodes: Reduction, sizes: Sequence[int], unit: int) -> Term:
    """Return the sum of the sizes of the layers that are there, each in units."""
    by_node = [sum(sizes[layer] // unit for layer in layers) for layers in nodes.nodes]
    return sum(size * place.share(node) for node, size in enumerate(by_node) if size)


def _largest(place: Place, nodes: Reduction, sizes: Sequence[int]) -> Term:
    """Return the largest of the sizes of the layers that are there."""
    by_node = [max(sizes[layer] for layer in layers) for layers in nodes.nodes]
    terms = [size * place.share(node) for node, size in enumerate(by_node) if size]
    # A maximum over 0-1 terms: one inequality each, pushed down by the memory limit.
    able = [term for term in terms if not _is_never(term)]
    if not able:
        return 0
    largest = place.cp.new_int_var(0, max(by_node), "largest")
    for term in able:
        place.cp.add(largest >= term)
    return largest


def _crossing(place: Place, problem: Problem, nodes: Reduction, unit: int) -> tuple[Term, Term]:
    """Return ``memory.crossing_bytes`` and ``landing_bytes`` of a place for one micro-batch."""
    crossing: Term = 0
    landing: Term = 0
    for value in problem.values:
        source = nodes.node_of[value.source]
        made = place.share(source)
        read = [
            place.share(reader)
            for reader in sorted({nodes.node_of[one] for one in value.readers} - {source})
        ]
        here, back = value.held_bytes // unit, value.arriving_bytes // unit
        lands, waits = (
            value.gradient_bytes // unit,
            (value.gradient_bytes - value.arriving_bytes) // unit,
        )
        # enters = 1 if a reader is here and the source is not;   leaves = 1 if the source is here
        # and a reader is not.
        comes = [one - made for one in read if not _is_never(one)]
        if comes and (here or lands):
            enters = _at_least(place, comes)
            crossing, landing = crossing + here * enters, landing + lands * enters
        if read and (back or waits) and not _is_never(made):
            leaves = _at_least(place, [made - one for one in read])
            crossing, landing = crossing + back * leaves, landing + waits * leaves
    return crossing, landing


def _is_never(term: Term) -> bool:
    """Return whether the term is the number 0: of what cannot be there."""
    return isinstance(term, int) and term == 0


def _at_least(place: Place, terms: Sequence[Term]) -> cp_model.IntVar:
    """Return a literal that holds if any of the terms is 1."""
    literal = place.cp.new_bool_var("")
    for term in terms:
        place.cp.add(literal >= term)
    return literal


@dataclass
class _Sum:
    """A running sum.

    Terms by the step at which they are added, and what they came to at the steps asked for.
    """

    cp: cp_model.CpModel
    terms: dict[int, list[Term]] = field(default_factory=dict)
    total: Term = 0
    done: int = -1
    most: int = 0
    least: int = 0

    def add(self, step: int, size: int, term: Term) -> None:
        """Add this size from a step on, where the term is 1."""
        if _is_never(term):
            return
        self.terms.setdefault(step, []).append(size * term)
        self.most += max(size, 0)

    def at(self, step: int) -> Term:
        """Return the sum of all terms at a step or before; steps must be asked for in order."""
        news = [
            term for past in range(self.done + 1, step + 1) for term in self.terms.get(past, ())
        ]
        self.done = max(self.done, step)
        if news:
            total = self.cp.new_int_var(self.least, self.most, "")
            self.cp.add(total == self.total + cp_model.LinearExpr.sum(news))
            self.total = total
        return self.total


class _PlacePeaks:
    """Writes the constraints of one place."""

    def __init__(self, place: Place, problem: Problem, nodes: Reduction, unit: int) -> None:
        self._place, self._problem, self._nodes, self._unit = place, problem, nodes, unit
        self._cp = place.cp
        self._either: dict[tuple[int, int], cp_model.IntVar] = {}

    def written(self, rows: Sequence[PeakStep]) -> tuple[Term, Term]:
        """Return the variables ``kept`` and ``moment``."""
        #     step     0    1    2    3    4
        #     there   +v .......... -v           v waits from its source to its last reader
        #     kept    +s .................+s     saved bytes stay until the backward pass
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
            self._add_pieces(back, value.retained_bytes, self._rest(value))
            if value.keepers and value.held_bytes:
                self._add_pieces(
                    kept, value.held_bytes, [(value.source, self._prefixes(value.keepers)[-1])]
                )
        all_kept = kept.at(len(self._problem.layers))
        steps = [size // self._unit for size in self._problem.step_bytes]
        most = (
            there.most
            + back.most
            + max((row.workspace for row in rows), default=0) // self._unit
            + sum(steps)
        )
        if not most:
            return all_kept, 0
        # `moment` is the peak. The constraints only bound it from below; the memory limit or the
        # objective pushes it down.
        moment = self._cp.new_int_var(0, most, "moment")
        self._cp.add(moment >= all_kept)
        if any(steps):  # of the optimizer, after all passes
            share = self._place.share
            self._cp.add(
                moment
                >= sum(size * share(self._nodes.node_of[layer]) for layer, size in enumerate(steps))
            )
        for row, here in self._able(rows):
            self._add_step(moment, row, here, (there if row.forwards else back).at(row.step))
        return all_kept, moment

    def written_recorded(self, rows: Sequence[PeakStep]) -> tuple[Term, Term]:
        """Return two variables: the worst moment forwards, and the worst moment backwards."""
        there, back = _Sum(self._cp), _Sum(self._cp)
        for step, layer in enumerate(self._problem.layers):
            kept, left = (
                layer.saved_bytes // self._unit,
                self._problem.deferred_bytes[step] // self._unit,
            )
            if kept:
                there.add(step, kept, self._place.share(self._nodes.node_of[step]))
            if left:
                # Backward passes run from the last step to the first. At step t, layers after t
                # have left their deferred bytes, and layers up to t have not yet.
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
            for row, here in self._able(mine):
                self._add_step(moment, row, here, held.at(row.step), may_fall=not forwards)
            # what is kept, and what is sent, stays when the pass is over
            if forwards:
                self._cp.add(moment >= held.at(len(self._problem.layers)))
            worst.append(moment)
        return worst[0], worst[1]

    def of_inference(self, rows: Sequence[PeakStep]) -> Iterator[Term]:
        """Yield the live values and the workspace at each step, wherever its layer is.

        Values arrive at steps of other devices too.
        """
        # Literals change at few steps. `live` holds the current literal of each value.
        changes: dict[int, list[tuple[int, Literal]]] = defaultdict(list)
        for index, value in enumerate(self._problem.values):
            for step, literal in self._live(value) if value.held_bytes // self._unit else ():
                changes[step].append((index, literal))
        live: dict[int, Term] = {}
        done = 0
        for row in rows:
            news = [change for step in range(done, row.step + 1) for change in changes[step]]
            done = row.step + 1
            for index, literal in news:
                if literal is None:
                    live.pop(index, None)
                else:
                    live[index] = self._problem.values[index].held_bytes // self._unit * literal
            here = self._place.share(self._nodes.node_of[row.step])
            if news or not _is_never(here):
                yield cp_model.LinearExpr.sum([*live.values(), row.workspace // self._unit * here])

    def _able(self, rows: Iterable[PeakStep]) -> Iterator[tuple[PeakStep, cp_model.IntVar]]:
        """Yield the rows of layers that can be there, each with the literal that holds if it is."""
        for row in rows:
            here = self._here(row.step)
            if here is not None:
                yield row, here

    def _add_step(
        self,
        moment: cp_model.IntVar,
        row: PeakStep,
        here: cp_model.IntVar,
        held: Term,
        may_fall: bool = False,
    ) -> None:
        """Require the peak to include the held bytes and workspace of the layer, if it is here."""
        node, workspace = self._nodes.node_of[row.step], row.workspace // self._unit
        # the bytes held at the layer's step count only on the layer's own device
        if row.waiting or may_fall:
            self._cp.add(moment >= held + workspace).only_enforce_if(here)
        else:  # what is kept up to a step is never more than what is kept in all
            self._cp.add(moment >= held + workspace * self._place.share(node))

    def _add_pieces(
        self, total: _Sum, size_bytes: int, pieces: Iterable[tuple[int, Literal]]
    ) -> None:
        """Add a size to a sum while a literal holds: the literal of each piece from its step on."""
        size, before = size_bytes // self._unit, None
        for step, literal in pieces if size else ():
            #     pieces   (2, a) (5, b) (9, None)
            #     literal      a a a b b b b . .       subtract the old literal and add the new one
            if literal is not before:
                if before is not None:
                    total.add(step, -size, before)
                if literal is not None:
                    total.add(step, size, literal)
                before = literal

    # What holds from a step on

    def _live(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when a value is live in inference: until its last reader has run.

        A later reader is there, or the source.
        """
        readers = value.readers
        *later, _ = self._prefixes((value.source, *reversed(readers)))[::-1]
        yield from zip(
            (value.source, *(reader + 1 for reader in readers)), (*later, None), strict=True
        )

    def _held(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when a value is held forwards: a layer that keeps it or reads it later is there."""
        if value.source in value.keepers:
            yield value.source, self._here(value.source)
        keeper = self._prefixes(value.keepers)[-1] if value.keepers else None
        passing = [reader for reader in value.readers if reader not in value.keepers]
        later = self._prefixes(passing[::-1])[::-1]
        for step in sorted({value.source + 1, *passing}):
            # later[i]: reader i or a later one is here. The value waits for the first reader behind
            # this step.
            waits = next((later[i] for i, reader in enumerate(passing) if reader > step), None)
            yield step, self._any(keeper, waits)

    def _own(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when a recorded forward pass holds a value: made here; kept, awaited or sent."""
        source = self._here(value.source)
        if source is None:
            return
        sent = self._sent(value) if value.held_bytes // self._unit else None
        for step, held in self._held(value):
            own = self._both(source, held)
            yield step, self._any(own, sent) if step > value.source else own

    def _sent(self, value: Value) -> Literal:
        """Return a literal for: the value is made here, kept by nobody here, read elsewhere."""
        node_of = self._nodes.node_of
        source, readers = node_of[value.source], {node_of[reader] for reader in value.readers}
        keepers = {node_of[keeper] for keeper in value.keepers}
        others = sorted(readers - {source})
        share = self._place.share
        if source in keepers or not others or _is_never(share(source)):
            return None
        kept = sum(share(keeper) for keeper in sorted(keepers))
        return _at_least(self._place, [share(source) - share(reader) - kept for reader in others])

    def _kept(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when a value is kept: a layer that keeps it is there, and has run."""
        yield from zip(value.keepers, self._prefixes(value.keepers), strict=True)

    def _gradient(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when a gradient waits backwards: for its source, or for another gradient."""
        source, readers = self._here(value.source), value.readers
        #     source . r1 . r2 . r3      backwards, from right to left: the gradient of r3 waits
        #               <----<----       for r2's if both are here, and for the source if it is here
        earlier, later = self._prefixes(readers), self._prefixes(readers[::-1])[::-1]
        if value.source + 1 < readers[0]:
            yield value.source + 1, source
        for place, reader in enumerate(readers[:-1]):
            yield reader, self._any(source, self._both(earlier[place], later[place + 1]))
        yield readers[-1], None

    def _rest(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when the rest of a sliced gradient waits backwards for the reader before."""
        *others, last = value.source, *value.readers
        yield value.retained_from, self._both(self._here(last), self._prefixes(others)[-1])
        yield value.retained_until, None

    def _staying(self, value: Value) -> Iterator[tuple[int, Literal]]:
        """Yield when a reader's gradient stays in a recorded pass: for its source, or to go out."""
        before = value.source + 1
        for reader, later in zip(
            value.readers, self._prefixes(value.readers[::-1])[::-1], strict=True
        ):
            if before < reader:
                yield before, later
            before = reader
        yield before, None

    # Literals

    def _here(self, layer: int) -> Literal:
        return self._place.here(self._nodes.node_of[layer])

    def _prefixes(self, layers: Sequence[int]) -> list[Literal]:
        """Return, for each layer, a literal that holds if it or a previous one is here."""
        found: list[Literal] = []
        for layer in layers:
            found.append(self._any(found[-1] if found else None, self._here(layer)))
        return found

    def _any(self, one: Literal, other: Literal) -> Literal:
        """Return a literal that holds if one of two does."""
        if one is None or other is None or one is other:
            return other if one is None else one
        # The same pair of literals occurs for many values; one variable serves all of them.
        key = (min(one.index, other.index), max(one.index, other.index))
        if key not in self._either:
            self._either[key] = self._cp.new_bool_var("")
            self._cp.add_implication(one, self._either[key])
            self._cp.add_implication(other, self._either[key])
        return self._either[key]

    def _both(self, one: Literal, other: Literal) -> Literal:
        """Return a literal that holds if both do."""
        if one is None or other is None or one is other:
            return None if one is None else other
        both = self._cp.new_bool_var("")
        # `both` may also be 1 without need. It only adds bytes, so the solver sets it to 0 then.
        self._cp.add_bool_or(~one, ~other, both)
        return both
