"""Running statistics of batch normalisation over whole batches, though micro-batches are what is
normalised.

    micro-batch 0 ──▶ mean, variance ──┐
    micro-batch 1 ──▶ mean, variance ──┼──▶ mean, variance of the batch ──▶ running statistics, once
    micro-batch 2 ──▶ mean, variance ──┘

Without it every micro-batch updates the running statistics, which then forget ``chunks`` times as
fast as on the unsplit model, and hold the variances of small samples.

Source: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020,
section 3.3 (deferred batch normalisation); here the running variance is of the whole batch and
unbiased, as torch has it.
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
"""One call of a layer in the graph: its segment, the buffer that it changes, and how many calls
went before."""

_BATCH_NORMS = (torch.ops.aten.batch_norm.default, torch.batch_norm)


class _Sums:
    """What one call of a batch normalisation met in the micro-batches of a batch, by channel, in
    float64.
    """

    def __init__(self, mean: Tensor, variance: Tensor, momentum: float) -> None:
        self.running_mean, self.running_variance, self.momentum = mean, variance, momentum
        self.latest = torch.zeros_like(mean), torch.zeros_like(variance)
        self.sums = torch.zeros_like(mean, dtype=torch.float64)
        self.squares = torch.zeros_like(self.sums)
        self.count = torch.zeros_like(self.sums)

    def add(self, count: int) -> None:
        """Add a micro-batch of so many values a channel, whose mean and unbiased variance are
        ``latest``.
        """
        mean, variance = (each.to(torch.float64) for each in self.latest)
        self.sums.add_(mean, alpha=count)
        self.squares.addcmul_(mean, mean, value=count)
        if count > 1:
            self.squares.add_(variance, alpha=count - 1)
        self.count.add_(count)


class BatchStatistics:
    """Gathers the statistics of a graph's batch normalisations over a batch.

    Args:
        state: the parameters and buffers of the graph by name.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._known = {id(tensor): name for name, tensor in state.items()}
        self._counters: dict[Site, Tensor] = {}
        self._sums: dict[Site, _Sums] = {}

    def gather(self, segment: int) -> TorchFunctionMode:
        """Inside, one pass of a segment adds to the batch's statistics and leaves the running ones
        alone.
        """
        return _Gather(self, segment)

    @torch.no_grad()
    def begin(self) -> None:
        """Forget what was gathered."""
        for sums in self._sums.values():
            torch._foreach_zero_([sums.sums, sums.squares, sums.count])

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics once, by the batch that was gathered."""
        together: dict[tuple[torch.device, float], list[_Sums]] = {}
        for sums in self._sums.values():
            together.setdefault((devices.location(sums.sums), sums.momentum), []).append(sums)
        for (_, momentum), group in together.items():
            _commit(group, momentum)
        for counter in self._counters.values():
            counter.add_(1)

    def counts(self, site: Site, tensor: Tensor) -> bool:
        """Note a counter of batches, if the tensor is one."""
        if not self._known.get(id(tensor), "").endswith("num_batches_tracked"):
            return False
        self._counters[site] = tensor
        return True

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor is a buffer of the model itself, not a copy for a layer that is
        elsewhere.
        """
        return id(tensor) in self._known

    def normalise(self, site: Site, func: Any, args: tuple[Any, ...]) -> Any:
        """Normalise a micro-batch with its own statistics, and add them to the batch's."""
        x, weight, bias, mean, variance, _, momentum, *rest = args
        with torch.no_grad():
            if site not in self._sums:
                self._sums[site] = _Sums(mean, variance, momentum)
            sums = self._sums[site]
        # With a momentum of 1 the operation leaves the micro-batch's own statistics: no further
        # look at x is needed.
        result = func(x, weight, bias, *sums.latest, True, 1.0, *rest)
        with torch.no_grad():
            sums.add(x.numel() // x.shape[1])
        return result


def refuse_uncaptured(module: nn.Module, why: str) -> None:
    """Raise an InputError if a model that runs through hooks has batch normalisations: they cannot
    be gathered there.

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
    """Let the running statistics of one device follow those of the batch."""
    sums, counts = [each.sums for each in group], [each.count for each in group]
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
    """Tells the statistics of every batch normalisation that runs inside."""

    def __init__(self, statistics: BatchStatistics, segment: int) -> None:
        super().__init__()
        self._statistics = statistics
        self._segment = segment
        self._calls: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BATCH_NORMS and not kwargs and self._statistics.knows(args[3]) and args[5]:
            return self._statistics.normalise(self._site(args[3]), func, args)
        if func in ADD_OPERATIONS and self._statistics.counts(self._site(args[0]), args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _site(self, buffer: Tensor) -> Site:
        self._calls[id(buffer)] += 1
        return self._segment, id(buffer), self._calls[id(buffer)]
