"""Sums of a stage's gradients over its replicas, at the owner of each parameter.

    last backward pass    layer 3 │ layer 2 │ layer 1 │ layer 0
    sums                          │ bucket 0 │ bucket 1 │ bucket 2

The parameters of a bucket have one owner, which receives the sums. The other replicas drop their
gradients. A bucket is summed once all its gradients are complete, while earlier layers still go
backwards. All replicas sum buckets in one order, so that none waits for a bucket that another sums
later.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020; Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020 (stage 1).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placer.capture.layers import tensor_bytes

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients or weights that one call sends; the default of DistributedDataParallel."""


@dataclass
class _Bucket:
    """Parameters of one type and owner, whose gradients are summed by one call.

    Attributes:
        owner: the global rank of the replica that receives the sums.
        parameters: the parameters.
        waiting: identities of the parameters whose gradients are not complete.
        gradients: of each parameter, as real numbers; zeros where this replica has none.
        flat: the gradients in one tensor; a single contiguous gradient itself.
        work: the call.
    """

    owner: int
    parameters: list[Tensor]
    waiting: set[int] = field(default_factory=set)
    gradients: list[Tensor] = field(default_factory=list)
    flat: Tensor | None = None
    work: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to sum the gradients over a group."""
        self.gradients = [_dense_gradient(parameter) for parameter in self.parameters]
        self.flat = _packed(self.gradients)
        self.work = dist.reduce(self.flat, self.owner, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums. The owner writes them to the gradients; others drop theirs."""
        self.work.wait()
        assert self.flat is not None
        if self.owner != dist.get_rank():
            for parameter in self.parameters:
                parameter.grad = None
        elif self.flat.data_ptr() != self.gradients[0].data_ptr():
            sizes = [gradient.numel() for gradient in self.gradients]
            for gradient, part in zip(self.gradients, self.flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                gradient.copy_(part.view(gradient.shape))
        self.gradients, self.flat, self.work = [], None, None


class GradientSums:
    """The sums of a stage's gradients in one step after another.

    Args:
        parameters: that are trained, the same in every replica and in their order.
        owners: for each parameter, the global rank of the replica that owns it.
        late: identities of the parameters whose gradients are complete only after all backward
            passes.
        group: the replicas.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        owners: Sequence[int],
        late: Collection[int],
        group: dist.ProcessGroup,
    ) -> None:
        self._parameters, self._late, self._group = list(parameters), frozenset(late), group
        # the last layers, whose gradients are complete first, come first
        self._buckets = _buckets(self._parameters[::-1], owners[::-1])
        self._bucket_of = {id(item): one for one in self._buckets for item in one.parameters}
        self._unstarted: deque[_Bucket] = deque()
        self._started: deque[_Bucket] = deque()

    def begin(self) -> None:
        """Begin a step, before its first backward pass; no parameter has a gradient."""
        self._unstarted, self._started = deque(self._buckets), deque()
        for bucket in self._buckets:
            bucket.waiting = set(map(id, bucket.parameters))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sum gradients that become complete in this block, a stage's last backward pass."""
        watches = [
            item.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for item in self._parameters
            if id(item) not in self._late and item.requires_grad
        ]
        try:
            yield
        finally:
            for watch in watches:
                watch.remove()

    def _note(self, parameter: Tensor) -> None:
        self._bucket_of[id(parameter)].waiting.discard(id(parameter))
        with torch.no_grad():
            while self._unstarted and not self._unstarted[0].waiting:
                self._start()
            # buckets that have arrived need no memory of their own any more
            while self._started and self._started[0].work.is_completed():
                self._started.popleft().finish()

    def _start(self) -> None:
        bucket = self._unstarted.popleft()
        bucket.start(self._group)
        self._started.append(bucket)

    @torch.no_grad()
    def finish(self) -> None:
        """Sum all other gradients, and wait for all sums.

        A parameter that has a gradient in no replica, or is frozen at its owner, has none
        afterwards.
        """
        if not self._parameters:
            return
        # gradients that a bucket has taken are no longer here, unless this replica is the owner
        waiting = {id(item) for bucket in self._unstarted for item in bucket.parameters}
        flags = [
            float(id(item) not in waiting or item.grad is not None) for item in self._parameters
        ]
        while self._unstarted:
            self._start()
        counts = torch.tensor(flags, device=self._parameters[0].device)
        dist.all_reduce(counts, group=self._group)
        while self._started:
            self._started.popleft().finish()
        # a replica that has all gradients need not wait for the device
        known = flags if all(flags) else counts.tolist()
        for parameter, count in zip(self._parameters, known, strict=True):
            # the user freezes parameters of ``pipeline.parameters()``, at their owner alone
            if not count or not parameter.requires_grad:
                parameter.grad = None


def _dense_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient as real numbers; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    elif gradient.is_sparse:
        # the replicas' indices differ
        gradient = parameter.grad = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _packed(gradients: Sequence[Tensor]) -> Tensor:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return gradients[0].view(-1)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _buckets(parameters: Sequence[Tensor], owners: Sequence[int]) -> list[_Bucket]:
    """Return buckets of about ``BUCKET_BYTES``, in the order in which they are complete."""
    found: list[_Bucket] = []
    groups: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    sizes: Counter[tuple[torch.dtype, int]] = Counter()
    for parameter, owner in zip(parameters, owners, strict=True):
        kind = parameter.dtype, owner
        groups.setdefault(kind, []).append(parameter)
        sizes[kind] += tensor_bytes(parameter)
        if sizes[kind] >= BUCKET_BYTES:
            found.append(_Bucket(owner, groups.pop(kind)))
            del sizes[kind]
    return found + [_Bucket(owner, group) for (_, owner), group in groups.items()]
