"""Slots on a device for parameters that rest on the host.

Each device has two slots of memory. The resting layers of a device take them in turn, so a layer's
parameters are copied while earlier layers compute::

    compute      [layer 1][layer 2][layer 3][layer 4] ...
    slot 0       1────────▶        3────────▶
    slot 1                2────────▶        4────────▶
    copies       [1][2]    [3]      [4]      ...

A copy into a slot begins when the slot's previous layer has run. ``solver/pass_times.py`` has the
times. The views of a slot never move, so recorded passes may read them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from threading import RLock
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from placer import devices
from placer.devices import FileReader, Lane, MappedFile, Mark

Copying: TypeAlias = Mark | Future[Mark]
"""A copy into a slot: its mark, or the future of it that a reader of files returned."""

SLOTS = 2
"""Slots of a device: one is read while the other is filled."""


# Lanes of slots that are gone: a device has few streams that recordings may use.
_idle_lanes: defaultdict[torch.device, list[Lane]] = defaultdict(list)


def _lane_of(owner: Slots) -> Lane:
    """Return a lane for copies, which others may use once its owner is gone."""
    idle = _idle_lanes[owner.device]
    lane = idle.pop() if idle else Lane(owner.device, recorded=True)
    weakref.finalize(owner, idle.append, lane)
    return lane


class Slots:
    """The slots of one device, and the lane of the copies into them.

    Args:
        device: the device.
        size_bytes: of each slot.
        lock: held by the thread whose work uses the slots; None for a new one.
        reader: issues the copies, and reads files; None if no parameters rest on the disk.

    Attributes:
        device: as given.
        reader: as given.
        lock: as given. Passes take turns, but meanwhile a thread may call a part of the model.
        lane: of the copies.
        memory: of each slot, shape ``(size_bytes,)``.
        held: the unit in each slot in passes that are not recorded; None for none.
    """

    def __init__(
        self,
        device: torch.device,
        size_bytes: int,
        lock: AbstractContextManager[Any] | None = None,
        reader: FileReader | None = None,
    ) -> None:
        self.device, self.reader = device, reader
        self.lock: Any = RLock() if lock is None else lock
        self.lane = _lane_of(self)
        with torch.inference_mode(False):
            self.memory = [
                torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)
            ]
        self.held: list[Unit | None] = [None] * SLOTS
        self._released: Mark = None
        # by slot, the work of any thread that has read it since the latest copy
        self._readers: list[list[Mark]] = [[] for _ in range(SLOTS)]

    def acquire(self) -> None:
        """Let copies wait for everything that read the slots before, in whichever stream."""
        self.lane.wait(self._released)
        for number in range(SLOTS):
            self.empty(number)
        self.follow()

    def note_read(self, number: int) -> None:
        """Note that this thread's work so far reads a slot."""
        self._readers[number].append(Lane(self.device, caller=True).mark())

    def empty(self, number: int) -> None:
        """Let later copies wait for everything that has read a slot."""
        self.lane.wait(*self._readers[number])
        self._readers[number] = []

    def begin(self, number: int, copied: Callable[[], Mark]) -> Copying:
        """Start a copy into a slot, behind everything that has read it.

        Args:
            number: of the slot.
            copied: issues the copy, and returns its mark.
        """
        reads, self._readers[number] = self._readers[number], []

        def issue() -> Mark:
            self.lane.wait(*reads)
            return copied()

        return issue() if self.reader is None else self.reader.submit(issue)

    def follow(self) -> None:
        """Let later copies wait for this thread's work on the device so far."""
        self.lane.wait(Lane(self.device, caller=True).mark())

    def release(self) -> None:
        """Note that this thread's work so far is the last that reads the slots."""
        if self.reader is not None:
            self.reader.drain()
        caller = Lane(self.device, caller=True)
        caller.wait(self.lane.mark())  # copies that nobody waited for
        self._released = caller.mark()

    def wait(self, copy: Copying) -> None:
        """Let this thread's later work on the device wait for a copy.

        Raises:
            PlacementError: a file that it copies cannot be read.
        """
        mark = copy.result() if isinstance(copy, Future) else copy
        Lane(self.device, caller=True).wait(mark)


