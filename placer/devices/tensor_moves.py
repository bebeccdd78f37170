"""Tensors from device to device, and their gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from placer.devices.names import CPU, synchronise
from placer.devices.routes import HOST, has_detour
from placer.devices.stand_ins import registries, stand_ins
from placer.devices.tensor_parts import (
    USUAL,
    Known,
    is_plain,
    own_parts,
    parts,
    rebuilt,
    rebuilt_object,
)


def location(tensor: Tensor) -> torch.device:
    """Return the device that holds the tensor, under ``logical_devices`` the stand-in."""
    if registries:
        return registries[-1].device(tensor)
    if type(tensor) in USUAL:
        return tensor.device
    # of a wrapper, which may remember the device on which it was made
    inside = own_parts(tensor)
    return inside[-1].device if inside else tensor.device


def same(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one; outside ``logical_devices`` all CPU stand-ins hold each other's
    tensors.
    """
    if a.type == CPU and b.type == CPU and not stand_ins:
        return True
    return a == b


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device; itself if it is there. Differentiable: the gradient moves back."""
    source = location(tensor)
    if same(source, device):
        return tensor
    differentiable = torch.is_grad_enabled() and (tensor.requires_grad or is_transformed(tensor))
    if differentiable or has_tangents():
        moved: Tensor = _Move.apply(tensor, source, device)  # type: ignore[no-untyped-call]
        return moved
    return copy(tensor, device)


def is_transformed(tensor: Tensor) -> bool:
    """Whether it stands for another one inside ``torch.func``, as ``vmap`` has it; such a one hides
    its gradient.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that this one stands for inside ``torch.func``, which has memory of its own;
    itself elsewhere.
    """
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_tangents() -> bool:
    """Whether tensors may have tangents now, inside ``torch.autograd.forward_ad.dual_level()``."""
    return int(getattr(forward_ad, "_current_level", -1)) >= 0


def is_in_transform() -> bool:
    """Whether torch.func or forward-mode derivatives are under way, which what is made now would be
    a part of.
    """
    return has_tangents() or bool(torch._C._functorch.get_dynamic_layer_stack_depth())


def copy(tensor: Tensor, device: torch.device, known: Known | None = None) -> Tensor:
    """Return a copy of a tensor on a device, without a history.

    A quantised weight, say, is copied with all that it consists of: a wrapper with the tensors
    inside it, and attributes with the tensors in them.

    Args:
        tensor: any tensor.
        device: of the copy.
        known: copies of plain tensors made before, so that what shares memory does so again; see
            ``rebuilt``.
    """
    if known is None and is_plain(tensor):
        return _copied(tensor, device)
    return rebuilt(tensor, lambda part: _copied(part, device), known)


def copied_object(value: Any, device: torch.device, known: Known | None = None) -> Any:
    """Return a container or an object like this one with copies of its tensors on a device; see
    ``copy``.
    """
    return rebuilt_object(value, lambda part: _copied(part, device), known)


def is_at(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor, and all that it wraps and that is attached to it, is on a device."""
    return all(same(location(part), device) for part in parts(tensor))


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if has_detour(location(tensor), device):
        tensor = _copy_straight(tensor, HOST)
    return _copy_straight(tensor, device)


def write(source: Tensor, target: Tensor, here: torch.device, there: torch.device) -> None:
    """Copy into a tensor, straight from the one device to the other, without waiting for a GPU."""
    target.copy_(source, non_blocking=True)


def add(summand: Tensor, total: Tensor) -> None:
    """Add to a tensor what is on its device."""
    total.add_(summand)


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """What to write to a device in a tensor's place, so that the host goes on meanwhile.

    A GPU copies from the host's memory on its own only where that is pinned: else the host waits
    until the GPU has come to the copy. A tensor in other memory of the host is copied to pinned
    memory first; any other is given back.
    """
    if device.type != "cuda" or tensor.device.type != CPU or tensor.is_pinned():
        return tensor
    return tensor.detach().pin_memory()


@torch.no_grad()
def fill(target: Tensor, source: Tensor) -> None:
    """Copy into a tensor on any device, by way of the host's memory where it must be; waits only if
    that is its end.
    """
    if not is_plain(target):
        for inner, given in zip(own_parts(target), own_parts(source), strict=True):
            fill(inner, given)
        return
    here, there = location(source), location(target)
    if has_detour(here, there):
        source, here = _copy_straight(source, HOST), HOST
    write(source, target, here, there)
    if there.type == CPU:
        synchronise(here)


def _copy_straight(tensor: Tensor, device: torch.device) -> Tensor:
    copied: Tensor = torch.ops.aten._to_copy.default(
        tensor.detach(),
        device=device,
        non_blocking=device.type == "cuda" and tensor.device.type == "cuda",
    )
    if registries and device.type == CPU:
        registries[-1].land(copied, device)
    return copied


class _Move(torch.autograd.Function):
    """A copy forwards and a copy back; torch's own copy forgets which stand-in a tensor came from.

    The way back is one too where gradients are made of gradients (``create_graph=True``).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, source: torch.device, target: torch.device) -> Tensor:
        return copy(tensor, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.source, ctx.target = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if registries:
            registries[-1].expect(gradients[0], ctx.target)
        return move(gradients[0], ctx.source), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return move(tangents[0], ctx.target)
