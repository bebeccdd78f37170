"""The gradients of a pass, added to those of the micro-batches before: many in one kernel.

Autograd adds them parameter by parameter. A network of a hundred layers has hundreds of parameters,
most of them so small that a kernel takes longer to start than to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor

from placer.executor.engine.weak_methods import weakly

# Of gradients that wait to be added: what a pass takes beside what autograd would.
_MOST_BYTES = 8 * 2**20


class Accumulation:
    """Adds to the gradients of some weights; inside it, backward passes do not.

    Args:
        weights: leaves of autograd; those with a gradient in place are meant, others are left
            alone.

    Attributes:
        is_open: whether a backward pass runs inside it.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {id(weight): weight for weight in weights if weight.grad is not None}
        self._sums = {key: weight.grad for key, weight in self._weights.items()}
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0
        self.is_open = False
        for weight in self._weights.values():
            weight.register_post_accumulate_grad_hook(weakly(self._take))  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        # Without a gradient to add to, autograd hands over the one that it made.
        for weight in self._weights.values():
            weight.grad = None
        self.is_open = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.is_open = False
        for key, weight in self._weights.items():
            weight.grad = self._sums[key]
        if error is None:
            self.flush()
        else:
            self.drop()

    def _take(self, weight: Tensor) -> None:
        total = self._sums[id(weight)]
        if self.is_open and weight.grad is not None and total is not None:
            gradient, weight.grad = weight.grad, None
            self.add(total, gradient)

    def total(self, weight: Tensor) -> Tensor | None:
        """The gradient in place of a weight; None if it has none."""
        return self._sums.get(id(weight), weight.grad)

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add a gradient to a sum, now or with others.

        Args:
            total: the gradient in place.
            gradient: of its shape.
        """
        if (
            gradient.layout != total.layout
            or gradient.stride() != total.stride()
            or gradient.dtype != total.dtype
        ):
            with torch.no_grad():
                total.add_(gradient)
            return
        self._waiting.append((total, gradient))
        self._bytes += gradient.nbytes
        if self._bytes > _MOST_BYTES:
            self.flush()

    def drop(self) -> None:
        """Forget all that waits."""
        self._waiting.clear()
        self._bytes = 0

    @torch.no_grad()
    def flush(self) -> None:
        """Add all that waits."""
        kinds: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for total, gradient in self._waiting:
            kinds.setdefault(total.dtype, []).append((total, gradient))
        for pairs in kinds.values():
            totals, gradients = map(list, zip(*pairs, strict=True))
            torch._foreach_add_(totals, gradients)
        self.drop()