class Unit:
    """Parameters that are in a slot together.

    Args:
        parameters: of a layer, on the host.
        slots: of the device that reads them.
        number: of the slot.
        parts: the modules that read them, one after another; 1 for a captured layer.
        files: of parameters that rest on the disk, by the ``id`` of each.
        chosen: the ``id`` of each parameter of experts, which others copy once they are chosen.

    Attributes:
        views: in the slot, one for each parameter.
        slots: as given.
        number: as given.
        parts: as given.
        successor: the next unit of the device; None for the last.
        next: the next unit in the same slot; None for the last.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        slots: Slots,
        number: int,
        parts: int = 1,
        files: Mapping[int, MappedFile] = MappingProxyType({}),
        chosen: Collection[int] = (),
    ) -> None:
        self.slots, self.number = slots, number
        self.successor: Unit | None = None
        self.next: Unit | None = None
        self.parts = parts
        self._parameters, self._files, self._chosen = parameters, files, chosen
        with torch.inference_mode(False), torch.no_grad():
            memory = slots.memory[number]
            self.views = [
                _as_parameter(view, parameter)
                for view, parameter in zip(
                    devices.views(memory, parameters), parameters, strict=True
                )
            ]
        self._written: list[int] = []
        self._copy: Copying = None
        self._left, self._times = 0, 1

    def copied(self) -> Mark:
        """Start copying the parameters into the slot; return the mark of the last copy."""
        with (
            devices.unobserved(),
            torch.no_grad(),
            # Hooks would bring the parameters to the device first, in other memory.
            torch._C.DisableTorchFunction(),
            self.slots.lane,
        ):
            mapped = []
            for view, parameter in zip(self.views, self._parameters, strict=True):
                if id(parameter) in self._chosen:
                    continue
                if (file := self._files.get(id(parameter))) is not None:
                    mapped.append((parameter, view, file))
                else:
                    view.copy_(parameter, non_blocking=True)
            if self.slots.reader is not None:
                self.slots.reader.copy(mapped, self.slots.lane)
        return self.slots.lane.mark()

    def load(self) -> None:
        """Start copying the parameters in a pass that is not recorded."""
        self._written = self._versions()
        self._copy = self.slots.begin(self.number, self.copied)
        self.slots.held[self.number] = self

    def enter(self) -> None:
        """Let this thread's later work read the slot, with the parameters in it."""
        slots = self.slots
        # Another unit was copied to the slot, or the parameters have changed since the copy.
        if slots.held[self.number] is not self or self._written != self._versions():
            slots.acquire()
            self.load()
            # The next unit's copy runs while this one computes.
            after = self.successor
            if after is not None and slots.held[after.number] is not after is not self:
                after.load()
        slots.wait(self._copy)

    def leave(self) -> None:
        """Note that a part of the layer has run; after the last one, fill the slot again."""
        self._left += 1
        if self._left < self.parts * self._times:
            return
        self._left = 0
        self.slots.note_read(self.number)
        if self.next is not None:
            self.next.load()

    def begin(self, times: int = 1) -> None:
        """Forget what an earlier pass left half done.

        Args:
            times: how often the layer runs before the next one.
        """
        self._left, self._times = 0, times

    def _versions(self) -> list[int]:
        return [*map(devices.write_count, self._parameters)]


def in_turn(units: Sequence[Unit]) -> None:
    """Let units follow one another, in the order in which a device reads them."""
    latest: dict[int, Unit] = {}
    for place, unit in enumerate(units):
        unit.successor = units[place + 1] if place + 1 < len(units) else None
        if unit.number in latest:
            latest[unit.number].next = unit
        latest[unit.number] = unit


def _as_parameter(view: Tensor, parameter: Tensor) -> Tensor:
    """Return a view as a parameter with the attributes of another one."""
    found = nn.Parameter(view, requires_grad=False)
    vars(found).update(vars(parameter))
    return found
