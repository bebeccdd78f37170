"""The referee's own treatment of devices that recompute.

They run one more forward pass before each backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from placer.schema import Device, Layer, PlacementRequest
from placer.solver.referee.memory import Flight, Memory


def repeated(
    request: PlacementRequest, where: Mapping[str, str], devices: Collection[str]
) -> PlacementRequest:
    """Return the request whose backward passes on some devices include a forward pass."""
    if not devices:
        return request
    types = {device.name: device.type for device in request.devices}
    layers = tuple(
        _slower(layer, types[where[layer.name]]) if where[layer.name] in devices else layer
        for layer in request.profile.layers
    )
    return request.model_copy(
        update={"profile": request.profile.model_copy(update={"layers": layers})}
    )


def _slower(layer: Layer, kind: str) -> Layer:
    back = layer.backward_ms[kind]
    weights = min(back, layer.weight_grad_ms.get(kind, back / 2 if layer.grad_bytes else 0.0))
    changed = {
        "backward_ms": {kind: back + layer.forward_ms[kind]},
        "weight_grad_ms": {kind: weights},
    }
    return layer.model_copy(update=changed)


def least(request: PlacementRequest, memory: Memory, device: str, flight: Flight) -> int:
    """Return the least bytes of a device, recomputed if it must or may be."""
    needs = [] if must(request, device) else [memory.total(device, flight)]
    if may(request, device, flight):
        needs.append(memory.total(device, flight, again=True))
    return min(needs)


def alone(request: PlacementRequest, memory: Memory, device: Device, flight: Flight) -> bool:
    """Return whether a device with all layers recomputes.

    It must, or it helps and memory is short, or all that counts.
    """
    if must(request, device.name):
        return True
    need = memory.total(device.name, flight)
    short = request.objective == "memory" or need > device.usable_bytes
    return (
        may(request, device.name, flight)
        and short
        and memory.total(device.name, flight, again=True) < need
    )


def may(request: PlacementRequest, device: str, flight: Flight) -> bool:
    """Return whether a device may recompute.

    In training, if asked for, and where a device's stages are counted as one.
    """
    return request.is_training and rule(request, device) != "never" and isinstance(flight, int)


def must(request: PlacementRequest, device: str) -> bool:
    """Return whether a device that holds layers recomputes in any case."""
    return request.is_training and rule(request, device) == "always"


def rule(request: PlacementRequest, device: str) -> str:
    """Return the recomputation rule of a device, by its own name or the default."""
    rule = request.constraints.recompute
    if isinstance(rule, str):
        return rule
    return rule[device] if device in rule else rule.get("*", "never")
