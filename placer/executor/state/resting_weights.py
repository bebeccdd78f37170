"""Parameters that rest on the host, and their copies on the devices of their layers.

Each device has two slots of memory. The resting layers of a device take them in turn, so a layer's
parameters are copied while earlier layers compute::

    compute      [layer 1][layer 2][layer 3][layer 4] ...
    slot 0       1────────▶        3────────▶
    slot 1                2────────▶        4────────▶
    copies       [1][2]    [3]      [4]      ...

A copy into a slot begins when the slot's previous layer has run. ``solver/costs.py`` has the times.
The views of a slot never move, so recorded passes may read them.

Parameters that rest on the disk are mapped from files. Where a device has some, a thread of its own
issues the device's copies in their order, and reads the files meanwhile. A recording cannot read
files, so such passes are not recorded.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import RLock
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.hook_path.device_alignment import BorrowedWeights
from placer.devices import FileReader, Lane, MappedFile, Mark
from placer.errors import InputError
from placer.executor.segments import Segment, Step
from placer.executor.state import expert_weights
from placer.executor.state.assignment import Assignment
from placer.executor.state.expert_weights import ChosenExperts, stacks_in
from placer.schema.base import module_paths

Copying: TypeAlias = Mark | Future[Mark]
"""A copy into a slot: its mark, or the future of it that a reader of files returned."""

SLOTS = 2
"""Slots of a device: one is read while the other is filled."""

Note = Callable[[Callable[[], None], torch.device], None]
"""Notes that a pass does something on a device, in addition to operations of torch."""


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
        self._left = 0

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
        if self._left < self.parts:
            return
        self._left = 0
        self.slots.note_read(self.number)
        if self.next is not None:
            self.next.load()

    def begin(self) -> None:
        """Forget what an earlier pass left half done."""
        self._left = 0

    def _versions(self) -> list[int]:
        return [*map(devices.write_count, self._parameters)]


@dataclass(eq=False)
class Action:
    """Something that a pass does for resting weights, in the place of an operation in a trace.

    Attributes:
        unit: the parameters.
        is_entry: whether they are read from now on; otherwise they are not read any more.
    """

    unit: Unit
    is_entry: bool

    def __call__(self) -> None:
        """Wait for the unit's copy, or fill the slot again, in a pass that is not recorded."""
        if self.is_entry:
            self.unit.enter()
        else:
            self.unit.leave()


class RestingReplay:
    """The copies of a recorded piece of a pass, on one device.

    The first copy into each slot begins before the piece; the others are a part of it, in a branch
    of the recording::

        outside   copy 1, copy 2 ──▶│
        piece                       │ layer 1 ──┬─ layer 2 ──┬─ layer 3 ── layer 4
        branch                      │           └─ copy 3 ───┼──▶┘ copy 4 ──▶┘

    Args:
        actions: of the piece, in their order.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._slots = actions[0].unit.slots
        # what is copied: the modules of a layer read one copy, and so does no other call of them
        self._units: list[Unit] = []
        self.restart()
        for action in actions:
            if self._is_new(action):
                self._units.append(action.unit)
        # by number of a copy: the next one into the same slot
        self._first: list[int] = []
        self._next: dict[int, int] = {}
        latest: dict[int, int] = {}
        for place, unit in enumerate(self._units):
            if unit.number in latest:
                self._next[latest[unit.number]] = place
            else:
                self._first.append(place)
            latest[unit.number] = place
        self._before: list[Mark] = []

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while the piece runs."""
        found: AbstractContextManager[Any] = self._slots.lock
        return found

    def begin(self) -> None:
        """Start the first copies, outside of the recording."""
        self._slots.acquire()
        self._slots.held = [None] * SLOTS
        self._before = [self._units[place].copied() for place in self._first]

    def wait(self) -> None:
        """Let the piece wait for the first copies."""
        for mark in self._before:
            self._slots.wait(mark)

    def end(self) -> None:
        """Note that the piece is the latest that reads the slots."""
        self._slots.release()

    def restart(self) -> None:
        """Begin at the piece's first action again."""
        self._place, self._entered = -1, 0
        self._latest: Unit | None = None
        self._marks: dict[int, Mark] = {}

    def _is_new(self, action: Action) -> bool:
        """Count an action; return whether a unit begins to be read."""
        if not action.is_entry:
            return False
        if action.unit is self._latest and self._entered < action.unit.parts:
            self._entered += 1
            return False
        self._latest, self._entered, self._place = action.unit, 1, self._place + 1
        return True

    def act(self, action: Action) -> None:
        """Do an action, as a part of the piece."""
        if self._is_new(action) and self._place in self._marks:
            self._slots.wait(self._marks[self._place])
        following = self._next.get(self._place)
        is_over = not action.is_entry and self._entered == action.unit.parts
        if is_over and following is not None:
            self._slots.follow()
            self._marks[following] = self._units[following].copied()


