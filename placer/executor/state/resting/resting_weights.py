"""Parameters of a model that rest on the host, and are read from slots on the devices.

``weight_slots`` has the slots, ``resting_replay`` the copies of recorded passes.

Parameters that rest on the disk are mapped from files. Where a device has some, a thread of its own
issues the device's copies in their order, and reads the files meanwhile. A recording cannot read
files, so such passes are not recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.expert_stacks import stacks_in
from placer.capture.hook_path.device_alignment import BorrowedWeights
from placer.devices import FileReader, MappedFile
from placer.errors import InputError
from placer.executor.segments import Segment, Step
from placer.executor.state.assignment import Assignment
from placer.executor.state.resting.expert_weights import ChosenExperts
from placer.executor.state.resting.resting_replay import Action
from placer.executor.state.resting.weight_slots import SLOTS, Slots, Unit, in_turn
from placer.schema.base import copies_chosen_experts, module_paths

Note = Callable[[Callable[[], None], torch.device], None]
"""Notes that a pass does something on a device, in addition to operations of torch."""


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
        paths = [
            path
            for path in dict.fromkeys(module_paths(layer))
            if any(_is_in(name, path) for name in names)
        ]
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
    def reading(
        self, units: Mapping[torch.device, Sequence[Unit]] | None = None, times: int = 1
    ) -> Iterator[None]:
        """Run a pass inside the block; the first copies begin at once.

        Args:
            units: of a capture; None for a pass through hooks.
            times: how often each layer runs before the next one.
        """
        self._refuse_gradients()
        used = (self._units if units is None else units).values()
        with self.lock:
            for own in used:
                slots = own[0].slots
                slots.acquire()
                slots.held = [None] * SLOTS
                for unit in own:
                    unit.begin(times)
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
    return stacks if copies_chosen_experts(sum(one.nbytes for one in inside)) else {}


def _is_in(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


def _refuse_changed(names: Sequence[str], mutated: Sequence[str]) -> None:
    for name in names:
        if name in mutated:
            raise InputError(
                f"parameter {name!r} rests on the host, and forward changes it; give a placement "
                "in which its layer's parameters stay on the device"
            )
