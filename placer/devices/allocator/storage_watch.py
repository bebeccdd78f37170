"""The storages that tensors are made in: written down as they come and go, and rounded up as
torch's allocator does.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer import devices
from placer.capture.export.nested_ops import run_under_mode


def key_of(tensor: Tensor) -> int:
    """The same for two tensors that share a storage; unique among the storages that live at one
    time.

    Of a sparse tensor it is that of its values.
    """
    return int(devices.parts(tensor)[-1].untyped_storage()._cdata)


@dataclass(frozen=True)
class _Made:
    """A storage that lives: the reference tells when it ends."""

    serial: int
    size: int
    reference: weakref.ref[Any]


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down when storages are made on a device, and when they are freed.

    Args:
        device: where.
        state: tensors that were there before, and stay.
        reads: the same.

    Attributes:
        state: the storages of ``state``.
        live: the bytes of the storages that were made and still live.
        count: how many were made.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device: torch.device, state: Iterable[Tensor], reads: Iterable[Any] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self.state = {key_of(part) for tensor in state for part in devices.parts(tensor)}
        self._known = set(self.state)
        self.ignore(tensor for tensor in reads if isinstance(tensor, Tensor))
        self._made: dict[int, _Made] = {}
        # the size of what was made, minus that of what was freed
        self._changes: list[int] = []
        self.count = 0

    @property
    def live(self) -> dict[int, int]:
        """The bytes of the storages that were made and still live."""
        return {key: made.size for key, made in self._made.items()}

    def serial(self, key: int) -> int:
        """The number of the storage among those made; 0 for one that was there before."""
        return self._made[key].serial if key in self._made else 0

    def identity(self, tensor: Tensor) -> tuple[int, int]:
        """The tensor's storage, told apart from an earlier one in the same place."""
        return key_of(tensor), self.serial(key_of(tensor))

    def begin(self, counted: Iterable[int]) -> None:
        """Start a new peak; of the storages that live already, those counted lower it when they are
        freed.
        """
        self._changes.clear()
        counted = set(counted)
        self._made = {key: made for key, made in self._made.items() if key in counted}

    def begin_anew(self) -> None:
        """Start a new peak beyond all that lives: none of it may be freed before the log has ended."""
        self._known |= self.live.keys()
        self.begin(())

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors out."""
        self._known |= {key_of(part) for tensor in tensors for part in devices.parts(tensor)}

    def peak_bytes(self) -> int:
        """The most that was held at one time beyond what was held at the beginning."""
        return max(0, *itertools.accumulate(self._changes, initial=0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(devices.dispatches, types)):
            # the class takes the operation apart; what it makes inside is seen here
            return NotImplemented
        if isinstance(func, torch._ops.HigherOrderOperator):
            result = run_under_mode(self, func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and tensor.device.type == self._device
                and tensor.layout == torch.strided
            ):
                for part in devices.own_parts(tensor):
                    self._see(part)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._known or key in self._made:
            return
        self.count += 1
        serial, size = self.count, storage.nbytes()
        self._changes.append(size)
        self._made[key] = _Made(
            serial, size, weakref.ref(storage, lambda _: self._freed(key, serial))
        )

    def _freed(self, key: int, serial: int) -> None:
        made = self._made.get(key)
        if made is not None and made.serial == serial:
            del self._made[key]
            self._changes.append(-made.size)


def peak_bytes(device: torch.device, log: StorageLog, run: Callable[[], object]) -> int:
    """What a run holds at its peak beyond what was there: tensors, and what libraries take on a
    device beside them.

    Args:
        device: where it runs.
        log: begins where the run does, and is in force where no allocator counts. Elsewhere it is
            not: torch adds a second gradient of a value to the first in place, but into memory of
            its own while such a log is in force.
        run: is run once.
    """
    if not devices.counts_bytes(device):
        with log:
            run()
        return log.peak_bytes()
    return devices.peak_bytes(device, run) or 0
