"""Detection of batches whose loss may be another kind of mean than an earlier batch's.

A mean over labels, some of which are ignored, equals the mean over micro-batches as long as each
has equally many counted labels. If this holds for a first batch, it need not hold for a later one.
The same applies to a weighted mean while all weights are equal. Such a later batch is therefore
compared again.

The host reads labels in its own memory in every step. Labels on an accelerator are copied without
waiting, and read when a later batch comes:

    batch 0   compared: its labels are read at once, because a comparison waits in any case
    batch 1   labels are copied ─────┐
    batch 2   labels are copied      └▶ read: unequal for the first time, so batch 2 is read at
                                        once and compared if it is unequal, too; else batch 3; ...
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from placer import devices
from placer.capture.batch_dims.batch_layout import BatchLayout
from placer.utils.bounded_dict import BoundedDict

# Elements of the largest tensor that is read in every step: about 1 ms.
_LARGEST = 1 << 20

# Dtypes of labels, of masks, and of weights.
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

Array = numpy.ndarray[Any, numpy.dtype[Any]]

Uneven = frozenset[tuple[int, str]]
"""Positions of tensors, and the kind of entry of which micro-batches have unequal shares."""


def uneven(
    tensors: Sequence[Any],
    layout: BatchLayout,
    sizes: Sequence[int],
    left_out: Collection[int] = (),
    waits: bool = False,
) -> Uneven:
    """Return the quantities of which micro-batches have unequal shares.

    These are counts of negative labels, of zeros, of true flags, and unequal weights.

    Args:
        tensors: flattened inputs or target, in the order of ``layout.dims``.
        layout: the batch dimensions.
        sizes: samples in each micro-batch.
        left_out: further label values that do not count.
        waits: whether to read tensors on other devices, too, which synchronises with them.
    """
    if len(sizes) < 2 or layout.lists:
        return frozenset()
    if waits:
        tensors = [devices.move(one, devices.HOST) if _is_read(one) else one for one in tensors]
    with torch._C.DisableTorchFunction():  # hide these reads from function modes
        return frozenset(
            (place, kind)
            for place, (tensor, dim) in enumerate(zip(tensors, layout.dims, strict=False))
            if dim is not None and _is_read(tensor) and _is_on_host(tensor)
            for kind in _kinds(_array(tensor), dim, sizes, left_out)
        )


class _Sent(NamedTuple):
    """The labels of a batch on their way to the host.

    Attributes:
        key: the kind of the batch.
        copies: in host memory, in the order of ``layout.dims``; None for tensors that are not read.
        marks: after the copies.
        layout: the batch dimensions.
        sizes: samples in each micro-batch.
    """

    key: Hashable
    copies: list[Tensor | None]
    marks: list[devices.Mark]
    layout: BatchLayout
    sizes: list[int]


class LateCounts:
    """Unequal shares of labels on accelerators, found when a later batch comes."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []
        self._found: BoundedDict[Hashable, Uneven] = BoundedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without pending copies, whose marks cannot be pickled."""
        return {**self.__dict__, "_sent": []}

    def is_due(
        self,
        key: Hashable,
        tensors: Sequence[Any],
        layout: BatchLayout,
        sizes: Sequence[int],
        known: Uneven,
        left_out: Collection[int] = (),
    ) -> bool:
        """Return whether to read a batch at once; otherwise start to copy its labels.

        Args:
            key: the kind of the batch.
            tensors: flattened inputs or target, in the order of ``layout.dims``.
            layout: the batch dimensions.
            sizes: samples in each micro-batch.
            known: the unequal shares of compared batches. If an earlier batch of the kind had
                others, this one is due.
            left_out: further label values that do not count.
        """
        self._receive(left_out)
        if not self._found.get(key, frozenset()) <= known:
            return True
        if len(sizes) < 2 or layout.lists or len(self._sent) >= _MOST_SENT:
            return False
        # weights have no other kind
        weights = {place for place, kind in known if kind == "weights"}
        wanted = [
            dim is not None
            and _is_read(tensor)
            and place not in weights
            and not _is_on_host(tensor)
            for place, (tensor, dim) in enumerate(zip(tensors, layout.dims, strict=False))
        ]
        if any(wanted):
            each = [
                devices.start_reading(tensor) if is_wanted else (None, None)
                for tensor, is_wanted in zip(tensors, wanted, strict=False)
            ]
            copies, marks = [copy for copy, _ in each], [mark for _, mark in each]
            self._sent.append(_Sent(key, copies, marks, layout, list(sizes)))
        return False

    def _receive(self, left_out: Collection[int]) -> None:
        arrived = [one for one in self._sent if all(map(devices.has_passed, one.marks))]
        self._sent = [one for one in self._sent if not any(one is other for other in arrived)]
        for one in arrived:
            before = self._found.get(one.key, frozenset())
            self._found[one.key] = before | uneven(one.copies, one.layout, one.sizes, left_out)


# Maximum number of batches with pending copies; a host that runs further ahead skips batches.
_MOST_SENT = 4


def _is_read(tensor: Any) -> bool:
    """Return whether a tensor may hold labels, flags or weights."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_complex():
        return False
    return tensor.dtype in _READ and 0 < tensor.numel() <= _LARGEST


def _is_on_host(tensor: Tensor) -> bool:
    return devices.same(devices.location(tensor), devices.HOST)


def _array(tensor: Tensor) -> Array:
    """Return a NumPy view of a tensor, which is ten times faster for few elements."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _kinds(
    array: Array, dim: int, sizes: Sequence[int], left_out: Collection[int]
) -> Iterator[str]:
    # bfloat16 viewed as int16: only equality is tested
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
    """A mode that records the total weight of counted labels in torch's losses.

    Losses of an untrained model are nearly equal for all labels, so their values do not show which
    labels count.

    Attributes:
        counted: the total class weight of counted labels for each mean, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # reduction 1 is "mean"
        if func in _LOSSES and len(args) > _REDUCTION and args[_REDUCTION] == 1:
            self.counted.append(float(made[1]))
        return made


_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
# The position of ``reduction`` among the arguments of these operations.
_REDUCTION = 3


def unlike_counts(
    whole: Sequence[float], parts: Sequence[Sequence[float]], shares: Sequence[float]
) -> list[float] | None:
    """Return the counts of a mean that deviate from the micro-batches' shares; else None.

    Args:
        whole: counted labels in the batch, for each mean.
        parts: counted labels in each micro-batch, for each mean.
        shares: the weight of each micro-batch, in any unit.
    """
    if any(len(part) != len(whole) for part in parts):
        return None
    for total, counts in zip(whole, zip(*parts, strict=True), strict=True):
        for count, share in zip(counts, shares, strict=True):
            if abs(count * sum(shares) - total * share) > _ROUNDING * max(total * sum(shares), 1.0):
                return list(counts)
    return None


# Relative rounding of sums of class weights in float32.
_ROUNDING = 1e-5
