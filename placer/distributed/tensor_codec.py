"""Encoding of values between stages as tensors that torch.distributed.pipelining can send.

The library requires every value to be a tensor that receives a gradient, unlike integers, masks and
sizes. Those travel as their bytes, viewed as float32, and a gradient of zeros comes back:

    differentiable     sent unchanged (complex numbers as pairs)
    everything else    bytes ─▶ float32 ─▶ bytes
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer.capture.layers import Value
from placer.errors import InputError

_WORD = 4
_NUMBER_BYTES = 16


@dataclass
class Parcel:
    """A value sent between stages.

    Attributes:
        value: its name, shape and dtype.
        flows: whether a gradient flows back through it.
    """

    value: Value
    flows: bool
    _number: Any = field(default=None, repr=False)

    @classmethod
    def for_value(cls, value: Value, flows: bool) -> Parcel:
        """Return the parcel of a value."""
        return cls(value, flows and value.requires_grad and value.dtype is not None)

    def example(self, requires_grad: bool) -> Tensor:
        """Return a meta tensor like the sent one."""
        shape, dtype = self.value.shape, self.value.dtype
        if not self.flows or dtype is None:
            return torch.empty(
                self._words(), dtype=torch.float32, device="meta", requires_grad=requires_grad
            )
        if dtype.is_complex:
            shape, dtype = (*shape, 2), dtype.to_real()
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

    def pack(self, value: Any, device: torch.device) -> Tensor:
        """Return the tensor to send.

        Raises:
            InputError: if the value has another shape than the stages were built for.
        """
        if not isinstance(value, Tensor):
            return torch.frombuffer(bytearray(_encode(value)), dtype=torch.float32).to(device)
        if tuple(value.shape) != self.value.shape:
            raise InputError(
                f"value {self.value.name!r} has shape {tuple(value.shape)}, and the stages were "
                f"built for {self.value.shape}; give batches whose micro-batches are like the "
                "example, or build for this shape"
            )
        # autocast may produce another dtype
        value = value.to(self.value.dtype)
        if self.flows:
            return (torch.view_as_real(value) if value.is_complex() else value).contiguous()
        return self._to_words(value.detach())

    def unpack(self, crossed: Tensor) -> Any:
        """Return the value from the received tensor."""
        dtype = self.value.dtype
        if dtype is None:
            # Numbers derived from shapes never change, so the host synchronises only once for them.
            if self._number is None or self.value.from_values:
                self._number = _decode(bytes(crossed.detach().cpu().view(torch.uint8).tolist()))
            return self._number
        if self.flows:
            return torch.view_as_complex(crossed) if dtype.is_complex else crossed
        # cut off the padding to whole words
        size = math.prod(self.value.shape) * dtype.itemsize
        return crossed.detach().view(torch.uint8)[:size].view(dtype).view(self.value.shape)

    def _words(self) -> int:
        """Return the number of four-byte words, at least 1: empty tensors cannot be sent."""
        dtype = self.value.dtype
        size = _NUMBER_BYTES if dtype is None else math.prod(self.value.shape) * dtype.itemsize
        return max(1, -(-size // _WORD))

    def _to_words(self, value: Tensor) -> Tensor:
        raw = as_bytes(value)
        padding = self._words() * _WORD - raw.numel()
        if padding:
            raw = torch.cat([raw, raw.new_zeros(padding)])
        # copy if nothing was allocated so far: the value may be a buffer of the model
        return (raw.clone() if raw.data_ptr() == value.data_ptr() else raw).view(torch.float32)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, as a view if it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    # a single element counts as contiguous whatever its stride, for example after ``expand``
    return (
        flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    ).view(torch.uint8)


def _encode(number: Any) -> bytes:
    kind = ("i", "f", "b").index(type(number).__name__[0])
    return struct.pack("<qd" if kind == 1 else "<qq", kind, number)


def _decode(raw: bytes) -> Any:
    kind = struct.unpack("<q", raw[:8])[0]
    number = struct.unpack("<d" if kind == 1 else "<q", raw[8:])[0]
    return bool(number) if kind == 2 else number
