r"""The memory of one device at its worst moment, by steps of the profile's order.

Layers are numbered in that order; m(l) is the device of layer l. ``costs.py`` says which stages
there are and which devices recompute.

**Memory in inference**, in bytes. Value v, made by layer s, is live on d at step l if s <= l and
some reader is l or later, on d, or anywhere if m(s) = d. It is received when it is made, and
freed after its last reader::

    use(d) = params(d) + buffers(d) + max over steps l of
             (sum of bytes(v) live on d at l  +  forward_workspace(l) if m(l) = d)

Parameters that several layers share count in the first of them. If these layers may be on several
devices, params(d) and gradients(d) include a copy on every device that holds some of them and not
the first.

**Memory in training**, in bytes, where placements need not be contiguous. Layers run forwards and
backwards at their steps t. A value is kept on d if a layer that saves it, a keeper, is on d; it
counts once per device. The workspaces of a layer include its outputs, the inputs that it does not
keep, and the gradients of both. So only what waits for another layer counts in addition::

    use(d)    = params(d) + gradients(d) + optimizer(d) + buffers(d)
                + (in_flight(d) - 1) * kept(d)
                + max(step(d), max over t on d of max(F(d, t), B(d, t)))
    step(d)   = sum of optimizer_workspace_ratio * gradients(l) over l on d: the optimizer's
                temporary memory, when no pass runs
    kept(d)   = sum of saved(l) over l on d  +  sum of bytes(v) kept on d
    kept(d,t) = sum of saved(l) over l <= t on d  +  sum of bytes(v) over v with a keeper <= t on d
    F(d,t)    = kept(d,t) + forward_workspace(t) + sum of bytes(v) that wait on d for a later
                reader: v made before t, read on d after t, without a keeper <= t on d
    B(d,t)    = kept(d,t) + backward_workspace(t) + sum of gradient_bytes(v) that wait on d:
                v made on d before t and read after t, on any device: the gradient came, its source
                has yet to run; or v made elsewhere, read on d at t or before and after t: it is
                summed up here before it is sent
                + sum of retained_bytes(v) over v with its last reader on d, and its source or
                another reader, too, where the reader before the last is at t or before, and
                retained_until(v) after t: the last reader returns a slice of a storage that is held
                as long as any part of it waits
                + sum of gradient_bytes of tied parameters on d, where the first layer that has them
                is t or before, and the last one is after t

The micro-batches in flight depend on the schedule::

    in_flight(d)  = chunks                            fill-drain, and placements that need not be
                                                      contiguous
                  = min(chunks, stages - stage(d))    1F1B and interleaved, contiguous
                 >= min(chunks, stages - stage(d))    zero-bubble, contiguous: the most with which
                 <= min(chunks, 2 stages)             use(d) is within the limit of d, or the
                                                      fewest where none is; 1 of a single stage

Contiguous placements run as recorded passes, which keep their memory. The forward pass of each
micro-batch in flight has memory of its own; the backward passes of a stage share theirs. Values and
gradients that arrive from other devices are stored outside the passes, and what is sent stays until
the next micro-batch comes. Then::

    use(d)      = params(d) + gradients(d) + optimizer(d) + buffers(d)
                  + in_flight(d) * (max over t of O(d, t) + crossing(d) + landing(d))
                  + backwards(d) * max over t of P(d, t) + step(d)        with backwards(d) = 1
    O(d,t)      = F(d, t) without values that are made elsewhere, and with those made on d before
                  t, read elsewhere and kept by nobody on d: they wait on until the pass is over,
                  which is a step t of its own
    P(d,t)      = recorded_workspace(t)
                  + sum of gradient_bytes(v) over v made before t and read on d after t: it waits,
                    or is to be sent
    crossing(d) = sum of bytes(v) over v made elsewhere and read on d
                  + sum of gradient_bytes(v) over v made on d and read elsewhere, once for all
                    readers
    landing(d)  = sum of gradient_bytes(v) over v made elsewhere and read on d,
                  if in_flight(d) > backwards(d)

Under zero-bubble, weight-gradient passes run apart. The tensors that a backward pass leaves to them
lie in its workspace, so each postponed pass needs one. The weight-gradient passes, which leave
nothing, share one::

    use(d)       = params(d) + gradients(d) + optimizer(d) + buffers(d)
                   + in_flight(d) * (max over t of O(d, t) + crossing(d) + landing(d))
                   + backwards(d) * max(deferred(d), max over t of P(d, t))
                   + max of weight_grad_workspace(l) over l on d + step(d)
    backwards(d) = ceil(in_flight(d) / shared(d))
    shared(d)    = floor(in_flight(d) / (in_flight(d) - min(chunks, stages - stage(d)) + 1))
                   1 if not contiguous
    P(d,t)       = input_grad_workspace(t) + sum of deferred(l) over l > t on d + gradients as above
    crossing(d)  = as above, without gradients of values with one reader that deferred(l) has:
                   they wait where they come
    landing(d)   = as above, with those gradients, if in_flight(d) > backwards(d)
    deferred(d)  = sum of deferred(l) over l on d

With as many micro-batches in flight as under 1F1B, backwards(d) is 1. The memory equals 1F1B's,
except for the tensors that one backward pass leaves and the workspace of one weight-gradient pass.

Under objective ``step``, a device of an interleaved placement that need not be contiguous holds
what the plan of ``placer.schedule`` has in flight, segment by segment. Its memory is the larger of
two. In the first formula, (in_flight(d) - 1) * kept(d) becomes the sum of
(in_flight(segment) - 1) * saved(l) over l on d, and of (in_flight - 1) * bytes(v) over v kept on d,
with the largest in_flight of the segments that keep v. Or each segment has recorded passes of its
own, for which the values of another segment count as made and read elsewhere, on whichever device::

    use(d) = params(d) + gradients(d) + optimizer(d) + buffers(d) + step(d)
             + sum over segments s of d of
               (in_flight(s) * (max over t of O(s, t) + crossing(s) + landing(s))
                + max over t of P(s, t))

Where replicas share a stage, optimizer(d) is one replica's part of the state, see
``replicas/replication.py``, and gradients(d) includes buffers for the exchange: the parameters that
the device owns, packed to be sent, and the gradients of two pieces that arrive from each other
replica, for the parameters that it owns::

    buffers(d)  = gradients(d) / R + 2 * (R - 1) / R * (gradients of the largest piece)

A device that recomputes runs forwards once more before each backward pass. Of further micro-batches
it keeps only what comes in, and its weight-gradient passes do not run apart::

    use(d)      = ... + (in_flight(d) - 1) * entering(d) + ...
                  in place of (in_flight(d) - 1) * kept(d)
    entering(d) = sum of bytes(v) over v made elsewhere and read on d
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from placer.schedule.gradient_pieces import LANDINGS, gradient_pieces
from placer.schema import MemoryUse
from placer.solver import pipelines
from placer.solver.problem import Problem
from placer.solver.values import Value

Moment = tuple[int, int]
"""The held bytes and the workspace bytes of one moment."""

MOST_KNOWN_SETS = 20_000
"""Footprints that a cache remembers: about 20 MB of them."""


@dataclass
class Held:
    """What is on one device.

    Attributes:
        layers: ascending.
        values: those that a layer there makes or reads, and maybe others.
    """

    layers: list[int]
    values: list[Value]

    @cached_property
    def here(self) -> frozenset[int]:
        """The layers as a set."""
        return frozenset(self.layers)

    def total(self, sizes: Sequence[int]) -> int:
        """Return the sum of the layers' sizes, which are given for all layers."""
        return sum(sizes[layer] for layer in self.layers)


