"""The gradients of inputs and targets that require one, leaves or not.

    gradient of a micro-batch's part, from each stage that reads it
      ──▶ its part of the whole's gradient, one for each stage
      ──▶ their sum ──▶ ``.grad``, or the caller's graph of autograd

Several stages may read one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.batch_dims.batch_layout import cut_tensor
from placer.devices import Courier, Lane, Mark
from placer.executor.training.stages.training_slot import Key


def detached(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors as leaves of their own, which require gradients as before."""
    return [
        tensor.detach().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, Tensor)
        else tensor
        for tensor in tensors
    ]


@torch.no_grad()
def on_host(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors as leaves on the host, which require gradients as before.

    They keep none of a device's memory.
    """
    return [
        devices.move(tensor, devices.HOST).detach().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, Tensor)
        else tensor
        for tensor in tensors
    ]


def hand_out(tensors: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    """Let gradients go where a backward pass takes them: into ``.grad``, or on through a graph.

    Args:
        tensors: as the caller gave them.
        gradients: of each; None where it has none.
    """
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if gradient is not None
    ]
    if pairs:
        torch.autograd.backward(
            [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        )


class InputGradients:
    """The gradients of one batch's inputs and targets.

    Args:
        given: inputs and targets by name or position; only those count that require a gradient.
        sizes: samples in each micro-batch.
        courier: for the copies.
        dims: of each, the dimension that it is cut along; None where every micro-batch has all of
            it.
    """

    def __init__(
        self,
        given: Mapping[Key, Any],
        sizes: Sequence[int],
        courier: Courier,
        dims: Mapping[Key, int | None],
    ) -> None:
        self._given = {
            key: item
            for key, item in given.items()
            if isinstance(item, Tensor) and item.requires_grad
        }
        self._sizes = sizes
        self._courier = courier
        self._dims = dims
        self._parts: dict[tuple[Key, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._marks: list[tuple[torch.device, Mark]] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._given

    def take(
        self, key: Key, reader: int, chunk: int, gradient: Tensor, ready: Mark, label: Any
    ) -> Mark:
        """Copy the gradient of a part of the batch out of a stage.

        Args:
            key: the tensor that it is a gradient of.
            reader: the stage.
            chunk: the micro-batch.
            gradient: of this part of the tensor.
            ready: when it is there.
            label: how a trace names the copy.

        Returns:
            A mark behind the copy.
        """
        home = devices.location(self._given[key])
        if (key, reader) not in self._parts:
            self._parts[key, reader] = self._room(key, home, gradient)
        target = self._parts[key, reader][1][chunk]
        mark = self._courier.send(
            gradient, ready, target, Lane(home, caller=True).mark(), "backward", label
        )
        self._marks.append((home, mark))
        return mark

    def _room(
        self, key: Key, home: torch.device, gradient: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Make memory for a gradient.

        Returns:
            The tensors to be summed up, and in them the part of each micro-batch.
        """
        like = self._given[key].detach()
        # A copy to memory of the host that is not pinned would hold the caller up.
        pinned = gradient.is_cuda and home.type == devices.CPU
        new = partial(torch.empty, like.shape, dtype=like.dtype, device=home, pin_memory=pinned)
        if self._dims[key] is not None:
            whole = new()
            return [whole], list(cut_tensor(whole, self._dims[key], str(key), self._sizes))
        each = [new() for _ in self._sizes]
        return each, each

    def hand_out(self) -> None:
        """Let the sums go where a backward pass of the unsplit model would take them."""
        for home, mark in self._marks:
            Lane(home, caller=True).wait(mark)
        sums: dict[Key, Tensor] = {}
        for (key, _), (terms, _) in self._parts.items():
            for term in terms:
                sums[key] = sums[key] + term if key in sums else term
        hand_out(list(self._given.values()), [sums.get(key) for key in self._given])
