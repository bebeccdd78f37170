"""The settings of a flow, which its parts read, and what a map or placement changes in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from placer import devices
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.granularity import Granularity, granularity_for_map
from placer.devices import DeviceLike
from placer.errors import InputError, PlacementError, kind_of
from placer.executor.state.assignment import (
    Assignment,
    layer_names,
    placing,
    refuse_unknown_layers,
    warn_of_missing_blocks,
)
from placer.executor.state.replication import ONE_PIPELINE, Replication
from placer.schema import BatchOptions, Placement, Schedule
from placer.schema.base import StatePlace, Tier
from placer.utils.units import count_text
from placer.utils.user_warnings import warn


@dataclass
class Settings:
    """Everything that ``update_flow`` sets or a user may edit; see the attributes of ``DataFlow``.

    A ``DataFlow`` writes them, and its parts only read them.

    Attributes:
        devices: that layers may run on.
        output_device: the device of results.
        deferred_batch_norm: whether running statistics follow whole batches.
        layer_gpus: by layer name, its device.
        granularity: of the layers in ``layer_gpus``.
        assignment: the devices of the layers since the last ``update_flow``; None before it.
        assumed: the placement whose memory assumptions hold; None after the map was edited.
        chunks: number of micro-batches by default.
        batch_options: of batches, by default.
        schedule: the order of micro-batches in training, by default.
        recompute: devices that run forward again in their backward passes.
        in_flight: for each segment, the maximum number of micro-batches in flight.
        replication: the pipelines that share each micro-batch.
        resting: by layer whose parameters rest on the host, in memory or on the disk.
        optimizer_state: where the optimizer's state is between steps, by default.
    """

    devices: list[torch.device]
    output_device: torch.device
    deferred_batch_norm: bool
    layer_gpus: OrderedDict[str, DeviceLike] = field(default_factory=OrderedDict)
    granularity: Granularity = "submodule"
    assignment: Assignment | None = None
    assumed: Placement | None = None
    chunks: int = 1
    batch_options: BatchOptions = DEFAULT_OPTIONS
    schedule: Schedule = "1f1b"
    recompute: list[DeviceLike] = field(default_factory=list)
    in_flight: Sequence[int] = ()
    replication: Replication = ONE_PIPELINE
    resting: Mapping[str, Tier] = field(default_factory=dict)
    optimizer_state: StatePlace = "device"
    _has_warned: bool = False

    def device(self, place: DeviceLike) -> torch.device:
        """Return a device by name; a bare index means the type of the flow's devices.

        Raises:
            PlacementError: if there is no such device.
        """
        try:
            device = devices.parse(place, self.devices[0].type)
            devices.require(device)
        except InputError as error:
            raise PlacementError(str(error)) from error
        return device

    def recomputed(self) -> frozenset[torch.device]:
        """Return the devices that run forward again in their backward passes."""
        if isinstance(self.recompute, str) or not isinstance(self.recompute, Iterable):
            raise InputError(f"flow.recompute is {self.recompute!r}; give a list of devices")
        places = frozenset(map(self.device, self.recompute))
        if unknown := places.difference(self.devices):
            known = ", ".join(map(str, self.devices))
            raise InputError(
                f"flow.recompute has {min(map(str, unknown))}; the flow's devices are {known}"
            )
        return places

    def refuse_resting(self, what: str) -> None:
        """Raise an InputError if parameters rest on the host.

        Args:
            what: does not support this.
        """
        if self.resting:
            raise InputError(
                f"{what} does not support parameters that rest on the host, as the placement has "
                f"them for {count_text(len(self.resting), 'layer')} ({next(iter(self.resting))}, "
                "...): give a placement that was solved without host_memory_bytes and disk_bytes"
            )

    def reset(self, layer_gpus: OrderedDict[str, DeviceLike], granularity: Granularity) -> None:
        """Set everything to its default, except the devices.

        Args:
            layer_gpus: the default map.
            granularity: of its layers.
        """
        fixed = self.devices, self.output_device, self.deferred_batch_norm
        fresh = Settings(*fixed, layer_gpus, granularity, _has_warned=self._has_warned)
        vars(self).update(vars(fresh))

    def warn_of_edits(self) -> None:
        """Warn once if a map was edited before the first ``update_flow``."""
        if self.layer_gpus and not self._has_warned and len(set(self.layer_gpus.values())) > 1:
            self._has_warned = True
            warn(
                "layer_gpus was edited, and the model runs unsplit: call flow.update_flow() for it "
                "to be followed"
            )


def default_map(
    settings: Settings, module: nn.Module, fine_grained: bool
) -> tuple[OrderedDict[str, DeviceLike], Granularity]:
    """Return the map with every layer on the output device, and its granularity."""
    names = layer_names(module, fine_grained)
    granularity: Granularity = "fine" if fine_grained else "submodule"
    return OrderedDict.fromkeys(names, settings.output_device.index), granularity


def changes_of(
    settings: Settings,
    module: nn.Module,
    placement: Placement | Mapping[str, Any] | None,
    fine_grained: bool,
    has_clones: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """Return the settings that change, and the links whose copies go through the host.

    Args:
        settings: the present ones.
        module: the model.
        placement: None keeps ``layer_gpus`` and the settings that belong to it.
        fine_grained: whether the default map lists every leaf module.
        has_clones: whether every device has all weights.

    Raises:
        PlacementError: if layers or devices are unknown.
    """
    # an edited map has no memory assumptions
    changes: dict[str, Any] = {
        "layer_gpus": settings.layer_gpus,
        "assumed": None,
        "replication": settings.replication,
        "resting": settings.resting,
    }
    granularity, detours = settings.granularity, list[Any]()
    if placement is not None:
        found = _placement(placement)
        changes = _adopted(settings, module, found, fine_grained)
        granularity = tuple(found.layer_devices)
        detours = list(found.links_through_host)
    layer_gpus = changes["layer_gpus"]
    if not isinstance(layer_gpus, Mapping):
        raise PlacementError(f"layer_gpus is {layer_gpus!r}; give a map of layer names to devices")
    places = _known_places(settings, module, layer_gpus, fine_grained)
    replication: Replication = changes["replication"]
    _refuse_partly_replicated(places.values(), replication)
    assignment = Assignment(places, settings.output_device, replication)
    resting: Mapping[str, Tier] = changes["resting"]
    changes["resting"] = {name: tier for name, tier in resting.items() if name in places}
    if not has_clones:
        assignment.divide(module)
        assignment.rest(module, changes["resting"])
    elif changes["resting"]:
        raise PlacementError(
            "parameters rest on the host in this placement, and a flow with enable_clone keeps "
            "them on every device: make the flow without enable_clone"
        )
    used = [*settings.devices, *places.values(), *replication.every_device()]
    return changes | {
        "granularity": granularity_for_map(granularity, places),
        "devices": list(dict.fromkeys(used)),
        "assignment": assignment,
    }, detours


def _adopted(
    settings: Settings, module: nn.Module, placement: Placement, fine_grained: bool
) -> dict[str, Any]:
    """Return the settings that a placement decides, except those that follow from its map."""
    places = _known_places(settings, module, placement.layer_devices, fine_grained)
    warn_of_missing_blocks(module, placement)
    one_kind = len({place.type for place in (*settings.devices, *places.values())}) == 1
    has_rooms = placement.training and placement.schedule in ("interleaved", "zero-bubble")
    stated = placement.in_flight or (placement.step.in_flight if placement.step is not None else ())
    return {
        "assumed": placement,
        "layer_gpus": OrderedDict(
            (name, place.index if one_kind else str(place)) for name, place in places.items()
        ),
        "chunks": placement.chunks,
        # the flow's own declaration stays if the placement has none
        "batch_options": settings.batch_options
        if placement.batch_options == DEFAULT_OPTIONS
        else placement.batch_options,
        "schedule": placement.schedule,
        "recompute": list(placement.recompute),
        "in_flight": stated if has_rooms else (),
        "replication": Replication.from_placement(placement, settings.device),
        "resting": dict(placement.resting),
        "optimizer_state": placement.optimizer_state,
    }


def _known_places(
    settings: Settings, module: nn.Module, layer_gpus: Mapping[str, DeviceLike], fine_grained: bool
) -> dict[str, torch.device]:
    """Return the device of each layer of a map.

    Raises:
        PlacementError: if layers or devices are unknown.
    """
    places = {name: settings.device(place) for name, place in layer_gpus.items()}
    refuse_unknown_layers(module, places, layer_names(module, fine_grained))
    return places


def _refuse_partly_replicated(places: Collection[torch.device], replication: Replication) -> None:
    """Raise a PlacementError if a map has other devices than its placement with replicas."""
    if replication.count > 1:
        for place in dict.fromkeys(places):
            if place not in replication.devices:
                raise PlacementError(
                    f"layer_gpus names {place}, which has no layers in the placement with "
                    "replicas: use the devices of its layers only, or undo() first"
                )


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