@dataclass(frozen=True)
class Recorded:
    """Memory of recorded passes, which keep it, whatever the device's place in the pipeline.

    Attributes:
        each_bytes: of each micro-batch in flight.
        shared_bytes: of the last passes of all of them, and of the optimizer's step, which finds
            nothing free.
        backward_bytes: of each backward pass with memory of its own, where weight-gradient passes
            run apart: its workspace, or what it leaves to them.
        landing_bytes: of each micro-batch in flight, where backward passes share memory: the
            gradients that leave this memory.
    """

    each_bytes: int
    shared_bytes: int
    backward_bytes: int = 0
    landing_bytes: int = 0

    def passing_bytes(self, flight: int, backwards: int = 1) -> int:
        """Return the bytes of all micro-batches in flight and of separate backward passes."""
        landing = self.landing_bytes if backwards < flight else 0
        return flight * (self.each_bytes + landing) + backwards * self.backward_bytes


@dataclass(frozen=True)
class Footprint:
    """The memory of a device, whatever its place in the pipeline.

    Attributes:
        one: with one micro-batch in flight, all of whose backward pass runs at once.
        kept_bytes: what each further one adds: all that it leaves for its backward pass.
        entering_bytes: what it adds where the device recomputes: the values that come from other
            devices.
        recorded: what it holds without recomputing where passes are recorded; None where a device
            may have several stages.
    """

    one: MemoryUse
    kept_bytes: int = 0
    entering_bytes: int = 0
    recorded: Recorded | None = None

    def total_bytes(self, flight: int, again: bool = False, backwards: int = 1) -> int:
        """Return all of it.

        Args:
            flight: the number of micro-batches in flight.
            again: whether the device recomputes.
            backwards: how many of them have memory of their own for recorded backward passes.
        """
        if again:
            return self.one.total_bytes + (flight - 1) * self.entering_bytes
        if self.recorded is not None:
            return self.use(flight, backwards=backwards).total_bytes
        return self.one.total_bytes + (flight - 1) * self.kept_bytes

    def use(self, flight: int, again: bool = False, backwards: int = 1) -> MemoryUse:
        """Return all of it, by kind."""
        if self.recorded is not None and not again:
            passing = self.recorded.passing_bytes(flight, backwards)
            changed = {"activation_bytes": passing, "workspace_bytes": self.recorded.shared_bytes}
            return self.one.model_copy(update=changed)
        activations = (
            self.one.activation_bytes + self.total_bytes(flight, again) - self.one.total_bytes
        )
        return self.one.model_copy(update={"activation_bytes": activations})


