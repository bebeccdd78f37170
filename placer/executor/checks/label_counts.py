"""Which values of a batch could make its loss another mean than that of an earlier batch.

A loss that is a mean over labels, some of which it leaves out, equals the mean over micro-batches
while each of these has as many labels. A first batch for which that holds says nothing about a
later one for which it does not. The same is true of a mean with weights, while these are all equal.
Such a later batch is therefore compared again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from placer.capture.batch_dims.batch_layout import BatchLayout

_LARGEST = 1 << 20
"""Entries of the largest tensor that is read in every step: about a millisecond."""

_READ = (
    torch.bool,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
"""Types of labels, of flags that say which count, and of weights."""

Array = numpy.ndarray[Any, numpy.dtype[Any]]

Uneven = frozenset[tuple[int, str]]
"""Places of tensors, and the kind of entry of which micro-batches have unequal shares."""


def uneven(
    tensors: Sequence[Any],
    layout: BatchLayout,
    sizes: Sequence[int],
    left_out: Collection[int] = (),
) -> Uneven:
    """Return what micro-batches have unequal shares of: negative numbers, zeros, ones that are
    true, unequal weights.

    Only tensors in the memory of the host are read, because another device would have to finish its
    work first.

    Args:
        tensors: inputs or a target, flattened, in the order of ``layout.dims``.
        layout: where their samples lie.
        sizes: samples in each micro-batch.
        left_out: further numbers that are labels which do not count.
    """
    if len(sizes) < 2 or layout.lists:
        return frozenset()
    with torch._C.DisableTorchFunction():  # nobody has to see these reads
        return frozenset(
            (place, kind)
            for place, (tensor, dim) in enumerate(zip(tensors, layout.dims, strict=False))
            if dim is not None and isinstance(tensor, Tensor) and _is_read(tensor)
            for kind in _kinds(_array(tensor), dim, sizes, left_out)
        )


def _is_read(tensor: Tensor) -> bool:
    is_plain = (
        tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_complex()
    )
    return is_plain and tensor.dtype in _READ and 0 < tensor.numel() <= _LARGEST


def _array(tensor: Tensor) -> Array:
    """Return a view of a tensor as an array, whose operations on few numbers take a tenth of the
    time.
    """
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _kinds(
    array: Array, dim: int, sizes: Sequence[int], left_out: Collection[int]
) -> Iterator[str]:
    # bfloat16, of which only equality is asked
    if array.dtype.kind == "f" or array.dtype == numpy.int16:
        if bool((array != array.flat[0]).any()):
            yield "weights"
    elif array.dtype.kind == "b":
        if not _is_even(array, dim, sizes):
            yield "true"
    else:
        labels = ((str(label), array == label) for label in left_out if label > 0)
        for kind, found in (("negative", array < 0), ("zero", array == 0), *labels):
            if not _is_even(found, dim, sizes):
                yield kind


def _is_even(found: Array, dim: int, sizes: Sequence[int]) -> bool:
    total = numpy.count_nonzero(found)
    if not total:
        return True
    parts = numpy.split(found, numpy.cumsum(sizes)[:-1], dim)
    return all(
        numpy.count_nonzero(part) * sum(sizes) == total * size
        for part, size in zip(parts, sizes, strict=True)
    )


class LabelWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the labels that torch's losses count, by the weights of their classes, while a model
    computes means.

    Losses of a model that is not trained yet are nearly equal for all labels, so that their values
    do not show it.

    Attributes:
        counted: for each mean, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # 1 is "mean"
        if func in _LOSSES and len(args) > _REDUCTION and args[_REDUCTION] == 1:
            self.counted.append(float(made[1]))
        return made


_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_REDUCTION = 3
"""The place of ``reduction`` among the arguments of these operations."""


def unlike_counts(
    whole: Sequence[float], parts: Sequence[Sequence[float]], shares: Sequence[float]
) -> list[float] | None:
    """Return how many labels each micro-batch counts in a mean, where that is not its share; else
    None.

    Args:
        whole: labels that count in the batch, for each mean.
        parts: the same for each micro-batch.
        shares: how much each micro-batch counts; any unit.
    """
    if any(len(part) != len(whole) for part in parts):
        return None
    for total, counts in zip(whole, zip(*parts, strict=True), strict=True):
        for count, share in zip(counts, shares, strict=True):
            if abs(count * sum(shares) - total * share) > _ROUNDING * max(total * sum(shares), 1.0):
                return list(counts)
    return None


_ROUNDING = 1e-5
"""Of sums of class weights in float32."""
