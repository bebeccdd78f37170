"""How the service judges maps: what each costs, what is wrong with it, and where several differ."""

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
    """What is wrong with a map.

    Attributes:
        kind: for programs.
        detail: in words, with the values.
        layers: the layers concerned, the first of them if they are many.
        devices: the devices concerned.
        short_bytes: the bytes missing, where memory is the fault.
    """

    kind: FaultKind
    detail: str
    layers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    short_bytes: int = 0


class Evaluation(Wire):
    """A map as the cost model sees it.

    Attributes:
        valid: whether it meets every requirement of the request.
        faults: those that it does not meet.
        objective: what the request makes small.
        objective_value: its value, ms or bytes; None where it cannot be had: a layer, device or
            link is missing.
        stages: the devices that hold layers, in pipeline order.
        devices: the load of each device.
        single_device: the best that one device does.
        best_id: of the placement that the service has for the request, if any.
        best_value: its objective value.
        bound: its proven bound: no map is better than this.
        above_best: by how much the map is worse, as a share of the best value; below 0 if it is
            better.
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
    """A layer that the maps have on different devices: its device in each, in the maps' order."""

    layer: str
    devices: tuple[str | None, ...]


class Comparison(Wire):
    """Maps side by side, all judged by one request.

    Attributes:
        names: of the maps, in order: ids of placements first.
        evaluations: one for each.
        best: the name of the valid map with the smallest objective value; None if none is valid.
        moves: the layers on which they differ, at most 1000.
        moved_layers: how many differ.
    """

    names: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    best: str | None
    moves: tuple[Move, ...]
    moved_layers: int
