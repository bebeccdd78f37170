"""The loss of micro-batches: how much each counts in the loss of the batch, and the values that
come with it.

Of micro-batches i with n(i) samples, N in all, the loss of the batch is::

    reduction="mean"   sum over i of loss(i) * n(i) / N
    reduction="sum"    sum over i of loss(i)
    weigh              sum over i of loss(i) * C(i) / C     C(i): sum of the weights of the samples in i, C: of all

A loss that is a mean over labels, some of which it leaves out or weighs, is a mean with weights.
Since micro-batches are added up by their samples, such a loss is multiplied by the mean of c(j) * N
/ C over its samples j, which come along with the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.batch_dims.batch_layout import BatchLayout
from placer.capture.batch_dims.declared_layout import target_layout
from placer.capture.loss_functions import LossFunction, loss_and_values
from placer.capture.pytrees import Structure, flatten
from placer.errors import InputError
from placer.executor.micro_batches import weights_of
from placer.schema import BatchOptions
from placer.schema.batch_options import Weigh
from placer.utils.user_warnings import warn

# The label that torch's losses leave out by default.
_LEFT_OUT = -100


class Weighed(NamedTuple):
    """A target, and the weights of its samples in the batch: 1 on average."""

    target: Any
    weights: Tensor


class Goals(NamedTuple):
    """A target, flattened, as passes take it.

    Attributes:
        leaves: its tensors; behind them, where samples are weighed, their weights.
        structure: of both.
        layout: where the samples lie.
    """

    leaves: list[Any]
    structure: Structure
    layout: BatchLayout


class Weighing:
    """The loss of micro-batches, weighted where that is declared or follows from the loss.

    Args:
        loss_fn: of output and target.
        options: of the batch. If they do not weigh samples, those of torch's losses of labels are
            weighed by the labels that the loss counts.

    Raises:
        InputError: a sum is weighed, or the loss says of itself that it is a sum and the options do
            not.
    """

    def __init__(self, loss_fn: LossFunction, options: BatchOptions) -> None:
        self.options = _with_weights(loss_fn, options)
        self._loss_fn = loss_fn
        self._buffers: dict[torch.device, dict[str, Tensor]] = {}
        self._has_looked = False
        self._target_dims: dict[str, int] = {}

    def __call__(self, output: Any, target: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a micro-batch as it counts in the batch, and the values that come with
        it.

        The loss of a micro-batch whose samples weigh nothing is 0, as there is no mean of it.
        """
        if not isinstance(target, Weighed):
            return self.plain(output, target)
        (loss, values), weight = self.plain(output, target.target), target.weights.mean()
        return torch.where(
            weight == 0, torch.zeros_like(loss), loss * weight.to(loss.dtype)
        ), values

    def plain(self, output: Any, target: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss as the user computes it, and its values; buffers of the loss go where the
        output is.
        """
        loss_fn = self._loss_fn
        place = next(
            (devices.location(leaf) for leaf in flatten(output)[0] if isinstance(leaf, Tensor)),
            None,
        )
        buffers = (
            dict(loss_fn.named_buffers())
            if isinstance(loss_fn, nn.Module) and place is not None
            else {}
        )
        if place is None or all(
            devices.same(devices.location(buffer), place) for buffer in buffers.values()
        ):
            return loss_and_values(loss_fn(output, target))
        if place not in self._buffers:
            self._buffers[place] = {
                name: devices.copy(buffer, place) for name, buffer in buffers.items()
            }
        made = torch.func.functional_call(loss_fn, self._buffers[place], (output, target))  # type: ignore[arg-type]
        return loss_and_values(made)

    def weigh_by(self, weigh: Weigh) -> None:
        """Weigh samples by a function from now on."""
        self.options = self.options.model_copy(update={"weigh": weigh})

    def shares(self, sizes: Sequence[int]) -> list[float]:
        """Return by how much the loss of each micro-batch counts, given the samples in each."""
        total = sum(sizes)
        return [1.0 if self.options.reduction == "sum" else size / total for size in sizes]

    def means(self, goals: Goals, sizes: Sequence[int]) -> list[Tensor] | None:
        """Return the weight of each micro-batch in results that are means, numbers; None for its
        samples.

        Args:
            goals: of the batch.
            sizes: samples in each micro-batch.
        """
        if self.options.weigh is None or len(sizes) < 2 or "weights" not in goals.layout.names:
            return None
        return [part.sum() for part in torch.split(goals.leaves[-1], list(sizes))]

    def goals(self, inputs: Any, target: Any, size: int, is_cut: bool) -> Goals:
        """Return the target of a batch as passes take it.

        Args:
            inputs: of the batch, as the caller gave them; None where another process has them.
            target: likewise.
            size: samples in the batch.
            is_cut: whether there are several micro-batches.

        Raises:
            InputError: the target does not fit the batch, or ``weigh`` does not give a number for
                each sample.
        """
        leaves, structure = flatten(target)
        if not is_cut:
            nothing = (None,) * len(leaves)
            return Goals(
                leaves,
                structure,
                BatchLayout(size, nothing, structure.paths, (False,) * len(leaves)),
            )
        layout = target_layout(target, leaves, structure, self.options, size, self._target_dims)
        weights = self.weights(inputs, target, size)
        if weights is None:
            return Goals(leaves, structure, layout)
        with torch.no_grad():
            total = weights.sum()
            # nothing weighs: nothing is learnt
            share = torch.where(total == 0, torch.zeros_like(total), size / total)
            leaves, structure = flatten(Weighed(target, weights * share))
        return Goals(leaves, structure, _with_weights_behind(layout))

    def weights(self, inputs: Any, target: Any, size: int) -> Tensor | None:
        """Return the weight of each sample, shape ``(N,)``; None if all weigh alike.

        Args:
            inputs: of the batch, as the caller gave them; None where another process has them.
            target: likewise.
            size: samples in the batch, N.

        Raises:
            InputError: ``weigh`` fails, or does not give a number for each sample.
        """
        advice = "; it is given those of the step"
        if inputs is None:
            advice = (
                "; the inputs are with the first of several processes, so weigh by the target, and "
                "give the labels as that"
            )
        return weights_of(self.options, inputs, target, size, advice)

    def tell_of_labels(self, tensors: Sequence[Any]) -> None:
        """Warn once, of a first batch that is cut, of labels that do not count while samples count
        alike.

        Args:
            tensors: flattened inputs and target.
        """
        if self._has_looked or self.options.reduction == "sum" or self.options.weigh is not None:
            return
        self._has_looked = True
        labels = (
            tensor
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.dtype == torch.int64
        )
        if any(bool((tensor == _LEFT_OUT).any()) for tensor in labels):
            warn(
                f"a batch has labels of {_LEFT_OUT}, which losses leave out: micro-batches count "
                "by their samples, not by their labels. Let the loss be nn.CrossEntropyLoss(), or "
                "give the weight of each sample, as batch_options=BatchOptions(weigh=lambda "
                f"inputs, target: (target != {_LEFT_OUT}).sum(1))"
            )


@dataclass(frozen=True)
class _Labels:
    """The weights of samples in one of torch's losses of labels: those that it counts, by the
    weights of classes.
    """

    loss_fn: nn.CrossEntropyLoss | nn.NLLLoss
    may_give_none = True

    def __call__(self, _: Any, target: Any) -> Tensor | None:
        """Return weights of shape ``(N,)``, or None for probabilities, of which all count."""
        if not isinstance(target, Tensor) or target.is_floating_point() or not target.dim():
            return None
        counted = target != self.loss_fn.ignore_index
        if self.loss_fn.weight is not None:
            counted = (
                self.loss_fn.weight.to(target.device)[torch.where(counted, target, 0)] * counted
            )
        return counted.flatten(1).sum(1) if counted.dim() > 1 else counted


def merged(options: BatchOptions, weigh: Weigh | None) -> BatchOptions:
    """Return options that weigh samples by a function that was given apart.

    Raises:
        InputError: the options weigh already, or ``weigh`` is not a function.
    """
    if weigh is None:
        return options
    if not callable(weigh):
        raise InputError(
            f"weigh is {weigh!r}; give a function of inputs and target, or leave it out"
        )
    if options.weigh is not None:
        raise InputError("weigh is given twice: leave it out beside BatchOptions(weigh=...)")
    return options.model_copy(update={"weigh": weigh})


def _with_weights(loss_fn: Any, options: BatchOptions) -> BatchOptions:
    kind = type(loss_fn).__name__
    says = getattr(loss_fn, "reduction", None)
    if options.reduction == "sum" and options.weigh is not None:
        raise InputError(
            "weights are of a mean: give BatchOptions(reduction='sum') without weigh, or weigh "
            "alone"
        )
    if says in ("sum", "mean") and says != options.reduction:
        raise InputError(
            f"{kind} has reduction={says!r}, and the batch has reduction={options.reduction!r}; "
            f"give batch_options=BatchOptions(reduction={says!r}), or "
            f"{kind}(reduction={options.reduction!r})"
        )
    if (
        options.weigh is None
        and type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss)
        and says == "mean"
    ):
        return options.model_copy(update={"weigh": _Labels(loss_fn)})
    return options


def _with_weights_behind(layout: BatchLayout) -> BatchLayout:
    """Return the layout of ``Weighed`` from that of its target."""

    def inside(name: str) -> str:
        return f"target.{name}" if name else "target"

    return replace(
        layout,
        dims=(*layout.dims, 0),
        names=(*map(inside, layout.names), "weights"),
        declared=(*layout.declared, True),
        lists=frozenset(map(inside, layout.lists)),
    )
