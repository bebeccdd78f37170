"""Labels that a loss leaves out or weighs, seen in what it gives to torch's losses of labels.

    loss_fn = lambda y, t: F.cross_entropy(y, t, ignore_index=0)     a mean over the labels t, of which 0 does not count

``nn.CrossEntropyLoss`` says that of itself. A function does not; it is watched when it runs on the
first whole batch.
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
    """The weights of samples: of their labels that count, the weights of their classes.

    Attributes:
        name: of the labels in the target.
        dim: their batch dimension.
        ignore_index: the label that does not count.
        weight: by class; None if all weigh alike.
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
    """Sees which labels a loss counts, while it runs on a whole batch.

    Attributes:
        found: the weights of samples, once ``look`` has seen that the loss is one mean over labels
            of the target.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[dict[str, Any], Any]] = []
        self.found: CountedLabels | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _LOSSES:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self._seen.append((bound.arguments, made))
        return made

    def left_out(self) -> set[int]:
        """Return the labels that do not count in the losses that were seen."""
        return {given["ignore_index"] for given, _ in self._seen}

    def look(self, loss: Tensor, target: Any, layout: BatchLayout) -> None:
        """Look at what the loss was made of.

        Args:
            loss: what it gave.
            target: that it was given.
            layout: where the samples of the target lie.
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
        if not is_mean or not torch.equal(made, loss):
            return
        for leaf, name, dim in zip(flatten(target)[0], layout.names, layout.dims, strict=True):
            if dim is not None and isinstance(leaf, Tensor) and _are_same(leaf, labels):
                self.found = CountedLabels(name, dim, given["ignore_index"], given["weight"])
                return


def _are_same(leaf: Tensor, labels: Tensor) -> bool:
    """Return whether labels are those of a target, perhaps in another shape or on another device."""
    if leaf.numel() != labels.numel() or leaf.is_floating_point():
        return False
    host = devices.HOST
    return bool(
        torch.equal(
            devices.move(leaf, host).flatten(), devices.move(labels, host).flatten().to(leaf.dtype)
        )
    )
