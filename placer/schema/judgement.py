"""Evaluations of layer maps: cost, faults and differences."""

from __future__ import annotations

from typing import Literal

from placer.schema.base import Objective, Wire
from placer.schema.placement import DeviceLoad, SingleDevice

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
        best_id: the service's placement for the request, if any.
        best_value: its objective value.
        bound: its proven lower bound: no map is better.
        above_best: the relative difference to the best value; negative if the map is better.
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


class Move(Wire):
    """A layer on which maps differ, with its device in each map."""

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
