"""How much the loss of each micro-batch counts in that of the batch: by its samples, or by what its samples weigh.

A loss that is a mean over labels, some of which it leaves out or weighs, is no mean over samples. Of micro-batches i
with samples j that weigh c(j), each with a loss that is a mean by these weights, the loss of the batch is::

    sum over i of loss(i) * C(i) / C        C(i) = sum of c(j) over j in i,  C = sum of all

Micro-batches are added up by their samples, n(i) / N. So each loss is multiplied by the mean of c(j) * N / C over its
own samples, which come along with the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer import devices
from placer.errors import InputError, kind_of
from placer.graph.structure import Structure, flatten
from placer.warned import warn

Weigh = Callable[[Any, Any], Tensor | None]
"""From the inputs and the target of a batch to what each sample weighs: ``(N,)``."""

_LEFT_OUT = -100
"""What torch's losses leave out unless they are told otherwise."""


class Weighed(NamedTuple):
    """A target, and what its samples weigh in the batch: 1 on average."""

    target: Any
    weights: Tensor


class Weighing:
    """The loss of micro-batches, weighed where that is asked for or follows from the loss.

    Args:
        loss_fn: of output and target.
        weigh: what samples weigh; None to weigh them by labels where ``loss_fn`` is one of torch's for these, and alike
            where it is not.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], weigh: Weigh | None) -> None:
        if weigh is not None and not callable(weigh):
            raise InputError(f"weigh is {kind_of(weigh)}; give a function of inputs and target, or leave it out")
        self._loss_fn = loss_fn
        self._weigh = weigh if weigh is not None else _by_labels(loss_fn)
        self._is_asked = weigh is not None
        self._buffers: dict[torch.device, dict[str, Tensor]] = {}
        self._has_looked = False

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss of a micro-batch as it counts in the batch; of one without labels 0, of which there is no mean."""
        if not isinstance(target, Weighed):
            return self._loss(output, target)
        loss, weight = self._loss(output, target.target), target.weights.mean()
        return torch.where(weight == 0, torch.zeros_like(loss), loss * weight.to(loss.dtype))

    def _loss(self, output: Any, target: Any) -> Tensor:
        """The loss as it was given, its buffers, such as class weights, where the output is."""
        loss_fn = self._loss_fn
        place = next((devices.location(leaf) for leaf in flatten(output)[0] if isinstance(leaf, Tensor)), None)
        buffers = dict(loss_fn.named_buffers()) if isinstance(loss_fn, nn.Module) and place is not None else {}
        if place is None or all(devices.same(devices.location(buffer), place) for buffer in buffers.values()):
            return loss_fn(output, target)
        if place not in self._buffers:
            self._buffers[place] = {name: devices.copy(buffer, place) for name, buffer in buffers.items()}
        loss: Tensor = torch.func.functional_call(loss_fn, self._buffers[place], (output, target))  # type: ignore[arg-type]
        return loss

    def with_weights(self, inputs: Any, target: Any, tensors: Sequence[Any], size: int) -> tuple[list[Any], Structure]:
        """The target of a batch that is cut, flattened, and what its samples weigh.

        Args:
            inputs: of the batch, as the caller gave them; None where another process has them.
            target: the same.
            tensors: the flattened inputs.
            size: samples in the batch.

        Raises:
            InputError: ``weigh`` gives something else than a number for each sample.
        """
        weights = self._asked(inputs, target)
        if weights is None and not self._is_asked:
            leaves, structure = flatten(target)
            self._tell_of_labels([*tensors, *leaves])
            return leaves, structure
        if not isinstance(weights, Tensor) or weights.shape != (size,):
            given = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else kind_of(weights)
            raise InputError(f"weigh gave {given}; let it give a tensor of a number for each of the {size} samples")
        with torch.no_grad():
            weights = weights.detach().double()
            total = weights.sum()
            share = torch.where(total == 0, torch.zeros_like(total), size / total)  # nothing weighs: nothing is learnt
            return flatten(Weighed(target, weights * share))

    def _asked(self, inputs: Any, target: Any) -> Tensor | None:
        try:
            return None if self._weigh is None else self._weigh(inputs, target)
        except Exception as error:  # whatever a user's function raises
            what = f"{type(error).__name__}: {error}"
            if inputs is None:
                raise InputError(
                    f"weigh(None, target) failed: {what}; the inputs are with the first of several processes, so weigh "
                    "by the target, and give the labels as that"
                ) from error
            raise InputError(f"weigh(inputs, target) failed: {what}; it is given those of the step") from error

    def _tell_of_labels(self, tensors: Sequence[Any]) -> None:
        """Warn once, in a first batch, where labels are left out, of which no loss here knows how many."""
        if self._has_looked:
            return
        self._has_looked = True
        labels = (tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.dtype == torch.int64)
        if any(bool((tensor == _LEFT_OUT).any()) for tensor in labels):
            warn(
                f"a batch has labels of {_LEFT_OUT}, which losses leave out: micro-batches count by their samples, not "
                "by their labels. Let the loss be nn.CrossEntropyLoss(), or give weigh=, what each sample weighs: "
                f"lambda inputs, target: (target != {_LEFT_OUT}).sum(1)"
            )


@dataclass(frozen=True)
class _Labels:
    """What samples weigh in one of torch's losses of labels: those that it counts, by the weights of their classes."""

    loss_fn: nn.CrossEntropyLoss | nn.NLLLoss

    def __call__(self, _: Any, target: Any) -> Tensor | None:
        """``(N,)``; None for probabilities, of which all count."""
        if not isinstance(target, Tensor) or target.is_floating_point() or not target.dim():
            return None
        counted = target != self.loss_fn.ignore_index
        if self.loss_fn.weight is not None:
            counted = self.loss_fn.weight.to(target.device)[torch.where(counted, target, 0)] * counted
        return counted.flatten(1).sum(1) if counted.dim() > 1 else counted


def _by_labels(loss_fn: Any) -> _Labels | None:
    known = type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss) and loss_fn.reduction == "mean"
    return _Labels(loss_fn) if known else None
