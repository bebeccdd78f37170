"""DataFlow: an unmodified model whose layers run on the devices of a map or placement.

    flow = placer.DataFlow(model)
    flow.update_flow(placement)        # or edit flow.layer_gpus, then flow.update_flow()
    y = flow(x)                        # as model(x), with equal outputs and gradients
    flow.undo()                        # restores the original state

The module's source is never rewritten, and its parameters stay the same objects.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from threading import Lock, RLock
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from placer import devices
from placer.capture.argument_checks import optimizer_list, require_flags, require_module
from placer.capture.batch_dims.batch_layout import Call, Part
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.granularity import Granularity, granularity_for_map
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import flatten_inputs
from placer.devices import DeviceLike
from placer.errors import InputError, PlacementError, kind_of
from placer.executor.checks.batch_check import Weights
from placer.executor.engine.checkpointed_segments import with_checkpoints
from placer.executor.hook_path import HookPath
from placer.executor.inference.repeated_calls import RepeatedCalls
from placer.executor.inference.stream import Streams
from placer.executor.micro_batches import Cutter, MicroBatches
from placer.executor.model_captures import Capture, Program
from placer.executor.placed_calls import PlacedCalls
from placer.executor.segment_order import stage_by_stage
from placer.executor.segments import Segment, StateLookup, segments
from placer.executor.state.assignment import Assignment, layer_names, placing, refuse_unknown_layers
from placer.executor.state.clones import Clones, state_lookup
from placer.executor.state.state_copies import Copies
from placer.executor.state.state_moves import Home, Whereabouts, bring_state, move_state, settle
from placer.executor.training.optimizer.optimizer_update import Optimizers
from placer.schema import BatchOptions, Placement, Schedule
from placer.utils.user_warnings import warn

__all__ = ["DataFlow"]


class DataFlow(PlacedCalls):
    """An unmodified module that runs each of its layers on the device in ``layer_gpus``.

    The module's source is never rewritten. Its Parameters stay the same objects, so existing
    optimizers stay valid, and the keys of its ``state_dict`` never change.

    Args:
        module: the model.
        device_ids: devices that layers may run on: indices, strings or ``torch.device``; None
            (default) for all available devices. Further devices of a map or placement are added.
        output_device: the device of results; the first of ``device_ids`` by default.
        inference_only: let no parameter require a gradient; ``undo`` restores the flags.
        clear_cache: return cached device memory after layers were moved (default).
        fine_grained: ``layer_gpus`` lists every leaf module instead of the module's children.
        enable_clone: keep the weights on every device, so that ``update_flow`` moves nothing. For
            inference only: with gradients it raises, since clones would not be trained.
        deferred_batch_norm: update the running statistics of batch normalisation once per whole
            batch, as in the unsplit model; otherwise every micro-batch updates them. Normalisation
            is per micro-batch either way.

    Attributes:
        module: the model.
        device_ids: the index of each device.
        layer_gpus: by layer name, the device index (or any device name); ordered, may be edited. A
            later call of a module follows the first one, unless it has its own entry: ``relu@1``.
        chunks: number of micro-batches of a call by default.
        batch_options: batch dimensions, joining of results and reduction of the loss by default,
            see ``BatchOptions``; may be edited.
        recompute: devices that save no activations in a training step, but run forward again in the
            backward pass: less memory for more time. May be edited, like ``layer_gpus``.
        in_flight: for each segment of a training step, the maximum number of micro-batches in
            flight under ``zero-bubble`` and ``interleaved``; the useful maximum if the number of
            segments differs. Under ``zero-bubble``, fewer take less memory and lengthen the step:
            of S segments, number p (from 0) can use 2 S, and with S - p needs about the memory of
            1F1B. May be edited.
        gradients_wait: whether the next training step adds to existing gradients.
        not_captured_because: why the model runs through hooks in its latest mode; empty if it was
            captured.
        lock: held by the thread whose call or stream runs; all flows of a model share one.
        copies: of the model's state, on devices that read it and do not own it.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | int | None = None,
        output_device: DeviceLike | None = None,
        inference_only: bool = False,
        clear_cache: bool = True,
        fine_grained: bool = False,
        enable_clone: bool = False,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        require_module(module)
        require_flags(
            inference_only=inference_only,
            clear_cache=clear_cache,
            fine_grained=fine_grained,
            enable_clone=enable_clone,
            deferred_batch_norm=deferred_batch_norm,
        )
        self.module = module
        self.lock = _lock_of(module)
        self._devices = devices.resolve(device_ids, "device_ids")
        self.device_ids = [device.index for device in self._devices]
        self.output_device = (
            self._devices[0] if output_device is None else self._device(output_device)
        )
        self.inference_only = inference_only
        self.clear_cache = clear_cache
        self.fine_grained = fine_grained
        self.enable_clone = enable_clone
        self.deferred_batch_norm = deferred_batch_norm
        self.chunks = 1
        self.batch_options = DEFAULT_OPTIONS
        self.schedule: Schedule = "1f1b"
        self.recompute: list[DeviceLike] = []
        self.in_flight: Sequence[int] = ()
        self.gradients_wait = False
        self._home = Home(module)
        self.copies = Copies()
        self._granularity: Granularity = "fine" if fine_grained else "submodule"
        self.layer_gpus: OrderedDict[str, DeviceLike] = self._default_map()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._program = Program(module, self.compare_capture)
        self._cutter = Cutter(self)
        self._assignment: Assignment | None = None
        self._places: list[torch.device] = []
        self._settled: set[str] = set()
        self._plans: dict[Capture, tuple[LayerGraph, list[Segment]]] = {}
        self._hooks = HookPath(module)
        self._has_told = False
        self._streams = Streams(self)
        self._repeated = RepeatedCalls(self._streams)
        if inference_only:
            module.requires_grad_(False)
        self._clones = Clones(module, self._devices) if enable_clone else None
        self._planned_with = 0
        self._assumed: Placement | None = None

    def update_flow(
        self,
        placement: Placement | Mapping[str, Any] | None = None,
        *,
        optimizer: Optimizers = None,
    ) -> None:
        """Move the layers to their devices in ``layer_gpus``; later calls run them there.

        An error leaves everything unchanged: the model and its optimizers, the map and all
        settings.

        Args:
            placement: sets ``layer_gpus``, the granularity, ``chunks``, ``batch_options``, the
                schedule, ``recompute``, ``in_flight``, and the links whose copies go through the
                host's memory. None (default) keeps them.
            optimizer: an optimizer, or a list of them, with existing state for the parameters. Its
                state moves with them, now and later; optimizers of training steps are included
                automatically.

        Raises:
            PlacementError: if the placement has no layers, names unknown layers or devices, or does
                not fit into memory.
            InputError: if ``optimizer`` is not an optimizer, or the flow is applied at the moment.
        """
        given = optimizer_list(optimizer)
        for one in given:
            if not isinstance(one, torch.optim.Optimizer):
                raise InputError(
                    f"optimizer is {one!r}; give the torch.optim.Optimizer whose state is to move"
                )
        with self.lock:
            settings, detours = self._settings_of(placement)
            self._hooks.refuse_standing()
            optimizers = WeakSet([*self._optimizers, *given])
            before, routes = Whereabouts(self.module, optimizers), devices.detours()
            covered = [] if self._clones is None else self._clones.places
            try:
                self._streams.clear()
                self._bring(settings["_assignment"], optimizers, given)
                settings |= {"_optimizers": optimizers, **self._no_plans()}
                devices.take_detours(detours)
                # all settings at once, after everything that may fail
                self.__dict__.update(settings)
            except BaseException:
                devices.set_detours(routes)
                if self._clones is not None:
                    self._clones.keep_only(covered)
                before.restore()
                raise

    def _settings_of(
        self, placement: Placement | Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the flow's new attributes, and the links whose copies go through the host.

        Args:
            placement: None keeps ``layer_gpus`` and the settings that belong to it.

        Raises:
            PlacementError: if layers or devices are unknown.
        """
        settings: dict[str, Any] = {
            "layer_gpus": self.layer_gpus,
            "_granularity": self._granularity,
            "_assumed": None,  # an edited map has no memory assumptions
        }
        detours: list[Any] = []
        if placement is not None:
            found = _placement(placement)
            settings |= self._adopted(found)
            detours = list(found.through_host)
        layer_gpus = settings["layer_gpus"]
        if not isinstance(layer_gpus, Mapping):
            raise PlacementError(
                f"layer_gpus is {layer_gpus!r}; give a map of layer names to devices"
            )
        places = {name: self._device(place) for name, place in layer_gpus.items()}
        refuse_unknown_layers(self.module, places, list(self._default_map()))
        used = list(dict.fromkeys([*self._devices, *places.values()]))
        return settings | {
            "_granularity": granularity_for_map(settings["_granularity"], places),
            "_devices": used,
            "device_ids": [device.index for device in used],
            "_assignment": Assignment(places, self.output_device),
        }, detours

    def _bring(
        self,
        assignment: Assignment,
        optimizers: Collection[torch.optim.Optimizer],
        given: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Move the state of model and optimizers to its devices; copy it if clones are enabled."""
        if self._clones is not None:
            self._clones.cover(assignment.devices)
            return
        move_state(self.module, assignment.of_state, optimizers)
        self._program.accept_changes()
        for optimizer in given:
            bring_state(optimizer)
        if self.clear_cache:
            devices.release_cache()

    def undo(self) -> None:
        """Restore the devices of all parameters, gradients and buffers, and all flags.

        Raises:
            InputError: if the flow is applied at the moment.
        """
        with self.lock:
            self._hooks.refuse_standing()
            self._home.restore(self.module, self._optimizers)
            self._program.accept_changes()
            self._streams.clear()
            self.__dict__.update({"_assignment": None, "_assumed": None, **self._no_plans()})
        self._granularity = "fine" if self.fine_grained else "submodule"
        self.layer_gpus = self._default_map()
        self.chunks = 1
        self.batch_options = DEFAULT_OPTIONS
        self.schedule = "1f1b"
        self.recompute = []
        self.in_flight = ()

    def construct_module(
        self, layer_gpus: Mapping[str, DeviceLike] | None = None, module: nn.Module | None = None
    ) -> DataFlow:
        """Return another flow with its own map, which shares this flow's clones.

        Args:
            layer_gpus: its map; None (default) for this flow's.
            module: a copy of the model whose attributes it exposes; None (default) for this flow's
                module.

        Returns:
            A module that runs like this one, with its own ``layer_gpus``; weights are shared with
            this flow's clones.

        Raises:
            InputError: if this flow was created without ``enable_clone``.
        """
        if self._clones is None:
            raise InputError(
                "construct_module shares clones: make the flow with DataFlow(model, "
                "enable_clone=True)"
            )
        built = copy.copy(self)
        built.__dict__ = dict(self.__dict__)
        built._modules = {"module": self.module if module is None else module}
        built._plans, built._streams = {}, Streams(built)
        built._repeated = RepeatedCalls(built._streams)
        built._cutter = Cutter(built)
        built.layer_gpus = OrderedDict(self.layer_gpus if layer_gpus is None else layer_gpus)
        built.update_flow()
        return built

    def _bring_back(self) -> None:
        """Move state back that another flow, or ``model.to``, has moved."""
        if (
            self._clones is None
            and self._assignment is not None
            and self._places != self._places_now()
        ):
            move_state(self.module, self._assignment.of_state, self._optimizers)
            self._program.accept_changes()
            self._plans.clear()
            self._settled.clear()
            self._places = self._places_now()

    def _places_now(self) -> list[torch.device]:
        return [*map(devices.location, self._program.state())]

    @property
    def assignment(self) -> Assignment | None:
        """Return the devices of the layers since the last ``update_flow``; None before it."""
        return self._assignment

    def recomputed(self) -> frozenset[torch.device]:
        """Return the devices that run forward again in their backward passes."""
        if isinstance(self.recompute, str):
            raise InputError(
                f"flow.recompute is {self.recompute!r}; give a list of devices, "
                f"[{self.recompute!r}]"
            )
        places = frozenset(self._device(place) for place in self.recompute)
        if unknown := places.difference(self._devices):
            known = ", ".join(map(str, self._devices))
            raise InputError(
                f"flow.recompute has {min(map(str, unknown))}; the flow's devices are {known}"
            )
        return places

    def captured(self, part: Part, needed: bool = True) -> Capture | None:
        """Return the capture for inputs like these; None if the model runs through hooks.

        Args:
            part: the inputs.
            needed: False allows hooks if consecutive calls would each need their own capture.
        """
        captures = self._program.captures([part], needed or self._needs_captures)
        return None if captures is None else captures[0]

    def cut(
        self,
        call: Call,
        options: BatchOptions,
        sizes_of: Callable[[int], list[int]],
        weigh: Weights,
    ) -> MicroBatches:
        """Split a call into micro-batches; see ``Cutter.cut`` for the arguments."""
        return self._cutter.cut(call, options, sizes_of, weigh, self._needs_captures)

    def laid_out(self, call: Call, options: BatchOptions | None = None) -> Part:
        """Return the flattened inputs of a call with their batch dimensions.

        Args:
            call: positional and keyword arguments.
            options: the declared batch layout; the flow's by default.
        """
        tensors, inputs = flatten_inputs(*call)
        layout = self._program.layout(
            call, tensors, inputs, self.batch_options if options is None else options
        )
        if options is not None and options is not self.batch_options:
            layout.refuse_misfit()
        return Part(tensors, inputs, layout.dims)

    def holds(self, capture: Capture) -> bool:
        """Return whether a capture still describes the model."""
        return self._program.holds(capture)

    def layers(self, capture: Capture) -> tuple[LayerGraph, list[torch.device]]:
        """Return a capture's layers, grouped by device where possible, and the device of each.

        Their state is moved into place.
        """
        assert self._assignment is not None
        graph = self._program.graph(capture, self._granularity)
        graph, places = stage_by_stage(graph, self._assignment.of_layers(graph))
        if self._clones is None:
            # state was moved from outside: verify every layer again
            if self._places != self._places_now():
                self._plans.clear()
                self._settled.clear()
            settle(graph, places, self._optimizers, self._settled)
            self._places = self._places_now()
        return graph, places

    def weights(self, graph: LayerGraph) -> StateLookup:
        """Return the lookup of the layers' state, after updating clones."""
        self._refresh_clones()
        return state_lookup(graph, self._clones)

    def _plan(self, capture: Capture) -> tuple[LayerGraph, list[Segment]]:
        """Return the cached segments of a capture under the current map."""
        if capture not in self._plans:
            # the model has changed: discard the plans of old captures
            if not all(map(self.holds, self._plans)):
                self._plans = {
                    known: plan for known, plan in self._plans.items() if self.holds(known)
                }
                self._repeated.keep_only(self.holds)
            graph, places = self.layers(capture)
            parts = segments(graph, places, state_lookup(graph, self._clones), self.copies.get)
            self._plans[capture] = (graph, with_checkpoints(parts, capture.exported.checkpoints))
        return self._plans[capture]

    def _no_plans(self) -> dict[str, Any]:
        """Return the attributes of a flow right after its state was moved."""
        return {
            "_plans": {},
            "_settled": set(),
            "_places": self._places_now(),
            "_repeated": RepeatedCalls(self._streams),
        }

    def _refresh_clones(self) -> None:
        if self._clones is not None:
            self._clones.refuse_training()
            self._clones.refresh()
            if self._planned_with != self._clones.times_copied:
                self._planned_with = self._clones.times_copied
                self._plans.clear()

    def _adopted(self, placement: Placement) -> dict[str, Any]:
        """Return the attributes that a placement sets."""
        places = {name: self._device(place) for name, place in placement.layer_devices.items()}
        refuse_unknown_layers(self.module, places, list(self._default_map()))
        one_kind = len({place.type for place in (*self._devices, *places.values())}) == 1
        has_rooms = placement.training and placement.schedule in ("interleaved", "zero-bubble")
        stated = placement.in_flight or (
            placement.step.in_flight if placement.step is not None else ()
        )
        return {
            "_assumed": placement,
            "layer_gpus": OrderedDict(
                (name, place.index if one_kind else str(place)) for name, place in places.items()
            ),
            "_granularity": tuple(places),
            "chunks": placement.chunks,
            # the flow's own declaration stays if the placement has none
            "batch_options": self.batch_options
            if placement.batch_options == DEFAULT_OPTIONS
            else placement.batch_options,
            "schedule": placement.schedule,
            "recompute": list(placement.recompute),
            "in_flight": stated if has_rooms else (),
        }

    def _device(self, place: DeviceLike) -> torch.device:
        """Return a device by name; a bare index means the type of the flow's devices."""
        try:
            device = devices.parse(place, self._devices[0].type)
            devices.require(device)
        except InputError as error:
            raise PlacementError(str(error)) from error
        return device

    def _tell_of_edits(self) -> None:
        if self.layer_gpus and not self._has_told and len(set(self.layer_gpus.values())) > 1:
            self._has_told = True
            warn(
                "layer_gpus was edited, and the model runs unsplit: call flow.update_flow() for it "
                "to be followed"
            )

    def _default_map(self) -> OrderedDict[str, DeviceLike]:
        """Return the map with every layer on the output device."""
        index = self.output_device.index
        return OrderedDict((name, index) for name in layer_names(self.module, self.fine_grained))

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an InputError: the flow manages its own graphs."""
        raise InputError(
            "a flow is not compiled as a whole: give compile=True to flow.train_step and "
            "flow.stream"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a ``state_dict`` with the flow's keys (prefix ``module.``) or the model's own.

        Args:
            state_dict: the state.
            strict: as for ``nn.Module.load_state_dict``.
            assign: as for ``nn.Module.load_state_dict``; captures are then made again.

        Returns:
            Missing and unexpected keys, as torch reports them.
        """
        own = {f"module.{name}" for name in self.module.state_dict()}
        if not any(name in own for name in state_dict):
            result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        else:
            result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._plans.clear()
        if assign:  # assignment replaces the parameter objects
            self._streams.clear()
            self._program = Program(self.module, self.compare_capture)
            self._cutter = Cutter(self)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without captures, clones and locks, which are created on demand."""
        state = dict(self.__dict__)
        state["_program"] = state["_plans"] = state["_clones"] = state["_hooks"] = state[
            "_streams"
        ] = None
        state["_repeated"] = state["lock"] = state["_optimizers"] = state["_cutter"] = state[
            "copies"
        ] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lock = _lock_of(self.module)
        self.copies = Copies()
        self._optimizers = WeakSet()  # training steps that are copied along register theirs
        self._program = Program(self.module, self.compare_capture)
        self._cutter = Cutter(self)
        self._hooks = HookPath(self.module)
        self._streams = Streams(self)
        self._repeated = RepeatedCalls(self._streams)
        self._plans = {}
        self._clones = Clones(self.module, self._devices) if self.enable_clone else None


_locks: MutableMapping[nn.Module, RLock] = WeakIdKeyDictionary()
_choosing_lock = Lock()


def _lock_of(module: nn.Module) -> RLock:
    """Return the lock of a model, which all of its flows share because they move the same state."""
    with _choosing_lock:
        return _locks.setdefault(module, RLock())


def _placement(given: Placement | Mapping[str, Any]) -> Placement:
    if not isinstance(given, Placement | Mapping):
        raise PlacementError(
            f"update_flow was given {kind_of(given)}; give a Placement, which "
            "Placement.model_validate_json(text) makes of JSON"
        )
    if not isinstance(given, Placement) and "layer_devices" not in given:
        raise PlacementError(
            f"a mapping with the keys {', '.join(map(repr, list(given)[:3]))} is not a placement; "
            "put a map of layers into flow.layer_gpus.update(...), and then flow.update_flow()"
        )
    return placing(given)