def held_by_device(problem: Problem, assignment: Sequence[int]) -> list[Held]:
    """Return the layers and values of each device."""
    held = [Held([], []) for _ in problem.devices]
    for layer, device in enumerate(assignment):
        held[device].layers.append(layer)
    for value in problem.values:
        for device in {assignment[layer] for layer in (value.source, *value.readers)}:
            held[device].values.append(value)
    return held


def held_with(problem: Problem, layers: Iterable[int]) -> Held:
    """Return the layers and values of a device that holds these layers."""
    here = sorted(layers)
    values = sorted({index for layer in here for index in problem.touching[layer]})
    return Held(here, [problem.values[index] for index in values])


def footprint(problem: Problem, held: Held) -> Footprint:
    """Return the memory of a device with these layers and values."""
    layers = [problem.layers[layer] for layer in held.layers]
    copies = [
        shared
        for shared in problem.shared
        if shared.first not in held.here and not shared.others.isdisjoint(held.here)
    ]
    state = {
        "param_bytes": sum(layer.param_bytes for layer in layers)
        + sum(copy.param_bytes for copy in copies),
        "buffer_bytes": sum(layer.buffer_bytes for layer in layers),
    }
    if not problem.training:
        live, workspace = _worst_of_inference(problem, held)
        return Footprint(MemoryUse(**state, activation_bytes=live, workspace_bytes=workspace))
    state["grad_bytes"] = sum(layer.grad_bytes for layer in layers) + sum(
        copy.grad_bytes for copy in copies
    )
    if problem.replication is not None:
        state["grad_bytes"] += exchange_bytes(problem, held, problem.replication.replicas)
    state["optimizer_bytes"] = sum(layer.optimizer_bytes for layer in layers)
    kept = kept_by_step(problem, held)
    optimizer = 0, held.total(problem.step_bytes)
    moments = itertools.chain(*moments_of_training(problem, held, kept))
    activations, workspace = max(*moments, optimizer, (0, 0), key=sum)
    one = MemoryUse(**state, activation_bytes=activations, workspace_bytes=workspace)
    entering = sum(
        value.held_bytes
        for value in held.values
        if value.source not in held.here and not held.here.isdisjoint(value.reader_set)
    )
    return Footprint(
        one, sum(kept.values()), entering, recorded(problem, held) if problem.recorded else None
    )


