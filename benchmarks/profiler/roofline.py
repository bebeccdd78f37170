"""Roofline peer: arithmetic or memory traffic bounds the time of an operation.

An operation takes the longer of its arithmetic at the device's best rate and its bytes at the best
bandwidth. PyTorch's ``FlopCounterMode`` gives the counts. The two rates are measured by a large
matrix product and a large copy, so that the estimate is as good as this method can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from placer.refinement.stage_times import device_times

_SIZE = 8192 if torch.cuda.is_available() else 256


def rates(place: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the operations and the bytes that the device does in a millisecond at best."""
    square = torch.randn(_SIZE, _SIZE, device=place).to(dtype)
    target = torch.empty_like(square)
    passes: list[Callable[[], Any]] = [
        lambda: torch.mm(square, square, out=target),
        lambda: target.copy_(square),
    ]
    for run in passes:
        run()
    product_ms, copy_ms = device_times(passes, place, 5)
    return 2 * _SIZE**3 / product_ms, 2 * square.nbytes / copy_ms


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The summed time of every operation that runs inside, in milliseconds."""

    def __init__(self, flops_per_ms: float, bytes_per_ms: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops_per_ms, self._bytes_per_ms = flops_per_ms, bytes_per_ms
        self.total_ms = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [item for item in tree_leaves((args, kwargs, result)) if isinstance(item, Tensor)]
        if not func.is_view and tensors:
            counter = flop_registry.get(func._overloadpacket)
            flops = flops_of(counter, args, kwargs, result) if counter is not None else 0
            moved = sum(
                tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values()
            )
            self.total_ms += max(flops / self._flops_per_ms, moved / self._bytes_per_ms)
        return result


def flops_of(counter: Callable[..., int], args: Any, kwargs: Any, result: Any) -> int:
    """Return PyTorch's count of an operation.

    In some versions its counters of attention reject queries with more heads than keys and values.
    Then keys and values are counted as if each query head had its own.
    """
    try:
        return counter(*args, **kwargs, out_val=result)
    except AssertionError:
        heads = max(item.shape[1] for item in args if isinstance(item, Tensor) and item.dim() == 4)
        return counter(*(_repeated(item, heads) for item in args), **kwargs, out_val=result)


def _repeated(item: Any, heads: int) -> Any:
    if not isinstance(item, Tensor) or item.dim() != 4:
        return item
    return torch.empty(item.shape[0], heads, *item.shape[2:], device="meta")


def estimate_ms(run: Callable[[], Any], place: torch.device, dtype: torch.dtype) -> float:
    """Return the roofline time of everything that runs inside."""
    with Roofline(*rates(place, dtype)) as roofline:
        run()
    total_ms: float = roofline.total_ms
    return total_ms


__all__ = ["estimate_ms"]
