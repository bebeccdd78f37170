"""A stage that keeps nothing of a micro-batch but what entered it, and runs forwards once more in
its backward pass.

Random numbers and buffers are in the second pass what they were in the first. A stage that keeps
its activations has no second pass, and its backward pass reads buffers as they were in the first.

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
"""Where a tensor of a module is found: a table and a key."""


def recomputed(
    compute: Callable[[Sequence[Any]], list[Any]],
    inputs: Sequence[Any],
    changed: Sequence[StateTable],
) -> list[Any]:
    """``compute(inputs)``, whose activations are made again when the backward pass needs them.

    Args:
        compute: from what entered to what leaves; it may write to what it is given.
        inputs: what entered.
        changed: the buffers that it changes.
    """
    before = [_copied(table[key]) for table, key in changed]
    passes = 0

    def run(*entered: Any) -> list[Any]:
        nonlocal passes
        passes += 1
        with nullcontext() if passes == 1 else _as_before(changed, before):
            return compute([_copied(value) for value in entered])

    result: list[Any] = checkpoint(run, *inputs, use_reentrant=False)
    return result


@contextmanager
def kept_apart(changed: Sequence[StateTable]) -> Iterator[None]:
    """Let a micro-batch have copies of buffers, and write back what it changes in them.

    Its backward pass may read them, when micro-batches behind it will have changed the buffers
    further.

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
    """Let the buffers be copies of what they were; what is written to those is forgotten."""
    real = [table[key] for table, key in changed]
    for (table, key), kept in zip(changed, before, strict=True):
        table[key] = _copied(kept)
    try:
        yield
    finally:
        for (table, key), buffer in zip(changed, real, strict=True):
            table[key] = buffer


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
