"""Ignored and weighted labels of a loss, observed in its calls of torch's label losses.

    loss_fn = lambda y, t: F.cross_entropy(y, t, ignore_index=0)     a mean over labels t except 0

``nn.CrossEntropyLoss`` declares this itself. A function does not, so it is observed on the first
whole batch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from placer import devices
from placer.capture.batch_dims.batch_layout import BatchLayout
from placer.capture.batch_dims.value_names import name_from_path
from placer.capture.pytrees import flatten

_LOSSES = (functional.cross_entropy, functional.nll_loss)


@dataclass(frozen=True)
class CountedLabels:
    """Weights of samples: the number of counted labels, or the sum of their class weights.

    Attributes:
        name: of the labels in the target.
        dim: their batch dimension.
        ignore_index: the label that does not count.
        weight: by class; None for equal weights.
    """

    name: str
    dim: int
    ignore_index: int
    weight: Tensor | None

    may_give_none = True

    def __call__(self, _: Any, target: Any) -> Tensor | None:
        """Return weights of shape ``(N,)``; None if the target has no such labels."""
        leaves, structure = flatten(target)
        named = dict(zip(map(name_from_path, structure.paths), leaves, strict=True))
        labels = named.get(self.name)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() <= self.dim:
            return None
        counted = labels != self.ignore_index
        if self.weight is not None:
            weight = devices.move(self.weight, devices.location(labels))
            counted = weight[torch.where(counted, labels, 0)] * counted
        return counted.movedim(self.dim, 0).flatten(1).sum(1) if counted.dim() > 1 else counted


class LabelWatch(TorchFunctionMode):
    """A mode that observes which labels a loss counts, on a whole batch.

    Attributes:
        found: the weights of samples, once ``look`` has recognised the loss as a mean over labels
            of the target.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[dict[str, Any], Any]] = []
        self.found: CountedLabels | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _LOSSES:
            # with defaults: ignore_index is -100 if it is not given
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self._seen.append((bound.arguments, made))
        return made

    def left_out(self) -> set[int]:
        """Return the ignored labels of the observed losses."""
        return {given["ignore_index"] for given, _ in self._seen}

    def look(self, loss: Tensor, target: Any, layout: BatchLayout) -> None:
        """Determine the weights of samples from the observed calls.

        Args:
            loss: the value of the loss.
            target: its target.
            layout: the batch dimensions of the target.
        """
        if len(self._seen) != 1:
            return
        ((given, made),) = self._seen
        labels = given["target"]
        is_mean = (
            given["reduction"] == "mean"
            and isinstance(labels, Tensor)
            and not labels.is_floating_point()
        )
        # only a loss that is exactly torch's mean has weights that follow from its labels
        if not is_mean or not torch.equal(made, loss):
            return
        for leaf, name, dim in zip(flatten(target)[0], layout.names, layout.dims, strict=True):
            if dim is not None and isinstance(leaf, Tensor) and _are_same(leaf, labels):
                self.found = CountedLabels(name, dim, given["ignore_index"], given["weight"])
                return


def _are_same(leaf: Tensor, labels: Tensor) -> bool:
    """Return whether labels equal a target's, up to shape and device."""
    if leaf.numel() != labels.numel() or leaf.is_floating_point():
        return False
    host = devices.HOST
    return bool(
        torch.equal(
            devices.move(leaf, host).flatten(), devices.move(labels, host).flatten().to(leaf.dtype)
        )
    )
