"""Copies of tensors between devices, differentiable where needed."""

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
    is_block,
    is_plain,
    own_parts,
    parts,
    rebuilt,
    rebuilt_object,
)


def location(tensor: Tensor) -> torch.device:
    """Return the device that holds the tensor; under ``logical_devices`` the stand-in."""
    if registries:
        return registries[-1].device(tensor)
    if type(tensor) in USUAL:
        return tensor.device
    # a wrapper subclass may report the device on which it was created
    inside = own_parts(tensor)
    return inside[-1].device if inside else tensor.device


def same(a: torch.device, b: torch.device) -> bool:
    """Return whether two devices are the same.

    Outside ``logical_devices``, all CPU stand-ins share their tensors and count as one.
    """
    if a.type == CPU and b.type == CPU and not stand_ins:
        return True
    return a == b


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; the tensor itself if it is there.

    Differentiable: the gradient is copied back.
    """
    source = location(tensor)
    if same(source, device):
        return tensor
    differentiable = torch.is_grad_enabled() and (tensor.requires_grad or is_transformed(tensor))
    if differentiable or has_tangents():
        moved: Tensor = _Move.apply(tensor, source, device)  # type: ignore[no-untyped-call]
        return moved
    return copy(tensor, device)


def is_transformed(tensor: Tensor) -> bool:
    """Return whether ``torch.func`` (such as ``vmap``) wraps the tensor.

    Such a wrapper hides ``requires_grad`` of the tensor inside.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor with memory of its own that ``torch.func`` wraps; others unchanged."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_tangents() -> bool:
    """Return whether ``torch.autograd.forward_ad.dual_level()`` is active."""
    return int(getattr(forward_ad, "_current_level", -1)) >= 0


def is_in_transform() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode differentiation is active.

    Tensors created then would become part of it.
    """
    return has_tangents() or bool(torch._C._functorch.get_dynamic_layer_stack_depth())


def copy(tensor: Tensor, device: torch.device, known: Known | None = None) -> Tensor:
    """Return a copy of a tensor on a device, detached from its history.

    A quantised weight is copied with all its parts: a wrapper with its inner tensors, attributes
    with the tensors in them.

    Args:
        tensor: any tensor.
        device: the device of the copy.
        known: copies made before, so that tensors that share memory share it again; see
            ``rebuilt``.
    """
    if known is None and is_plain(tensor):
        return _copied(tensor, device)
    return rebuilt(tensor, lambda part: _copied(part, device), known)


def copied_object(value: Any, device: torch.device, known: Known | None = None) -> Any:
    """Return a container or object like this one with its tensors copied to a device.

    Args:
        value: not changed.
        device: the device of the copies.
        known: copies made before; see ``copy``.
    """
    return rebuilt_object(value, lambda part: _copied(part, device), known)


def is_at(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor, with its wrapped and attached tensors, is on a device."""
    return all(same(location(part), device) for part in parts(tensor))


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if has_detour(location(tensor), device):
        tensor = _copy_straight(tensor, HOST)
    return _copy_straight(tensor, device)


def write(source: Tensor, target: Tensor, here: torch.device, there: torch.device) -> None:
    """Copy into a tensor directly, without waiting for a GPU.

    Args:
        source: the data.
        target: a tensor of the same shape.
        here: the device of ``source``.
        there: the device of ``target``.
    """
    target.copy_(source, non_blocking=True)


def add(summand: Tensor, total: Tensor) -> None:
    """Add a summand on the same device to a tensor."""
    total.add_(summand)


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that a GPU can copy while the host goes on.

    A GPU copies asynchronously only from pinned host memory; otherwise the host blocks until the
    copy runs. So pageable host memory is copied to pinned memory first. Any other tensor is
    returned unchanged.
    """
    if device.type != "cuda" or tensor.device.type != CPU or tensor.is_pinned():
        return tensor
    return tensor.detach().pin_memory()


@torch.no_grad()
def fill(target: Tensor, source: Tensor, *, in_turn: bool = False) -> None:
    """Copy into a tensor on any device, through the host where the route requires it.

    Wait only if the target is in host memory.

    Args:
        target: changed.
        source: of the same shape.
        in_turn: whether this thread's stream has made the source. Then a copy to the host waits for
            this stream alone, while copies of weights go on in others.
    """
    if not is_block(target):
        for inner, given in zip(own_parts(target), own_parts(source), strict=True):
            fill(inner, given, in_turn=in_turn)
        return
    here, there = location(source), location(target)
    if has_detour(here, there):
        source, here = _copy_straight(source, HOST), HOST
    write(source, target, here, there)
    # the host may read the target right after this call
    if there.type == CPU and here.type == "cuda" and in_turn:
        torch.cuda.current_stream(here).synchronize()
    elif there.type == CPU:
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
    """A copy whose gradient is copied back to the source device.

    Torch's own copy forgets which stand-in a tensor came from. The backward copy is differentiable
    too (``create_graph=True``).
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
