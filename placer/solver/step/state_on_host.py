r"""Optimizer state that rests on the host between training steps.

It rests in the memory of each device's host. A step copies it to the device and back, in buckets of
whole parameters, while the optimizer steps other buckets; ``placer/schedule/state_buckets.py``
describes them. So a device needs no memory for the state, but some for the buffers. The largest
parameter may be anywhere, so every device has it reserved. In bytes, with B for ``BUCKET_BYTES``::

    buffers = min((2 + ratio) * B + max over l of (state(l) + ratio * gradients(l)),
                  sum over l of (state(l) + ratio * gradients(l)))

state(l) is layer l's optimizer state, and ratio is ``optimizer_workspace_ratio``: the optimizer's
temporary memory, which is needed for one bucket at a time. The maximum is over the layers whose
state and gradients exceed a bucket, and 0 without such layers.

The copies of a layer and its optimizer run at the same time, so the longer one counts. Of devices
of a type, the slowest links to and from the host's memory count::

    optimizer(l) = max(optimizer_ms(l), state(l) / to_host + state(l) / from_host)

Everything else is as with state on the devices. So the search answers a changed request, in which
layers have no state, optimizers take this time, and the buffers belong to each device's reserve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from placer.schedule.state_buckets import BUCKET_BYTES, BUFFERS
from placer.schema import Device, Layer, Placement, PlacementRequest, Profile
from placer.utils.units import bytes_text

Solve = Callable[[PlacementRequest], Placement]

SHARE = 0.5
"""Share of the time for the search with state on the devices, under ``auto``."""


def solved(request: PlacementRequest, solve: Solve) -> Placement:
    """Return the best placement, with optimizer state where the request lets it rest.

    Args:
        request: with any ``optimizer_state``.
        solve: answers a request whose optimizer state is on the devices.
    """
    if request.optimizer_state == "device":
        return solve(request)
    header = {"id": request.content_hash()}
    plain = request.model_copy(update={"optimizer_state": "device"})
    on_device = None
    if request.optimizer_state == "auto":
        limit_s = {"time_limit_s": SHARE * request.time_limit_s}
        on_device = solve(plain.model_copy(update=limit_s))
        if on_device.layer_devices:
            return on_device.model_copy(update=header)
        limit_s = {"time_limit_s": (1 - SHARE) * request.time_limit_s}
        plain = plain.model_copy(update=limit_s)
    found = solve(on_host(plain)).model_copy(update={**header, "optimizer_state": "host"})
    if found.infeasible is not None:
        reason = (
            f"{found.infeasible.reason}; this is with optimizer state on the host, whose buffers "
            f"take {bytes_text(buffer_bytes(request.profile))} of every limit"
        )
        why = found.infeasible.model_copy(update={"reason": reason})
        found = found.model_copy(update={"infeasible": why})
    is_proven = on_device is None or on_device.status == "infeasible"
    return found if is_proven else _without_proof(found)


def _without_proof(found: Placement) -> Placement:
    """Return an answer that proves nothing, as there may be one with state on the devices."""
    changed: dict[str, object] = {"bound": 0.0}
    if found.status == "infeasible":
        changed |= {"status": "unknown", "infeasible": None}
    if found.objective_value:
        changed |= {"status": "feasible", "gap": 1.0}
    return found.model_copy(update=changed)


def asked_with(request: PlacementRequest, placement: Placement | None) -> PlacementRequest:
    """Return the request that has optimizer state where a placement has it.

    Args:
        request: with any ``optimizer_state``.
        placement: its answer; None to take ``auto`` for state on the devices.
    """
    chosen = request.optimizer_state
    if chosen == "auto":
        chosen = "device" if placement is None else placement.optimizer_state
    plain = request.model_copy(update={"optimizer_state": "device"})
    return on_host(plain) if chosen == "host" else plain


def on_host(request: PlacementRequest) -> PlacementRequest:
    """Return the request whose answers are those with optimizer state on the host.

    Args:
        request: for training. All devices have rates to and from their host's memory, unless only
            memory counts.
    """
    buffers = buffer_bytes(request.profile)
    devices = tuple(
        device.model_copy(
            update={"reserve_bytes": min(device.memory_bytes, device.reserve_bytes + buffers)}
        )
        for device in request.devices
    )
    seconds = _seconds_per_byte(request.devices)
    return request.model_copy(
        update={
            "cluster": request.placed_on.model_copy(update={"devices": devices}),
            "profile": _without_state(request.profile, seconds),
            "profiles": tuple(_without_state(one, seconds) for one in request.profiles),
        }
    )


def buffer_bytes(profile: Profile) -> int:
    """Return the bytes that a device needs for the state and the temporaries of buckets."""
    # exact, as the referee rounds the same number
    ratio = Fraction(profile.optimizer_workspace_ratio)
    needs = [layer.optimizer_bytes + ratio * layer.grad_bytes for layer in profile.layers]
    large = [
        need
        for need, layer in zip(needs, profile.layers, strict=True)
        if layer.optimizer_bytes + layer.grad_bytes > BUCKET_BYTES
    ]
    return math.ceil(min((BUFFERS + ratio) * BUCKET_BYTES + max(large, default=0), sum(needs)))


def _seconds_per_byte(devices: tuple[Device, ...]) -> dict[str, float]:
    """Return by type the time to copy a byte from the host's memory and back."""
    found: dict[str, float] = {}
    for device in devices:
        rates = (device.to_host, device.from_host)
        time_s = sum(1 / rate.bandwidth_bytes_per_s for rate in rates if rate is not None)
        found[device.type] = max(found.get(device.type, 0.0), time_s)
    return found


def _without_state(profile: Profile, seconds: dict[str, float]) -> Profile:
    """Return a profile without optimizer state, whose optimizers take as long as the copies of it.

    Args:
        profile: with state.
        seconds: by type of device, the time to copy a byte there and back.
    """

    def changed(layer: Layer) -> Layer:
        times = {
            kind: max(layer.optimizer_ms.get(kind, 0.0), 1e3 * time_s * layer.optimizer_bytes)
            for kind, time_s in seconds.items()
        }
        return layer.model_copy(
            update={"optimizer_bytes": 0, "optimizer_ms": layer.optimizer_ms | times}
        )

    layers = tuple(map(changed, profile.layers))
    return profile.model_copy(update={"layers": layers, "optimizer_workspace_ratio": 0.0})
