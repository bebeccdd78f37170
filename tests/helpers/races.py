"""Finds accesses to one tensor that nothing keeps in order, as on devices whose queues of work run
at their own pace.

    # lanes become queues with vector clocks; copies and passes are recorded
    with watched(monkeypatch) as races:
        ... a stream on stand-ins ...
    assert races.found == []

Two accesses of which one writes must have an order: the later one's queue waited, directly or by
way of others, for a mark behind the earlier one. What the host issues first is not first on the
devices.

Source: happens-before by vector clocks, Fidge 1988, Mattern 1989.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from placer import devices
from placer.devices import lanes, tensor_moves
from placer.executor.engine import engine, stage
from placer.executor.engine.engine import Engine
from placer.executor.inference import stream, stream_engine
from placer.executor.training import feed, input_gradients, training_pipeline
from placer.executor.training.stages import replica_exchange, weight_aliases
from placer.executor.training.stages.training_slot import TrainingSlot

Clock = dict[Hashable, int]
Site = tuple[str, int]


@dataclass(frozen=True)
class _Mark:
    clock: Clock


class _Access(NamedTuple):
    queue: Hashable
    number: int
    writes: bool
    what: str


class Races:
    """Queues with their clocks, and what was accessed.

    Args:
        deaf: a place in the code whose waits are not heard, to see that they are needed.

    Attributes:
        found: accesses without an order, in words.
        sites: the places in the code that waited for a mark.
    """

    def __init__(self, deaf: Site | None = None) -> None:
        self.found: list[str] = []
        self.sites: set[Site] = set()
        self.active: list[_Lane] = []
        self._deaf = deaf
        self._numbers = count(1)
        self._clocks: dict[Hashable, Clock] = {}
        self._host: Clock = {}
        self._accesses: dict[Hashable, list[_Access]] = {}
        self._names: dict[int, Hashable] = {}
        # so that no address comes twice
        self._kept: list[Tensor] = []
        self._slots: dict[int, Any] = {}

    def clock(self, queue: Hashable) -> Clock:
        """What a queue knows to be over when it comes to what is issued next."""
        return self._clocks.setdefault(queue, {})

    def wait(self, queue: Hashable, mark: _Mark, site: Site) -> None:
        """A queue waits for a mark."""
        self.sites.add(site)
        if site != self._deaf:
            _join(self.clock(queue), mark.clock)

    def synchronise(self, device: torch.device) -> None:
        """The host waits for a device: all that it issues from now on comes later."""
        for queue, clock in self._clocks.items():
            if queue[1] == device:  # type: ignore[index]
                _join(self._host, clock)

    def name(self, tensor: Tensor, key: Hashable) -> None:
        """On a GPU a recording writes to the same memory each time: give the tensor the name of
        that."""
        self._kept.append(tensor)
        self._names[tensor.untyped_storage()._cdata] = key

    def number(self, slot: Any) -> int:
        """Return what tells a slot from every other one, also from one that is gone."""
        return id(self._slots.setdefault(id(slot), slot))

    def own(
        self, slot: Any, made: Mapping[str, Any], given: Iterable[Any], kind: str = ""
    ) -> list[Tensor]:
        """Return the results of a pass that are not views of its inputs, named after their slot."""
        taken = {tensor.untyped_storage()._cdata for tensor in given if isinstance(tensor, Tensor)}
        found = []
        for name, tensor in made.items():
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in taken:
                self.name(tensor, (self.number(slot), kind + name))
                found.append(tensor)
        return found

    def run(
        self, queues: Iterable[Hashable], reads: Iterable[Any], writes: Iterable[Any], what: str
    ) -> None:
        """Work in one queue, or in two that meet for it."""
        queues = list(dict.fromkeys(queues))
        clock: Clock = dict(self._host)
        for queue in queues:
            _join(clock, self.clock(queue))
        number = next(self._numbers)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                # a tuple is the name of memory that no tensor stands for
                if isinstance(tensor, Tensor | tuple):
                    key = self._key(tensor) if isinstance(tensor, Tensor) else tensor
                    self._access(key, _Access(queues[0], number, is_write, what), clock)
        clock[queues[0]] = number
        for queue in queues:
            self._clocks[queue] = dict(clock)

    def _key(self, tensor: Tensor) -> Hashable:
        self._kept.append(tensor)
        storage = tensor.untyped_storage()._cdata
        return self._names.get(storage, storage)

    def _access(self, key: Hashable, access: _Access, clock: Clock) -> None:
        for before in self._accesses.setdefault(key, []):
            if (before.writes or access.writes) and clock.get(
                before.queue, 0
            ) < before.number != access.number:
                self.found.append(f"{before.what} and {access.what}, of {key}")
        self._accesses[key].append(access)


def _join(clock: Clock, other: Clock) -> None:
    for queue, number in other.items():
        clock[queue] = max(number, clock.get(queue, 0))


class _Lane:
    """Stands in for a ``devices.Lane``."""

    races: Races
    _ids = count()

    def __init__(self, device: torch.device, caller: bool = False) -> None:
        self.device = device
        self.queue: Hashable = ("caller" if caller else next(self._ids), device)

    def __enter__(self) -> _Lane:
        self.races.active.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self.races.active.pop()

    def wait(self, *marks: Any) -> None:
        frame = sys._getframe(1)
        for mark in marks:
            if mark is not None:
                self.races.wait(self.queue, mark, (frame.f_code.co_name, frame.f_lineno))

    def mark(self, timed: bool = False) -> _Mark:
        return _Mark(dict(self.races.clock(self.queue)))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, deaf: Site | None = None) -> Iterator[Races]:
    """Note what streams and training steps do inside."""
    races = Races(deaf)
    shared: dict[torch.device, _Lane] = {}
    with monkeypatch.context() as patch:
        patch.setattr(_Lane, "races", races, raising=False)
        for module in (
            lanes,
            engine,
            stage,
            stream,
            stream_engine,
            feed,
            input_gradients,
            training_pipeline,
            weight_aliases,
            replica_exchange,
        ):
            patch.setattr(module, "Lane", _Lane)
        patch.setattr(
            devices, "shared_lane", lambda device: shared.setdefault(device, _Lane(device))
        )
        patch.setattr(devices, "synchronise", races.synchronise)
        _note_memory(races, patch)
        _note_passes(races, patch)
        _note_weights(races, patch)
        yield races


def _note_memory(races: Races, patch: pytest.MonkeyPatch) -> None:
    """Copies, and what is taken from the allocator: the memory may be what the caller used a moment
    ago."""
    write, add, empty_like = tensor_moves.write, tensor_moves.add, torch.empty_like

    def noted_write(
        source: Tensor, target: Tensor, here: torch.device, there: torch.device
    ) -> None:
        what = f"a copy from {here} to {there}"
        races.run([lane.queue for lane in races.active], [source], [target], what)
        write(source, target, here, there)

    def noted_add(summand: Tensor, total: Tensor) -> None:
        place = tensor_moves.location(total)
        races.run(
            [lane.queue for lane in races.active], [summand, total], [total], f"a sum on {place}"
        )
        add(summand, total)

    def noted_empty_like(tensor: Tensor, **options: Any) -> Tensor:
        made = empty_like(tensor, **options)
        if (place := options.get("device")) is not None:
            races.run([("caller", place)], [], [made], f"the caller's earlier work on {place}")
        return made

    patch.setattr(tensor_moves, "write", noted_write)
    patch.setattr(tensor_moves, "add", noted_add)
    patch.setattr(torch, "empty_like", noted_empty_like)


def _note_passes(races: Races, patch: pytest.MonkeyPatch) -> None:
    """Passes, with what they keep for one another."""
    compute = Engine.compute

    def noted_compute(self: Engine[Any], item: Any, slot: Any, after: Any = ()) -> Any:
        stage, work = self.stages[item.stage], slot.passes[item.phase]

        def noted_work() -> None:
            work()
            reads, writes = _of_pass(races, stage, slot, item.phase)
            what = f"{item.phase} {item.micro_batch} of segment {item.stage}"
            races.run([lane.queue for lane in races.active], reads, writes, what)

        # eager calls have no lanes: their work is the caller's
        if stage.device not in self.lanes:
            return compute(self, item, slot, after)
        slot.passes[item.phase] = noted_work
        try:
            return compute(self, item, slot, after)
        finally:
            slot.passes[item.phase] = work

    patch.setattr(Engine, "compute", noted_compute)


def _note_weights(races: Races, patch: pytest.MonkeyPatch) -> None:
    """What is done to gradients and parameters together, in a lane."""
    copy, zero, add = torch._foreach_copy_, torch._foreach_zero_, torch._foreach_add_

    def note(reads: Any, writes: Any, what: str) -> None:
        if races.active:
            races.run([lane.queue for lane in races.active], reads, writes, what)

    def noted_copy(targets: Any, sources: Any, *rest: Any) -> Any:
        note(sources, targets, "a copy of many tensors")
        return copy(targets, sources, *rest)

    def noted_zero(tensors: Any) -> Any:
        note((), tensors, "the beginning of gradients")
        return zero(tensors)

    def noted_add(totals: Any, terms: Any, **options: Any) -> Any:
        note([*totals, *terms] if isinstance(terms, list) else totals, totals, "a sum of gradients")
        return add(totals, terms, **options)

    patch.setattr(torch, "_foreach_copy_", noted_copy)
    patch.setattr(torch, "_foreach_zero_", noted_zero)
    patch.setattr(torch, "_foreach_add_", noted_add)


def _of_pass(races: Races, stage: Any, slot: Any, phase: str) -> tuple[list[Any], list[Any]]:
    """What a pass reads and writes; what it keeps for the next one of its slot has a name alone."""
    number = races.number(slot)
    kept, deferred = (number, "activations"), (number, "deferred")
    state = [tensor for step in stage.segment.steps for tensor in step.state]
    if not isinstance(slot, TrainingSlot):
        return [*slot.inputs.values(), *state], races.own(slot, slot.outputs, slot.inputs.values())
    changed = [
        tensor
        for step in stage.segment.steps
        for name, tensor in zip(step.layer.state, step.state, strict=True)
        if name in step.layer.mutated
    ]
    gradients = [tensor.grad for tensor in state if tensor.is_leaf and tensor.grad is not None]
    if phase == "forward":
        made = races.own(slot, slot.outputs, slot.inputs.values())
        total = [] if stage.head is None else [stage.head.total]
        return [*slot.inputs.values(), *slot.targets, *state], [*made, *changed, *total, kept]
    if phase == "backward":
        made = races.own(slot, slot.input_gradients, slot.gradients.values(), "gradient of ")
        return [kept, *slot.gradients.values(), *slot.inputs.values(), *state], [
            *made,
            *gradients,
            deferred,
        ]
    return [kept, deferred, *slot.gradients.values(), *slot.inputs.values()], gradients
