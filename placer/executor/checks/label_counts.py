"""Detection of batches whose loss may be another kind of mean than an earlier batch's.

A mean over labels, some of which are ignored, equals the mean over micro-batches as long as each
has equally many counted labels. If this holds for a first batch, it need not hold for a later one.
The same applies to a weighted mean while all weights are equal, and to a mean over the first
entries of each sample while all lengths are equal. Such a later batch is therefore compared again.

Many kinds of entries may decide what counts: see ``_kinds``. Most of them are unequal in the first
batch already, whose comparison covers them.

The host reads labels in its own memory in every step. Labels on an accelerator are copied without
waiting, and read when a later batch comes:

    batch 0   compared: its labels are read at once, because a comparison waits in any case
    batch 1   labels are copied ─────┐
    batch 2   labels are copied      └▶ read: unequal for the first time, so batch 2 is read at
                                        once and compared if it is unequal, too; else batch 3; ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from itertools import accumulate
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
# Elements of the largest tensor of floats that is copied from an accelerator in every step, unless
# its weights were equal so far. Larger ones are usually images.
_LARGEST_FLOATS = 1 << 16

# Dtypes of labels, of masks, and of weights.
_READ = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)

Array = numpy.ndarray[Any, numpy.dtype[Any]]

Uneven = frozenset[tuple[int | str, str]]
"""Positions of tensors, or names of parts of lists, and the kind of entry of which micro-batches
have unequal shares."""


def uneven(
    tensors: Sequence[Any],
    layout: BatchLayout,
    sizes: Sequence[int],
    left_out: Collection[int] = (),
    waits: bool = False,
    known: Uneven = frozenset(),
    has_floats: bool = True,
) -> Uneven:
    """Return the quantities of which micro-batches have unequal shares.

    Args:
        tensors: flattened inputs or target, in the order of ``layout.dims``.
        layout: the batch dimensions.
        sizes: samples in each micro-batch.
        left_out: further label values that do not count.
        waits: whether to read tensors on other devices, too, which synchronises with them.
        known: quantities to leave out.
        has_floats: whether to read tensors of floats.
    """
    if len(sizes) < 2:
        return frozenset()
    found: set[tuple[int | str, str]] = set()

    def note(where: int | str, parts: Sequence[Array]) -> None:
        before = {kind for place, kind in known if place == where}
        found.update((where, kind) for kind in _kinds(parts, sizes, left_out, before))

    with torch._C.DisableTorchFunction():  # hide these reads from function modes
        for place, (tensor, dim) in enumerate(zip(tensors, layout.dims, strict=False)):
            if dim is not None and _is_read(tensor, has_floats):
                note(place, _cut(tensor, dim, sizes, waits))
        for where, parts in _listed(tensors, layout, sizes).items():
            if not _is_even([sum(map(Tensor.numel, part)) for part in parts], sizes):
                found.add((where, "entry"))
            if all(_is_read(tensor, has_floats) for part in parts for tensor in part):
                note(where, _arrays(parts, waits))
    return frozenset(found) - known


def _cut(tensor: Tensor, dim: int, sizes: Sequence[int], waits: bool) -> list[Array]:
    """Return the entries of each micro-batch; see ``_arrays``."""
    if not waits and not _is_on_host(tensor):
        return []
    array = _array(devices.move(tensor, devices.HOST))
    before = (slice(None),) * (dim % array.ndim)
    ends = list(accumulate(sizes))
    return [array[*before, end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _listed(
    tensors: Sequence[Any], layout: BatchLayout, sizes: Sequence[int]
) -> dict[str, list[list[Tensor]]]:
    """Return the tensors of each micro-batch in lists of samples, by name.

    Of ``[{"boxes": b0}, {"boxes": b1}, ...]`` with two samples each, these are
    ``{".*.boxes": [[b0, b1], [b2, b3]]}``.
    """
    found: dict[str, list[list[Tensor]]] = {}
    if not layout.lists:
        return found
    ends = list(accumulate(sizes))
    for tensor, dim, name in zip(tensors, layout.dims, layout.names, strict=False):
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        item = _item_of(name, layout.lists) if dim is None and is_dense else None
        if item is not None:
            index, where = item
            columns = found.setdefault(where, [[] for _ in sizes])
            if index < ends[-1]:
                columns[bisect_right(ends, index)].append(tensor)
    return found


def _item_of(name: str, lists: Collection[str]) -> tuple[int, str] | None:
    """Return the sample that a tensor in a list belongs to, and its name in all samples."""
    for one in lists:
        start = f"{one}." if one else ""
        index, dot, rest = name.removeprefix(start).partition(".")
        if name.startswith(start) and index.isdecimal():
            return int(index), f"{one}.*{dot}{rest}"
    return None


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
        has_floats: bool = True,
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
            has_floats: whether to read tensors of floats.
        """
        self._receive(left_out)
        if not self._found.get(key, frozenset()) <= known:
            return True
        if len(sizes) < 2 or layout.lists or len(self._sent) >= _MOST_SENT:
            return False
        weights = {place for place, kind in known if kind == "weights"}
        wanted = [
            dim is not None
            and _is_read(tensor, has_floats)
            and (place not in weights or tensor.numel() <= _LARGEST_FLOATS)
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


def _is_read(tensor: Any, has_floats: bool = True) -> bool:
    """Return whether a tensor may hold labels, flags or weights."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_complex():
        return False
    is_wanted = has_floats or not tensor.is_floating_point()
    return is_wanted and tensor.dtype in _READ and tensor.numel() <= _LARGEST


def _is_on_host(tensor: Tensor) -> bool:
    return devices.same(devices.location(tensor), devices.HOST)


def _arrays(parts: Sequence[Sequence[Tensor]], waits: bool) -> list[Array]:
    """Return the entries of each micro-batch in NumPy, which is ten times faster for few of them.

    Args:
        parts: the tensors of each micro-batch.
        waits: whether to copy tensors that are on other devices; otherwise nothing is returned if
            one is there.
    """
    if not waits and not all(_is_on_host(tensor) for part in parts for tensor in part):
        return []
    found = [[_array(devices.move(tensor, devices.HOST)) for tensor in part] for part in parts]
    nothing = numpy.empty(0, next(array.dtype for part in found for array in part))
    return [
        part[0] if len(part) == 1 else numpy.concatenate([nothing, *map(numpy.ravel, part)])
        for part in found
    ]


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _kinds(
    parts: Sequence[Array], sizes: Sequence[int], left_out: Collection[int], known: Collection[str]
) -> Iterator[str]:
    """Yield the kinds of entries of which micro-batches have unequal shares.

    Args:
        parts: the entries of each micro-batch.
        sizes: samples in each micro-batch.
        left_out: further label values that do not count.
        known: kinds to leave out.
    """
    filled = [part for part in parts if part.size]
    if not filled:
        return
    tests: dict[str, Callable[[Array], Array]] = {}
    if filled[0].dtype.kind == "b":
        tests["true"] = numpy.asarray
    else:
        tests |= {"negative": partial(numpy.greater, 0), "zero": partial(numpy.equal, 0)}
    if filled[0].dtype.kind == "f":
        first = filled[0].flat[0]
        if "weights" not in known and any(bool((part != first).any()) for part in filled):
            yield "weights"
        tests["NaN"] = numpy.isnan
        # a number that stands for a missing one comes again, unlike the extremes of measurements
        for kind, extreme in (("lowest", numpy.fmin), ("highest", numpy.fmax)):
            if kind not in known:
                value = extreme.reduce([extreme.reduce(part, None) for part in filled])
                tests[kind] = partial(numpy.equal, value)
    elif filled[0].dtype.kind in "iu":
        # of lengths, for example
        if "sum" not in known and not _is_even([int(part.sum()) for part in parts], sizes):
            yield "sum"
        # a number that stands for a missing one is often far above the others, such as 255
        top = 1 << max(max(int(part.max()), 1).bit_length() - 1 for part in filled)
        tests[f"at least {top}"] = partial(numpy.less_equal, top)
        for label in left_out:
            tests[str(label)] = partial(numpy.equal, label)
    for kind, test in tests.items():
        counts = [] if kind in known else [int(numpy.count_nonzero(test(part))) for part in parts]
        if not _is_even(counts, sizes) and (sum(counts) > 1 or kind not in ("lowest", "highest")):
            yield kind


def _is_even(counts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether micro-batches have counts in proportion to their samples."""
    total, samples = sum(counts), sum(sizes)
    return all(one * samples == total * size for one, size in zip(counts, sizes, strict=False))


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
