"""Packed sequences, whose lengths torch wants in the host's memory, wherever the rest of an
operation is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from placer import devices

_PACKING = ("_pack_padded_sequence", "_pad_packed_sequence")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def lengths_of(name: str, args: Any) -> int | None:
    """Which argument of a function must be on the host; None where there is none.

    Args:
        name: of the function.
        args: its positional arguments. Of a packed sequence, a recurrent layer takes the state
            third; else the weights.
    """
    packed = (
        name in _RECURRENT
        and len(args) > 2
        and isinstance(args[1], Tensor)
        and not isinstance(args[2], list)
    )
    return 1 if packed or name in _PACKING else None


class LengthsOnHost(TorchFunctionMode):
    """Inside, the lengths of packed sequences that are on a device are brought back to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position = lengths_of(getattr(func, "__name__", ""), args)
        if position is not None:
            args = (
                *args[:position],
                devices.move(args[position], devices.HOST),
                *args[position + 1 :],
            )
        return func(*args, **(kwargs or {}))


__all__ = ["LengthsOnHost", "lengths_of"]
