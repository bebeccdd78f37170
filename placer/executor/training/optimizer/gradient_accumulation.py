"""Accumulation of gradients over micro-batches, many parameters per kernel.

Autograd adds gradients parameter by parameter. A network of a hundred layers has hundreds of
parameters, most of them so small that launching a kernel takes longer than running it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from placer.executor.engine.weak_methods import weakly

# Maximum bytes of gradients that wait to be added: the additional memory compared with autograd.
_MOST_BYTES = 8 * 2**20


class Accumulation:
    """A context in which backward passes collect gradients instead of accumulating them.

    Args:
        weights: autograd leaves; only those with an existing gradient are included.

    Attributes:
        is_open: whether a backward pass runs inside it.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {id(weight): weight for weight in weights if weight.grad is not None}
        self._sums = {key: weight.grad for key, weight in self._weights.items()}
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0
        self.is_open = False
        # weakly: the weights outlive this object
        hooks = [
            weight.register_post_accumulate_grad_hook(weakly(self._take))  # type: ignore[no-untyped-call]
            for weight in self._weights.values()
        ]
        # every backward pass would call the hooks of all earlier objects
        finalize(self, _remove, hooks).atexit = False

    def __enter__(self) -> None:
        # without an existing gradient, autograd hands over the new one instead of adding it
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
        """Return the accumulated gradient of a weight; None if it has none."""
        return self._sums.get(id(weight), weight.grad)

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add a gradient to a sum, immediately or together with others.

        Args:
            total: the accumulated gradient.
            gradient: of the same shape.
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
        """Discard all waiting gradients."""
        self._waiting.clear()
        self._bytes = 0

    @torch.no_grad()
    def flush(self) -> None:
        """Add all waiting gradients."""
        # one foreach kernel handles tensors of one dtype
        kinds: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for total, gradient in self._waiting:
            kinds.setdefault(total.dtype, []).append((total, gradient))
        for pairs in kinds.values():
            totals, gradients = map(list, zip(*pairs, strict=True))
            torch._foreach_add_(totals, gradients)
        self.drop()


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
