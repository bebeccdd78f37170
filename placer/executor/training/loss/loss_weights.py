"""The loss of micro-batches: their weights in the loss of the batch, and accompanying values.

Of micro-batches i with n(i) samples, N in total, the loss of the batch is::

    reduction="mean"   sum over i of loss(i) * n(i) / N
    reduction="sum"    sum over i of loss(i)
    weigh              sum over i of loss(i) * C(i) / C
                         C(i): sum of the weights of the samples in i, C: of all samples

A mean over labels that ignores or weighs some is a weighted mean, with weights c(j) of its samples
j. Micro-batches are summed by number of samples. So such a loss is multiplied by the mean of c(j) *
N / C over its samples. These factors travel with the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.batch_dims.batch_layout import BatchLayout
from placer.capture.batch_dims.declared_layout import target_layout
from placer.capture.loss_functions import LossFunction, loss_and_values
from placer.capture.pytrees import Structure, flatten
from placer.errors import InputError
from placer.executor.micro_batches import weights_of
from placer.executor.training.loss.label_weights import CountedLabels
from placer.schema import BatchOptions
from placer.schema.options import Weigh
from placer.utils.user_warnings import warn

# The label that torch's losses ignore by default.
_LEFT_OUT = -100


Spelt: TypeAlias = tuple[str, Any, int | None]
"""The expression of a value in ``weigh``, the value, and its batch dimension."""


class Weighed(NamedTuple):
    """A target with the weights of its samples in the batch, which are 1 on average."""

    target: Any
    weights: Tensor


class Goals(NamedTuple):
    """A flattened target, as passes take it.

    Attributes:
        leaves: its tensors, followed by the sample weights, if any.
        structure: of both.
        layout: the batch dimensions.
    """

    leaves: list[Any]
    structure: Structure
    layout: BatchLayout

    def spelt(self) -> list[Spelt]:
        """Return the tensors of the target with the texts that read them."""
        texts = [f"target{path}" for path in self.structure.paths]
        # sample weights follow the target
        return [*zip(texts, self.leaves, self.layout.dims, strict=False)]


class Weighing:
    """The loss of micro-batches, weighted if declared or implied by the loss.

    Args:
        loss_fn: a function of output and target.
        options: of the batch. Without ``weigh``, torch's label losses are weighted by the labels
            that they count.

    Raises:
        InputError: if a sum is weighted, or the loss's own ``reduction`` contradicts the options.
    """

    def __init__(self, loss_fn: LossFunction, options: BatchOptions) -> None:
        self.options = _with_weights(loss_fn, options)
        self._loss_fn = loss_fn
        self._buffers: dict[torch.device, dict[str, Tensor]] = {}
        self._has_looked = False
        self._target_dims: dict[str, int] = {}

    def __call__(self, output: Any, target: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return a micro-batch's loss, scaled for the batch, and accompanying values.

        If all its samples have weight 0, the loss is 0, since their mean is undefined.
        """
        if not isinstance(target, Weighed):
            return self.plain(output, target)
        (loss, values), weight = self.plain(output, target.target), target.weights.mean()
        return torch.where(
            weight == 0, torch.zeros_like(loss), loss * weight.to(loss.dtype)
        ), values

    def plain(self, output: Any, target: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the user's loss and values, with the loss's buffers on the output's device."""
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
        # buffers, such as class weights, are copied once per device
        if place not in self._buffers:
            self._buffers[place] = {
                name: devices.copy(buffer, place) for name, buffer in buffers.items()
            }
        made = torch.func.functional_call(
            loss_fn,  # type: ignore[arg-type]
            self._buffers[place],
            (output, target),
        )
        return loss_and_values(made)

    def weigh_by(self, weigh: Weigh) -> None:
        """Weigh samples by a function from now on."""
        self.options = self.options.model_copy(update={"weigh": weigh})

    def shares(self, sizes: Sequence[int]) -> list[float]:
        """Return the factor of each micro-batch's loss, given the samples in each."""
        total = sum(sizes)
        return [1.0 if self.options.reduction == "sum" else size / total for size in sizes]

    def means(self, goals: Goals, sizes: Sequence[int]) -> list[Tensor] | None:
        """Return the weight of each micro-batch in results that are means.

        Args:
            goals: of the batch.
            sizes: samples in each micro-batch.

        Returns:
            Scalars; None to weigh by the number of samples.
        """
        if self.options.weigh is None or len(sizes) < 2 or "weights" not in goals.layout.names:
            return None
        return [part.sum() for part in torch.split(goals.leaves[-1], list(sizes))]

    def goals(self, inputs: Any, target: Any, size: int, is_cut: bool) -> Goals:
        """Return the target of a batch, as passes take it.

        Args:
            inputs: of the batch, as the caller gave them; None if another process has them.
            target: of the batch, as the caller gave it.
            size: samples in the batch.
            is_cut: whether there are several micro-batches.

        Raises:
            InputError: if the target does not fit the batch, or ``weigh`` does not return a number
                for each sample.
        """
        leaves, structure = flatten(target)
        if not is_cut:
            nothing = (None,) * len(leaves)
            return Goals(
                leaves,
                structure,
                BatchLayout(size, nothing, structure.paths, (False,) * len(leaves)),
            )
        layout = self._layout(target, leaves, structure, size)
        weights = self.weights(inputs, target, size)
        if weights is None:
            return Goals(leaves, structure, layout)
        with torch.no_grad():
            total = weights.sum()
            # a total weight of 0: nothing is learnt
            share = torch.where(total == 0, torch.zeros_like(total), size / total)
            leaves, structure = flatten(Weighed(target, weights * share))
        return Goals(leaves, structure, _with_weights_behind(layout))

    def _layout(
        self, target: Any, leaves: Sequence[Any], structure: Structure, size: int
    ) -> BatchLayout:
        """Return the batch dimensions of a target."""
        return target_layout(target, leaves, structure, self.options, size, self._target_dims)

    def weights(self, inputs: Any, target: Any, size: int) -> Tensor | None:
        """Return the weight of each sample, shape ``(N,)``; None for equal weights.

        Args:
            inputs: of the batch, as the caller gave them; None if another process has them.
            target: of the batch, as the caller gave it.
            size: samples in the batch, N.

        Raises:
            InputError: if ``weigh`` fails, or does not return a number for each sample.
        """
        advice = "; it receives the step's inputs and target"
        if inputs is None:
            advice = (
                "; the inputs are with the first of several processes, so weigh by the target, and "
                "give the labels as that"
            )
        options = self.options
        if isinstance(options.weigh, _Labels):
            # Such a loss takes one tensor of labels.
            dims = self._layout(target, *flatten(target), size).dims
            labels = replace(options.weigh, dim=next(iter(dims), None))
            options = options.model_copy(update={"weigh": labels})
        return weights_of(options, inputs, target, size, advice)

    def tell_of_labels(self, tensors: Iterable[Spelt]) -> None:
        """Warn once if the first split batch has ignored labels but no sample weights.

        Args:
            tensors: of the inputs and the target.
        """
        if self._has_looked or self.options.reduction == "sum" or self.options.weigh is not None:
            return
        self._has_looked = True
        for text, tensor, dim in tensors:
            # reads labels, which may synchronise with a device, but only once
            if (
                isinstance(tensor, Tensor)
                and tensor.dtype == torch.int64
                and bool((tensor == _LEFT_OUT).any())
            ):
                counted = "..."  # not one tensor has all labels
                if dim is not None:
                    counted = f"({text} != {_LEFT_OUT}){_per_sample(tensor.dim(), dim)}"
                warn(
                    f"a batch has labels of {_LEFT_OUT}, which losses leave out: micro-batches "
                    "count by their samples, not by their labels. Let the loss be "
                    "nn.CrossEntropyLoss(), or give the weight of each sample, as "
                    f"batch_options=BatchOptions(weigh=lambda inputs, target: {counted})"
                )
                return


def _per_sample(count: int, dim: int) -> str:
    """Return the text of the call that adds the flags of each sample.

    Args:
        count: dimensions of the labels.
        dim: the batch dimension.
    """
    others = [one for one in range(count) if one != dim]
    if not others:
        return ".float()"
    return f".sum({others[0]})" if len(others) == 1 else f".sum({tuple(others)})"


@dataclass(frozen=True)
class _Labels:
    """Sample weights of torch's label losses: counted labels times class weights.

    Attributes:
        loss_fn: the loss.
        dim: the batch dimension of its target; None if the target is not cut.
    """

    loss_fn: nn.CrossEntropyLoss | nn.NLLLoss
    dim: int | None = 0
    may_give_none = True

    def __call__(self, inputs: Any, target: Any) -> Tensor | None:
        """Return weights of shape ``(N,)``, or None for class probabilities, which all count."""
        if not isinstance(target, Tensor) or self.dim is None:
            return None
        loss_fn = self.loss_fn
        counted = CountedLabels("", self.dim, loss_fn.ignore_index, loss_fn.weight)
        return counted(inputs, target)


def merged(options: BatchOptions, weigh: Weigh | None) -> BatchOptions:
    """Return the options with a separately given ``weigh`` function.

    Raises:
        InputError: if the options have one already, or ``weigh`` is not a function.
    """
    if weigh is None:
        return options
    if not callable(weigh):
        raise InputError(
            f"weigh is {weigh!r}; give a function of inputs and target, or leave it out"
        )
    if options.weigh is not None:
        raise InputError("weigh is given twice: give it only as BatchOptions(weigh=...)")
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
    """Return the layout of ``Weighed``, given the target's layout."""

    def inside(name: str) -> str:
        return f"target.{name}" if name else "target"

    return replace(
        layout,
        dims=(*layout.dims, 0),
        names=(*map(inside, layout.names), "weights"),
        declared=(*layout.declared, True),
        lists=frozenset(map(inside, layout.lists)),
    )
