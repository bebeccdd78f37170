"""Evaluations of layer maps: cost, faults and differences."""

from __future__ import annotations

from typing import Literal

from placer.schema.base import FormatName, Objective, Wire
from placer.schema.export import Export
from placer.schema.placement import DeviceLoad, Placement, Replica, SingleDevice

FaultKind = Literal[
    "layer-missing",
    "layer-unknown",
    "device-unknown",
    "pin-broken",
    "device-forbidden",
    "colocation-broken",
    "too-many-devices",
    "too-few-devices",
    "too-many-layers",
    "too-slow",
    "link-missing",
    "not-contiguous",
    "out-of-memory",
]


class Fault(Wire):
    """A violated requirement.

    Attributes:
        kind: for programs.
        detail: as text, with the values.
        layers: the layers concerned, or the first of many.
        devices: the devices concerned.
        missing_bytes: the missing bytes of a memory fault.
    """

    kind: FaultKind
    detail: str
    layers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    missing_bytes: int = 0


class LayerMap(Wire):
    """A map of your own, possibly with several devices that hold a stage.

    Attributes:
        layer_devices: the device of each layer.
        replicas: as ``Placement.replicas``: for each device of ``layer_devices`` whose layers
            several devices hold, all of these, the device itself first, with the samples of a
            micro-batch that each computes. Empty if every layer is on one device.
    """

    layer_devices: dict[str, str]
    replicas: dict[str, tuple[Replica, ...]] = {}


class Best(Wire):
    """The best placement for the request of a map, and what it would gain.

    Attributes:
        placement: the best placement that was found; without layers if no placement was found.
        export: the placement in the format of the request, if it has one.
        speedup: the map's objective value by the placement's: 1.1 if the placement is 1.1 times
            faster. None for objectives ``memory`` and ``devices``, and if one of the values is
            missing.
    """

    placement: Placement
    export: Export | None = None
    speedup: float | None = None


class Evaluation(Wire):
    """A layer map, evaluated by the cost model.

    Attributes:
        valid: whether it meets every requirement of the request.
        faults: the violated requirements.
        objective: the minimised quantity.
        objective_value: its value, ms or bytes; None if a layer, device or link is missing.
        stages: the devices that hold layers, in pipeline order.
        devices: the load of each device.
        single_device: the best single device.
        best_id: the id of the best known placement for the request, if any.
        best_value: its objective value.
        bound: its proven lower bound: no map is better.
        above_best: the relative difference to the best value; negative if the map is better.
        format: the format to which the request restricts placements, if any.
        best: the best placement, if it was asked for.
    """

    valid: bool
    faults: tuple[Fault, ...]
    objective: Objective
    objective_value: float | None = None
    stages: tuple[str, ...] = ()
    devices: tuple[DeviceLoad, ...] = ()
    single_device: SingleDevice | None = None
    best_id: str | None = None
    best_value: float | None = None
    bound: float | None = None
    above_best: float | None = None
    format: FormatName | None = None
    best: Best | None = None


class Move(Wire):
    """A layer on which maps differ, with its device in each map.

    Of a placement with replicas, it has all devices that hold the layer, separated by commas.
    """

    layer: str
    devices: tuple[str | None, ...]


class Comparison(Wire):
    """Several maps, evaluated for the same request.

    Attributes:
        names: of the maps, in order: ids of placements first.
        evaluations: one for each map.
        best: the name of the valid map with the smallest objective value; None if none is valid.
        moves: the layers on which they differ, at most 1000.
        moved_layers: the number of layers on which they differ.
    """

    names: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    best: str | None
    moves: tuple[Move, ...]
    moved_layers: int
