"""Activation recomputation of a stage: it saves only its inputs and runs forward again.

    forward:   run, discard activations
    backward:  restore RNG state and buffers ─▶ run again ─▶ gradients

Random numbers and buffers have the same values in both runs. A stage that saves its activations has
no second run; its backward pass reads the buffers' values of the forward pass.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

StateTable = tuple[dict[str, Tensor | None], str]
"""The location of a module's tensor: a table and a key."""


def recomputed(
    compute: Callable[[Sequence[Any]], list[Any]],
    inputs: Sequence[Any],
    changed: Sequence[StateTable],
) -> list[Any]:
    """Return ``compute(inputs)``, whose activations are recomputed in the backward pass.

    Args:
        compute: the stage, from inputs to outputs; it may write to its inputs.
        inputs: the received values.
        changed: the buffers that it changes.
    """
    before = [cloned(table[key]) for table, key in changed]
    passes = 0

    def run(*entered: Any) -> list[Any]:
        nonlocal passes
        passes += 1
        # the second run must see the buffers of the first, and must not update them again
        with nullcontext() if passes == 1 else _as_before(changed, before):
            return compute([cloned(value) for value in entered])

    # torch's checkpoint also restores the random number generators
    result: list[Any] = checkpoint(run, *inputs, use_reentrant=False)
    return result


@contextmanager
def kept_apart(changed: Sequence[StateTable]) -> Iterator[None]:
    """Give a micro-batch copies of buffers, and write its changes back.

    Its backward pass may read them after later micro-batches have changed the buffers.

    Args:
        changed: the buffers that it changes.
    """
    real = [table[key] for table, key in changed]
    with _as_before(changed, real):
        yield
        copies = [table[key] for table, key in changed]
    with torch.no_grad():
        for buffer, copy in zip(real, copies, strict=True):
            if buffer is not None and copy is not None:
                buffer.copy_(copy)


@contextmanager
def _as_before(changed: Sequence[StateTable], before: Sequence[Any]) -> Iterator[None]:
    """Replace the buffers by copies of earlier values; changes of the copies are discarded."""
    real = [table[key] for table, key in changed]
    for (table, key), kept in zip(changed, before, strict=True):
        table[key] = cloned(kept)
    try:
        yield
    finally:
        for (table, key), buffer in zip(changed, real, strict=True):
            table[key] = buffer


def cloned(value: Any) -> Any:
    """Return a copy of a tensor; any other value itself."""
    return value.clone() if isinstance(value, Tensor) else value