def in_turn(units: Sequence[Unit]) -> None:
    """Let units follow one another, in the order in which a device reads them."""
    latest: dict[int, Unit] = {}
    for place, unit in enumerate(units):
        unit.successor = units[place + 1] if place + 1 < len(units) else None
        if unit.number in latest:
            latest[unit.number].next = unit
        latest[unit.number] = unit


class Noting:
    """Notes actions for a trace, if there is one.

    Attributes:
        note: of the trace; None without one.
    """

    def __init__(self) -> None:
        self.note: Note | None = None

    def __call__(self, action: Action) -> None:
        """Note an action."""
        if self.note is not None:
            self.note(action, action.unit.slots.device)


class ModuleWeights:
    """The resting parameters of one module while it runs through hooks.

    Args:
        unit: the parameters of its layer.
        places: each parameter's module, and its name there, in the order of the unit's views.
        noting: notes what happens, in a pass that is traced.
    """

    def __init__(
        self, unit: Unit, places: Sequence[tuple[nn.Module, str, Tensor]], noting: Noting
    ) -> None:
        self._unit, self._places, self._noting = unit, places, noting
        # Not in the unit: a cycle of references would keep the slots until a garbage collection.
        self._entry, self._exit = Action(unit, True), Action(unit, False)
        # a stack, since a module may call itself
        self._originals: list[list[Any]] = []

    def enter(self, *_: Any) -> None:
        """Put the copies in the slot in the parameters' place."""
        # The lock is held until ``leave``, so that no other thread runs the module with the copies.
        lock = self._unit.slots.lock
        lock.acquire()
        try:
            self._unit.enter()
        except BaseException:
            lock.release()
            raise
        self._noting(self._entry)
        self._originals.append([owner._parameters[name] for owner, name, _ in self._places])
        for owner, name, view in self._places:
            owner._parameters[name] = view  # type: ignore[assignment]

    def leave(self) -> None:
        """Put the parameters back."""
        if not self._originals:
            return  # a hook before it failed
        for (owner, name, _), original in zip(self._places, self._originals.pop(), strict=True):
            owner._parameters[name] = original
        self._unit.leave()
        self._noting(self._exit)
        self._unit.slots.lock.release()


