"""Experts of a mixture that rest on the host: a device gets those that its tokens choose.

    layer     [attention][router][experts            ]
    copies                       [expert 3][expert 7]

Before a module of experts runs, the rows of the chosen experts are copied into a slot; the other
rows keep what was there, and nothing reads them. The copies depend on what the router computes, so
they are neither issued ahead nor recorded. ``copies_chosen_experts`` of the schema says from how
many bytes on this gains, and ``solver/pass_times.py`` has the times.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.expert_stacks import choice_of
from placer.capture.hook_path.device_alignment import BorrowedWeights


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
        chosen = choice_of(self._signature, args, kwargs)
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