def exchange_bytes(problem: Problem, held: Held, replicas: int) -> int:
    """Return the bytes of a device's buffers for the exchange with its replicas.

    Args:
        problem: the placement problem.
        held: what is on the device.
        replicas: of each of its stages.
    """
    stages = [held.layers]
    if not problem.one_stage_each:
        # layers without a gap between them are a segment
        numbered = enumerate(held.layers)
        runs = itertools.groupby(numbered, key=lambda pair: pair[1] - pair[0])
        stages = [[layer for _, layer in run] for _, run in runs]
    largest = total = 0
    for stage in stages:
        sizes = [problem.layers[layer].grad_bytes for layer in stage]
        pieces = gradient_pieces(sizes, [problem.crossing_bytes[layer] for layer in stage])
        largest = max([largest, *(sum(sizes[place] for place in one) for one in pieces)])
        total += sum(sizes)
    landing = LANDINGS * (replicas - 1) * largest
    return -(-total // replicas) - (-landing // replicas)


class FootprintCache:
    """Footprints of sets of nodes, each computed once while it is remembered.

    Args:
        problem: the placement problem.
        layers_of: by node, its layers.

    Attributes:
        computed: the number of footprints that were computed, a measure of work.
    """

    def __init__(self, problem: Problem, layers_of: Sequence[Sequence[int]]) -> None:
        self._problem, self._layers_of = problem, layers_of
        self._known: dict[frozenset[int], Footprint] = {}
        self.computed = 0

    def footprint(self, nodes: Iterable[int]) -> Footprint:
        """Return the memory of a device that holds these nodes alone."""
        key = frozenset(nodes)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN_SETS:
                self._known.clear()
            layers = (layer for node in key for layer in self._layers_of[node])
            self._known[key] = footprint(self._problem, held_with(self._problem, layers))
            self.computed += 1
        return self._known[key]


# Segments


class SegmentMemory:
    """The memory of one assignment whose devices may have several segments.

    Segments run layer by layer, or as recorded passes. A device counts with the larger of the two.

    Args:
        problem: the placement problem.
        assignment: by layer, the index of its device.
        footprints: by device, the memory of its layers, whatever their segments.
    """

    def __init__(
        self, problem: Problem, assignment: Sequence[int], footprints: Callable[[int], Footprint]
    ) -> None:
        self._problem, self._footprints = problem, footprints
        self._segment_of, self._places = pipelines.staged(problem, assignment, ())

    def use(self, flight: Sequence[int]) -> tuple[MemoryUse, ...]:
        """Return, by device, the memory at its worst moment.

        Args:
            flight: by segment, the micro-batches in flight.
        """
        further = self._further_bytes(flight)
        return tuple(
            self._use_of_device(device, further[device], flight)
            for device in range(len(self._problem.devices))
        )

    def _use_of_device(self, device: int, further: int, flight: Sequence[int]) -> MemoryUse:
        one = self._footprints(device).one
        eager = one.model_copy(update={"activation_bytes": one.activation_bytes + further})
        passing = shared = 0
        for place, segment, held in zip(self._places, self._recorded, flight, strict=True):
            if place == device:
                passing += segment.passing_bytes(held)
                shared += segment.shared_bytes
        if passing + shared <= eager.activation_bytes + eager.workspace_bytes:
            return eager
        return one.model_copy(update={"activation_bytes": passing, "workspace_bytes": shared})

    @cached_property
    def _recorded(self) -> list[Recorded]:
        """The memory of recorded passes, by segment."""
        layers: list[list[int]] = [[] for _ in self._places]
        for layer, segment in enumerate(self._segment_of):
            layers[segment].append(layer)
        return [recorded(self._problem, held_with(self._problem, own)) for own in layers]

    def _further_bytes(self, flight: Sequence[int]) -> list[int]:
        """Return, by device, what all micro-batches but the first keep, layer by layer.

        A layer keeps its saved tensors once for each micro-batch in flight in its segment. A value
        that several segments of a device keep counts with the largest of their numbers.
        """
        further = [0] * len(self._problem.devices)
        for layer, segment in enumerate(self._segment_of):
            further[self._places[segment]] += (flight[segment] - 1) * self._problem.layers[
                layer
            ].saved_bytes
        for value in self._problem.values:
            most: dict[int, int] = {}
            for segment in map(self._segment_of.__getitem__, value.keepers):
                device = self._places[segment]
                most[device] = max(most.get(device, 0), flight[segment])
            for device, count in most.items():
                further[device] += (count - 1) * value.held_bytes
        return further


# Training


def kept_by_step(problem: Problem, held: Held) -> Mapping[int, int]:
    """Return, by step, what a micro-batch leaves for its backward pass; a value counts once."""
    kept: Counter[int] = Counter()
    for layer in held.layers:
        kept[layer] += problem.layers[layer].saved_bytes
    for value in held.values:
        keepers = [keeper for keeper in value.keepers if keeper in held.here]
        if keepers:
            kept[keepers[0]] += value.held_bytes
    return kept


def moments_of_training(
    problem: Problem, held: Held, kept: Mapping[int, int]
) -> list[tuple[Moment, Moment]]:
    """Return, by layer, its step forwards and its step backwards, of one micro-batch."""
    values, gradients = _waiting(held)
    steps = zip(*(sums(changes, held.layers) for changes in (kept, values, gradients)), strict=True)
    layers = [problem.layers[layer] for layer in held.layers]
    return [
        (
            (before + there, layer.forward_workspace_bytes),
            (before + back, layer.backward_workspace_bytes),
        )
        for layer, (before, there, back) in zip(layers, steps, strict=True)
    ]


def _waiting(held: Held) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Return the changes, by step, of the bytes of waiting values and of waiting gradients."""
    values: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    for value in held.values:
        readers = sorted(held.here & value.reader_set)
        kept = [keeper for keeper in value.keepers if keeper in held.here]
        # it waits from its source to its first keeper, else to its last reader
        if readers:
            between(values, value.source + 1, kept[0] if kept else readers[-1], value.held_bytes)
        if value.source in held.here:
            between(gradients, value.source + 1, value.readers[-1], value.gradient_bytes)
        elif readers:
            between(gradients, readers[0], readers[-1], value.gradient_bytes)
        if (
            value.retained_bytes
            and value.readers[-1] in held.here
            and len(held.here.intersection((value.source, *readers))) > 1
        ):
            between(gradients, value.retained_from, value.retained_until, value.retained_bytes)
    return values, gradients


def _waiting_or_sent(held: Held) -> Mapping[int, int]:
    """Return the changes, by step, of the bytes of own values that wait or are sent."""
    values: Counter[int] = Counter()
    over = max(held.layers, default=0) + 1
    for value in held.values:
        kept = [keeper for keeper in value.keepers if keeper in held.here]
        last = max(held.here & value.reader_set, default=0)
        until = kept[0] if kept else over if _is_sent(value, held.here) else last
        between(values, value.source + 1, until, value.held_bytes)
    return values


def recorded(problem: Problem, held: Held) -> Recorded:
    """Return the memory of recorded passes."""
    moments, over = moments_recorded(problem, held)
    each = max([over, *(sum(moment) for moment, _ in moments)]) + crossing_bytes(held)
    backwards = max(0, max((sum(moment) for _, moment in moments), default=0))
    step = held.total(problem.step_bytes)
    if not problem.weights_apart:
        return Recorded(each, backwards + step, 0, landing_bytes(held))
    deferred = held.total(problem.deferred_bytes)
    shared = max((problem.weight_grad_workspace_bytes[layer] for layer in held.layers), default=0)
    return Recorded(each, shared + step, deferred + backwards, landing_bytes(held))


def moments_recorded(problem: Problem, held: Held) -> tuple[list[tuple[Moment, Moment]], int]:
    """Return, by layer, its two steps with separate memory for forward and backward passes.

    Backwards, bytes that layers leave to weight-gradient passes are subtracted while the layers
    have not left them yet. The second result are the bytes that stay when the forward pass is over.
    """
    # Values that arrive lie outside of recorded passes, and count in ``crossing_bytes``.
    own = Held(held.layers, [value for value in held.values if value.source in held.here])
    kept, values, gradients = kept_by_step(problem, own), _waiting_or_sent(own), _staying(held)
    deferred = {layer: problem.deferred_bytes[layer] for layer in held.layers}
    steps = zip(
        *(sums(changes, held.layers) for changes in (kept, values, gradients, deferred)),
        strict=True,
    )
    moments = [
        (
            (before + there, problem.layers[layer].forward_workspace_bytes),
            (back - to_leave, problem.back_workspace_bytes[layer]),
        )
        for layer, (before, there, back, to_leave) in zip(held.layers, steps, strict=True)
    ]
    return moments, sum(kept.values()) + sent_bytes(own)


def crossing_bytes(held: Held) -> int:
    """Return one micro-batch's bytes outside passes: values and gradients that arrive."""
    total = 0
    for value in held.values:
        if value.source not in held.here:
            total += 0 if held.here.isdisjoint(value.reader_set) else value.held_bytes
        elif not held.here.issuperset(value.reader_set):
            total += value.arriving_bytes
    return total


def sent_bytes(held: Held) -> int:
    """Return the bytes of a micro-batch that are sent, not kept, and stay until a pass is over."""
    return sum(value.held_bytes for value in held.values if _is_sent(value, held.here))


def _is_sent(value: Value, here: frozenset[int]) -> bool:
    return (
        value.source in here
        and not here.issuperset(value.reader_set)
        and here.isdisjoint(value.keepers)
    )


def landing_bytes(held: Held) -> int:
    """Return the bytes outside passes of one micro-batch, if backward passes share memory.

    These are the gradients that a device sends, and the received ones that are not in
    ``crossing_bytes``.
    """
    total = 0
    for value in held.values:
        if value.source not in held.here:
            total += 0 if held.here.isdisjoint(value.reader_set) else value.gradient_bytes
        elif not held.here.issuperset(value.reader_set):
            total += value.gradient_bytes - value.arriving_bytes
    return total


def _staying(held: Held) -> Mapping[int, int]:
    """Return the changes, by step, of the bytes of gradients that wait, or are to be sent."""
    gradients: Counter[int] = Counter()
    for value in held.values:
        readers = sorted(held.here & value.reader_set)
        if readers:
            between(gradients, value.source + 1, readers[-1], value.gradient_bytes)
    return gradients


def between(changes: Counter[int], first: int, end: int, size: int) -> None:
    """Add a size from one step on, until another."""
    if first < end:
        changes[first] += size
        changes[end] -= size


def sums(changes: Mapping[int, int], steps: Iterable[int]) -> list[int]:
    """Return, by step, the sum of all changes at it or before."""
    ordered = sorted(changes.items())
    found, total, place = [], 0, 0
    for step in steps:
        while place < len(ordered) and ordered[place][0] <= step:
            total += ordered[place][1]
            place += 1
        found.append(total)
    return found


# Inference


def _worst_of_inference(problem: Problem, held: Held) -> Moment:
    """Return the worst moment; values also arrive at steps of other devices' layers."""
    workspace = {layer: problem.layers[layer].forward_workspace_bytes for layer in held.layers}
    changes = defaultdict(int, dict.fromkeys(held.layers, 0))
    for value in held.values:
        last = (
            value.readers[-1]
            if value.source in held.here
            else max(held.here & value.reader_set, default=value.source)
        )
        changes[value.source] += value.held_bytes
        changes[last + 1] -= value.held_bytes
    steps = sorted(changes)
    live = itertools.accumulate(changes[step] for step in steps)
    return max(
        zip(live, (workspace.get(step, 0) for step in steps), strict=True), key=sum, default=(0, 0)
    )
