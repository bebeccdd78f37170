"""Experts of a mixture that rest on the host: a device gets those that its tokens choose.

    layer     [attention][router][experts            ]
    copies                       [expert 3][expert 7]

A module of experts, as transformers has them, stacks the weights of all its experts in parameters
of shape (experts, ...), and its ``forward`` takes the numbers of the chosen experts. Before it
runs, their rows are copied into a slot; the other rows keep what was there, and nothing reads them.
The copies depend on what the router computes, so they are neither issued ahead nor recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.hook_path.device_alignment import BorrowedWeights

LEAST_BYTES = 1 << 31
"""Least bytes of resting experts for this: a recorded pass copies 2 GiB over a link of 50 GB/s in
40 ms, about as long as the host needs to issue a pass of 32 layers through hooks."""

_CHOICE = "top_k_index"
"""The argument with the numbers of the chosen experts."""


def stacks_in(module: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Return, by path of a module of experts, the names of the parameters that stack them.

    Args:
        module: the model.
        names: of parameters of the model; modules of which others stack experts are left out.
    """
    found = {}
    for path, child in module.named_modules():
        stacks = [f"{path}.{name}".lstrip(".") for name in _stacks_of(child)]
        if stacks and all(name in names for name in stacks):
            found[path] = stacks
    return found


def _stacks_of(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that stack experts."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or _CHOICE not in inspect.signature(module.forward).parameters:
        return []
    own = module.named_parameters(recurse=False)
    return [name for name, one in own if one.dim() > 1 and one.shape[0] == count]


class ChosenExperts:
    """The stacked parameters of one module of experts, in a slot while it runs through hooks.

    Args:
        module: of the experts.
        stacks: parameters on the host, and their views in the slot, each of shape (experts, ...).
        around: provides the slot and the module's other parameters; None if a module around it
            does.
    """

    def __init__(
        self,
        module: nn.Module,
        stacks: Sequence[tuple[Tensor, Tensor]],
        around: BorrowedWeights | None = None,
    ) -> None:
        self._signature = inspect.signature(module.forward)
        self._stacks, self._around = stacks, around

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the experts that a call of the module needs.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
        """
        if self._around is not None:
            self._around.enter(args, kwargs)
        chosen = self._signature.bind(*args, **kwargs).arguments[_CHOICE]
        count = self._stacks[0][0].shape[0]
        with devices.unobserved(), torch.no_grad(), torch._C.DisableTorchFunction():
            # a number that is too high means an expert of another process
            numbers = sorted({one for one in chosen.flatten().tolist() if one < count})
            for parameter, view in self._stacks:
                for first, last in _runs(numbers):
                    view[first:last].copy_(parameter[first:last], non_blocking=True)

    def leave(self) -> None:
        """Note that the module has run."""
        if self._around is not None:
            self._around.leave()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each run of consecutive ones, and the one after its last."""
    first = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield numbers[first], number + 1
            first = place + 1
