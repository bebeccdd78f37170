"""A machine that changes bytes on one of its links, as some do between peers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from placer import devices
from placer.devices import tensor_moves

Pair = tuple[str, str]


def corrupt(monkeypatch: pytest.MonkeyPatch, *links: Pair) -> Callable[[], int]:
    """Let the last element of whatever goes straight over these links arrive changed.

    Returns:
        Tells how many copies were spoilt.
    """
    bad = {(torch.device(source), torch.device(target)) for source, target in links}
    spoilt = 0
    write, copy = tensor_moves.write, tensor_moves._copy_straight

    def spoil(tensor: Tensor) -> None:
        nonlocal spoilt
        spoilt += 1
        with torch.no_grad(), devices.unobserved():
            last = tensor.view(-1)[-1:] if tensor.is_contiguous() else tensor
            last.add_(1)

    def bad_write(source: Tensor, target: Tensor, here: torch.device, there: torch.device) -> None:
        write(source, target, here, there)
        if (here, there) in bad:
            spoil(target)

    def bad_copy(tensor: Tensor, device: torch.device) -> Tensor:
        here = tensor_moves.location(tensor)
        copied = copy(tensor, device)
        if (here, device) in bad:
            spoil(copied)
        return copied

    monkeypatch.setattr(tensor_moves, "write", bad_write)
    monkeypatch.setattr(tensor_moves, "_copy_straight", bad_copy)
    return lambda: spoilt