class RestingWeights:
    """The parameters of a model that rest on the host, under one map.

    Args:
        module: the model.
        assignment: the devices of its layers, and which parameters rest.

    Attributes:
        by_module: what runs before and after each module whose parameters rest.
        experts: the paths of modules of experts that are copied as tokens choose them.
        on_disk: the number of parameters that rest on the disk.
        lock: held by the thread that runs a pass, or a module whose parameters rest.
    """

    def __init__(self, module: nn.Module, assignment: Assignment) -> None:
        self._module = module
        self._noting = Noting()
        parameters = dict(module.named_parameters())
        self._ids = {id(parameters[name]) for name in assignment.resting}
        on_disk = [name for name in assignment.resting if assignment.rests_on_disk(name)]
        self.on_disk = len(on_disk)
        self._files = _mapped_files([parameters[name] for name in on_disk])
        self.experts = _large_stacks(module, assignment.resting)
        self._chosen = {id(parameters[name]) for names in self.experts.values() for name in names}
        layers = _names_by_layer(assignment)
        places = {layer: assignment.place_of(names[0]) for layer, names in layers.items()}
        # A slot has room for the largest layer of its device.
        sizes: defaultdict[torch.device, int] = defaultdict(int)
        for layer, names in layers.items():
            size = sum(devices.aligned_bytes(parameters[name]) for name in names)
            sizes[places[layer]] = max(sizes[places[layer]], size)
        self.lock: AbstractContextManager[Any] = RLock()
        reading = {assignment.place_of(name) for name in on_disk}
        self._slots = {
            place: Slots(place, size, self.lock, FileReader() if place in reading else None)
            for place, size in sizes.items()
        }
        self._units: defaultdict[torch.device, list[Unit]] = defaultdict(list)
        self.by_module: dict[nn.Module, BorrowedWeights] = {}
        for layer, names in layers.items():
            self._add(layer, names, parameters, places[layer])
        for units in self._units.values():
            in_turn(units)

    def _add(
        self,
        layer: str,
        names: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        place: torch.device,
    ) -> None:
        """Add the unit of a layer, and its modules."""
        paths = [path for path in module_paths(layer) if any(_is_in(name, path) for name in names)]
        number = len(self._units[place]) % SLOTS
        own = [parameters[name] for name in names]
        unit = Unit(own, self._slots[place], number, len(paths), self._files, self._chosen)
        self._units[place].append(unit)
        for path in paths:
            owners = [
                (self._module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], view)
                for name, view in zip(names, unit.views, strict=True)
                if _is_in(name, path)
            ]
            self.by_module[self._module.get_submodule(path)] = ModuleWeights(
                unit, owners, self._noting
            )
        views = dict(zip(names, unit.views, strict=True))
        for path, stacks in self.experts.items():
            if stacks[0] in views:
                module = self._module.get_submodule(path)
                rows = [(parameters[name], views[name]) for name in stacks]
                self.by_module[module] = ChosenExperts(module, rows, self.by_module.get(module))

    @property
    def slots(self) -> list[Slots]:
        """Return the slots of all devices."""
        return [*self._slots.values()]

    def attach(self, parts: Sequence[Segment]) -> dict[torch.device, list[Unit]]:
        """Let captured layers read their resting parameters from the slots.

        Args:
            parts: the segments of a capture.

        Returns:
            The units of each device, in the order in which it reads them.
        """
        reading: defaultdict[torch.device, list[tuple[Step, list[int]]]] = defaultdict(list)
        for step in (step for part in parts for step in part.steps):
            positions = [number for number, one in enumerate(step.state) if id(one) in self._ids]
            if positions:
                reading[step.device].append((step, positions))
        return {place: self._captured_units(place, rows) for place, rows in reading.items()}

    def _captured_units(
        self, place: torch.device, rows: Sequence[tuple[Step, list[int]]]
    ) -> list[Unit]:
        """Return the units of a device's captured layers.

        Args:
            place: the device.
            rows: layers, each with the positions of its resting parameters.
        """
        size = max(
            sum(devices.aligned_bytes(step.state[number]) for number in positions)
            for step, positions in rows
        )
        slots = self._slots[place]
        if size > slots.memory[0].numel():
            # the capture has layers that consist of several layers of the map
            slots = Slots(place, size, self.lock, slots.reader)
        units: list[Unit] = []
        for step, positions in rows:
            _refuse_changed([step.layer.state[number] for number in positions], step.layer.mutated)
            own = [step.state[number] for number in positions]
            unit = Unit(own, slots, len(units) % SLOTS, files=self._files)
            step.foreign = tuple(one for one in step.foreign if one not in positions)
            step.resting = unit, dict(zip(positions, unit.views, strict=True))
            units.append(unit)
        in_turn(units)
        return units

    @contextmanager
    def reading(self, units: Mapping[torch.device, Sequence[Unit]] | None = None) -> Iterator[None]:
        """Run a pass inside the block; the first copies begin at once.

        Args:
            units: of a capture; None for a pass through hooks.
        """
        self._refuse_gradients()
        used = (self._units if units is None else units).values()
        with self.lock:
            for own in used:
                slots = own[0].slots
                slots.acquire()
                slots.held = [None] * SLOTS
                for unit in own:
                    unit.begin()
                for unit in own[:SLOTS]:
                    unit.load()
            try:
                yield
            finally:
                for own in used:
                    own[0].slots.release()
                    own[0].slots.held = [None] * SLOTS

    @contextmanager
    def noted(self, note: Note) -> Iterator[None]:
        """Note inside the block when modules begin and end to read their parameters."""
        before, self._noting.note = self._noting.note, note
        try:
            yield
        finally:
            self._noting.note = before

    def _refuse_gradients(self) -> None:
        """Raise an InputError if a backward pass might read slots, whose weights change."""
        if torch.is_grad_enabled() and any(one.requires_grad for one in self._module.parameters()):
            raise InputError(
                f"{len(self._ids)} parameters rest on the host, which supports no gradients: call "
                "the model inside `with torch.no_grad():`"
            )


def _names_by_layer(assignment: Assignment) -> dict[str, list[str]]:
    """Return the names of resting parameters by layer, in the order of the map."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name, layer in assignment.resting.items():
        layers[layer].append(name)
    return {layer: layers[layer] for layer in assignment.layers if layer in layers}


def _mapped_files(parameters: Sequence[Tensor]) -> dict[int, MappedFile]:
    """Return the files of parameters, by the ``id`` of each that is mapped from one."""
    mapped = devices.MappedFiles()
    return {id(one): file for one in parameters if (file := mapped.of(one)) is not None}


def _large_stacks(module: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Return the stacks of experts, see ``stacks_in``; none if they are too small to gain."""
    stacks = stacks_in(module, names)
    inside = (module.get_parameter(name) for found in stacks.values() for name in found)
    return stacks if sum(one.nbytes for one in inside) >= expert_weights.LEAST_BYTES else {}


def _is_in(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


def _as_parameter(view: Tensor, parameter: Tensor) -> Tensor:
    """Return a view as a parameter with the attributes of another one."""
    found = nn.Parameter(view, requires_grad=False)
    vars(found).update(vars(parameter))
    return found


def _refuse_changed(names: Sequence[str], mutated: Sequence[str]) -> None:
    for name in names:
        if name in mutated:
            raise InputError(
                f"parameter {name!r} rests on the host, and forward changes it; give a placement "
                "in which its layer's parameters stay on the device"
            )
