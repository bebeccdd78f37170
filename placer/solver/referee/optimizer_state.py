"""The referee's reading of optimizer state that rests on the host.

It is written apart from the solver's, from the formulas in ``step/state_on_host.py``.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from placer.schedule.state_buckets import BUCKET_BYTES
from placer.schema import Layer, Placement, PlacementRequest, Profile
from placer.solver.referee.claims import require

TWO = 2
"""Buckets that are on a device at the same time."""


def answered(request: PlacementRequest, placement: Placement) -> PlacementRequest:
    """Return the request that a placement answers, with the cost of state where it has it.

    Args:
        request: the question.
        placement: the answer.

    Raises:
        PlacementError: the state is not where the request lets it be.
    """
    allowed, place = request.optimizer_state, placement.optimizer_state
    require(
        place == allowed or allowed == "auto",
        f"optimizer_state is {place!r}, but {allowed!r} was asked for",
    )
    return _on_host(request) if place == "host" else request


def rules_out_devices(request: PlacementRequest, placement: Placement) -> bool:
    """Return whether a placement claims that nothing fits with state on the devices."""
    is_proven = placement.status == "infeasible" or (placement.bound or 0.0) > 0
    return request.optimizer_state == "auto" and placement.optimizer_state == "host" and is_proven


def _on_host(request: PlacementRequest) -> PlacementRequest:
    """Return the request with the cost of state on the host in its profiles and devices."""
    reserved = _reserved_bytes(request.profile)
    devices, slowest = [], dict[str, Fraction]()
    for device in request.devices:
        taken = min(device.usable_bytes, reserved)
        update = {"reserve_bytes": device.reserve_bytes + taken}
        devices.append(device.model_copy(update=update))
        if device.to_host is None or device.from_host is None:
            require(False, f"device {device.name!r} has no rates to and from its host")
            continue
        there = 1 / Fraction(device.from_host.bandwidth_bytes_per_s)
        back = 1 / Fraction(device.to_host.bandwidth_bytes_per_s)
        slowest[device.type] = max(slowest.get(device.type, Fraction(0)), there + back)
    profiles = [_streamed(one, slowest) for one in (request.profile, *request.profiles)]
    return request.model_copy(
        update={
            "cluster": request.placed_on.model_copy(update={"devices": tuple(devices)}),
            "profile": profiles[0],
            "profiles": tuple(profiles[1:]),
        }
    )


def _reserved_bytes(profile: Profile) -> int:
    """Return the bytes of the buffers on each device."""
    ratio = Fraction(profile.optimizer_workspace_ratio)
    total, largest = Fraction(0), Fraction(0)
    for layer in profile.layers:
        need = layer.optimizer_bytes + ratio * layer.grad_bytes
        total += need
        if layer.optimizer_bytes + layer.grad_bytes > BUCKET_BYTES:
            largest = max(largest, need)
    return ceil(min(total, TWO * BUCKET_BYTES + ratio * BUCKET_BYTES + largest))


def _streamed(profile: Profile, slowest: dict[str, Fraction]) -> Profile:
    """Return a profile whose optimizer state passes through the devices."""
    layers: list[Layer] = []
    for layer in profile.layers:
        times = dict(layer.optimizer_ms)
        for kind, per_byte in slowest.items():
            copies_ms = float(1000 * per_byte * layer.optimizer_bytes)
            times[kind] = max(times.get(kind, 0.0), copies_ms)
        layers.append(layer.model_copy(update={"optimizer_bytes": 0, "optimizer_ms": times}))
    update = {"layers": tuple(layers), "optimizer_workspace_ratio": 0.0}
    return profile.model_copy(update=update)
