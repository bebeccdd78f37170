"""Packed sequences: torch requires their lengths on the host, wherever their data is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from placer import devices

_PACKING = ("_pack_padded_sequence", "_pad_packed_sequence")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
TAKES_LENGTHS = frozenset((*_PACKING, *_RECURRENT))
"""Names of the functions that may take lengths."""


def lengths_position(name: str, args: Any) -> int | None:
    """Return the position of the argument that must be on the host; None without such an argument.

    Args:
        name: of the function.
        args: its positional arguments. With a packed sequence, a recurrent layer takes the state as
            third argument; otherwise the weights.
    """
    packed = (
        name in _RECURRENT
        and len(args) > 2
        and isinstance(args[1], Tensor)
        and not isinstance(args[2], list)
    )
    return 1 if packed or name in _PACKING else None


class LengthsOnHost(TorchFunctionMode):
    """A mode that moves the lengths of packed sequences to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position = lengths_position(getattr(func, "__name__", ""), args)
        if position is not None:
            args = (
                *args[:position],
                devices.move(args[position], devices.HOST),
                *args[position + 1 :],
            )
        return func(*args, **(kwargs or {}))


__all__ = ["LengthsOnHost", "lengths_position"]
