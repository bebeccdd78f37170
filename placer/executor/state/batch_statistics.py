"""Deferred batch normalisation: running statistics of whole batches, split into micro-batches.

    micro-batch 0 ──▶ mean, variance ──┐
    micro-batch 1 ──▶ mean, variance ──┼──▶ mean, variance of the batch ──▶ running statistics, once
    micro-batch 2 ──▶ mean, variance ──┘

Otherwise every micro-batch updates the running statistics, which then decay ``chunks`` times as
fast as in the unsplit model, and hold variances of small samples.

Source: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020,
section 3.3 (deferred batch normalisation); here the running variance is unbiased over the whole
batch, as in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placer import devices
from placer.capture.batch_counters import ADD_OPERATIONS
from placer.errors import InputError

Site = tuple[int, int, int]
"""A call of a layer: its segment, the buffer that it changes, and the number of earlier calls."""

_BATCH_NORMS = (torch.ops.aten.batch_norm.default, torch.batch_norm)


class _Sums:
    """Sums over a batch's micro-batches for one batch normalisation, by channel, in float64."""

    def __init__(self, mean: Tensor, variance: Tensor, momentum: float) -> None:
        self.running_mean, self.running_variance, self.momentum = mean, variance, momentum
        self.latest = torch.zeros_like(mean), torch.zeros_like(variance)
        self.sums = torch.zeros_like(mean, dtype=torch.float64)
        self.squares = torch.zeros_like(self.sums)
        self.count = torch.zeros_like(self.sums)

    def add(self, count: int) -> None:
        """Add a micro-batch of ``count`` values per channel; its statistics are in ``latest``."""
        mean, variance = (each.to(torch.float64) for each in self.latest)
        self.sums.add_(mean, alpha=count)
        self.squares.addcmul_(mean, mean, value=count)
        # the unbiased variance times (count - 1) is the sum of squared deviations
        if count > 1:
            self.squares.add_(variance, alpha=count - 1)
        self.count.add_(count)


class BatchStatistics:
    """The statistics of a graph's batch normalisations over a batch.

    Args:
        state: the parameters and buffers of the graph by name.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._known = {id(tensor): name for name, tensor in state.items()}
        self._counters: dict[Site, Tensor] = {}
        self._sums: dict[Site, _Sums] = {}

    def gather(self, segment: int) -> TorchFunctionMode:
        """Return a mode in which a segment adds to the batch's statistics, not the running ones."""
        return _Gather(self, segment)

    @torch.no_grad()
    def begin(self) -> None:
        """Reset the gathered statistics."""
        for sums in self._sums.values():
            torch._foreach_zero_([sums.sums, sums.squares, sums.count])

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics once, from the gathered batch."""
        # one set of foreach kernels per device and momentum, instead of several per layer
        together: dict[tuple[torch.device, float], list[_Sums]] = {}
        for sums in self._sums.values():
            together.setdefault((devices.location(sums.sums), sums.momentum), []).append(sums)
        for (_, momentum), group in together.items():
            _commit(group, momentum)
        for counter in self._counters.values():
            counter.add_(1)

    def counts(self, site: Site, tensor: Tensor) -> bool:
        """Record a tensor if it is a batch counter, and return whether it is."""
        if not self._known.get(id(tensor), "").endswith("num_batches_tracked"):
            return False
        self._counters[site] = tensor
        return True

    def is_own_buffer(self, tensor: Tensor) -> bool:
        """Return whether the tensor is the model's own buffer, not a copy for another device."""
        return id(tensor) in self._known

    def normalise(self, site: Site, func: Any, args: tuple[Any, ...]) -> Any:
        """Normalise a micro-batch with its own statistics, and add them to the batch's.

        Args:
            site: the call of the layer.
            func: torch's batch normalisation.
            args: its positional arguments.
        """
        x, weight, bias, mean, variance, _, momentum, *rest = args
        with torch.no_grad():
            if site not in self._sums:
                self._sums[site] = _Sums(mean, variance, momentum)
            sums = self._sums[site]
        # With momentum 1, the operation stores the micro-batch's own statistics in the running
        # ones, so x need not be read again.
        result = func(x, weight, bias, *sums.latest, True, 1.0, *rest)
        with torch.no_grad():
            sums.add(x.numel() // x.shape[1])
        return result


def refuse_uncaptured(module: nn.Module, why: str) -> None:
    """Raise an InputError if a model on hooks has batch normalisations.

    Their statistics cannot be gathered there.

    Args:
        module: the model.
        why: why it was not captured.
    """
    if any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules()):
        raise InputError(
            f"deferred_batch_norm needs a model that can be captured, and this one cannot: {why}; "
            "make the flow without deferred_batch_norm, or call it with chunks=1"
        )


def _commit(group: Sequence[_Sums], momentum: float) -> None:
    """Update the running statistics on one device from those gathered over the batch."""
    sums, counts = [each.sums for each in group], [each.count for each in group]
    # As BatchNorm, keep the unbiased variance, here of the whole batch: (sum of squares - sum *
    # mean) / (count - 1).
    means = torch._foreach_div(sums, counts)
    variances = torch._foreach_sub(
        [each.squares for each in group], torch._foreach_mul(sums, means)
    )
    torch._foreach_div_(variances, torch._foreach_sub(counts, 1))
    latest = [each.latest for each in group]
    torch._foreach_copy_([mean for mean, _ in latest], means)
    torch._foreach_copy_([variance for _, variance in latest], variances)
    torch._foreach_lerp_(
        [each.running_mean for each in group], [mean for mean, _ in latest], momentum
    )
    torch._foreach_lerp_(
        [each.running_variance for each in group], [each for _, each in latest], momentum
    )


class _Gather(TorchFunctionMode):
    """A mode that reports the statistics of every batch normalisation inside."""

    def __init__(self, statistics: BatchStatistics, segment: int) -> None:
        super().__init__()
        self._statistics = statistics
        self._segment = segment
        self._calls: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in _BATCH_NORMS
            and not kwargs
            and self._statistics.is_own_buffer(args[3])
            and args[5]
        ):
            return self._statistics.normalise(self._site(args[3]), func, args)
        if func in ADD_OPERATIONS and self._statistics.counts(self._site(args[0]), args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _site(self, buffer: Tensor) -> Site:
        self._calls[id(buffer)] += 1
        return self._segment, id(buffer), self._calls[id(buffer)]
