"""Buffers that ``forward`` writes, and what they carry from one micro-batch to the next.

    whole batch:    state ──▶ samples 0..3 ──▶ state A
    micro-batches:  state ──▶ samples 0..1 ──▶ state B ──▶ samples 2..3 ──▶ state C

A spectral normalisation updates its vectors twice in the second line. If the second micro-batch
reads state B, it gives other results than the whole batch, perhaps by less than the tolerance at
first. If nothing reads the state, the results are right and only the buffer differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.pytrees import flatten
from placer.errors import BatchError
from placer.executor.checks.tolerances import COARSEST, TOLERANCES, shown
from placer.utils.dtypes import is_differentiable
from placer.utils.user_warnings import warn

# Rounding errors of a buffer's largest values that count as equal.
_ROUNDINGS = 10
# Relative change of a buffer whose readers are looked for: an iteration that has converged on the
# values of the moment hides them.
_CHANGE = 0.01
# Maximum number of buffers in a message.
_SHOWN = 3
_ACCEPT = "BatchOptions(verify=False) accepts that"


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module, with its tensor and values before a batch."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor
    version: int
    before: tuple[Tensor, ...]

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The plain tensors that it consists of now."""
        tensor = self.module._buffers.get(self.key)
        return () if tensor is None else devices.own_parts(tensor)

    @property
    def is_written(self) -> bool:
        """Whether something wrote to it or replaced it."""
        tensor = self.module._buffers.get(self.key)
        return tensor is not self.tensor or devices.write_count(tensor) != self.version

    def put(self, values: tuple[Tensor, ...]) -> None:
        """Set its values, in its own tensor."""
        self.module._buffers[self.key] = self.tensor
        for part, value in zip(devices.own_parts(self.tensor), values, strict=True):
            part.copy_(value)


class CarriedState:
    """The buffers of a model, except running statistics of torch's normalisation layers.

    Those follow micro-batches in every pipeline.

    Args:
        model: the model, in the state before a batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [
            _Buffer(
                f"{path}.{key}" if path else key,
                module,
                key,
                buffer,
                devices.write_count(buffer),
                _copies(devices.own_parts(buffer)),
            )
            for path, module in model.named_modules()
            if not isinstance(module, nn.modules.batchnorm._NormBase)
            for key, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._by_batch: list[tuple[_Buffer, tuple[Tensor, ...]]] = []

    def note_batch(self) -> None:
        """Record what a run of the whole batch has written."""
        self._by_batch = [
            (buffer, _copies(buffer.values)) for buffer in self._buffers if buffer.is_written
        ]

    def check(self, result: Any, run: Callable[[], Any]) -> None:
        """Raise a BatchError if micro-batches depend on buffers that earlier ones wrote.

        Buffers that only differ afterwards cause a warning.

        Args:
            result: of the last micro-batch, after the others.
            run: runs the last micro-batch.
        """
        if not self._by_batch:
            return
        differences = [
            f"buffer {buffer.name!r}: {shown(one, other)}"
            for buffer, after in self._by_batch
            for before, one, other in zip(buffer.before, after, buffer.values, strict=False)
            if not _is_same_change(before, one, other)
        ]
        if self._is_read(result, run):
            self._refuse(differences)
        if differences:
            warn(
                "every micro-batch updates a buffer, and the whole batch leaves another value "
                f"({'; '.join(differences[:_SHOWN])}); chunks=1 avoids that, {_ACCEPT}"
            )

    def _is_read(self, result: Any, run: Callable[[], Any]) -> bool:
        """Return whether a micro-batch gives another result after others than at first."""

        def run_first(change: float) -> Any:
            self._reset(change)
            return run()

        fresh = run_first(0)
        if not _are_identical(fresh, run_first(0)):
            return False  # a nondeterministic operation differs from run to run
        return not (_are_identical(fresh, result) and _are_identical(run_first(_CHANGE), run()))

    @torch.no_grad()
    def _reset(self, change: float) -> None:
        """Write the values before the batch back into the buffers.

        Args:
            change: relative change of single values.
        """
        for buffer, _ in self._by_batch:
            buffer.put(tuple(_changed(value, change) for value in buffer.before))

    def _refuse(self, differences: list[str]) -> NoReturn:
        found = differences or [f"buffer {buffer.name!r}" for buffer, _ in self._by_batch]
        raise CarriedStateError(
            "`forward` writes to a buffer and reads it again, so the result of a micro-batch "
            f"depends on the micro-batches before it ({'; '.join(found[:_SHOWN])}). Give "
            f"chunks=1; {_ACCEPT}"
        )


class CarriedStateError(BatchError):
    """A micro-batch depends on buffers to which earlier micro-batches wrote.

    No declaration of the layout helps.
    """


def _copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone() for tensor in tensors)


def _changed(value: Tensor, change: float) -> Tensor:
    """Return a float tensor with other numbers, each by another share; any other tensor as is."""
    if not change or not value.is_floating_point():
        return value
    waves = torch.arange(value.numel(), dtype=value.dtype, device=value.device).cos()
    return value * (1 + change * waves.view(value.shape))


def _is_same_change(before: Tensor, one: Tensor, other: Tensor) -> bool:
    """Return whether two values have changed in the same way, up to rounding.

    Changes are compared: a change of 1 matters to a counter at 1,000,000.
    """
    if one.shape != other.shape or not is_differentiable(one):
        return one.equal(other)
    change = one - before if one.shape == before.shape else one
    rounding = _ROUNDINGS * torch.finfo(one.dtype).eps * float(one.norm())
    tolerance = TOLERANCES.get(one.dtype, COARSEST) * float(change.norm())
    return float((one - other).norm()) <= max(rounding, tolerance)


def _are_identical(one: Any, other: Any) -> bool:
    """Return whether the tensors of two results are equal bit by bit; NaN equals NaN."""
    leaves, others = flatten(one)[0], flatten(other)[0]
    return len(leaves) == len(others) and all(
        _plain(mine).equal(_plain(its))
        for mine, its in zip(leaves, others, strict=True)
        if isinstance(mine, Tensor) and isinstance(its, Tensor)
    )


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor
