"""A log of the storages that operations create and free on a device."""

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
    """Return an identifier of the tensor's storage, unique among live storages.

    Tensors that share a storage share the identifier. For a sparse tensor, the values count. A
    later storage may take the identifier of a freed one; see ``storage_of``.
    """
    return int(devices.parts(tensor)[-1].untyped_storage()._cdata)


def storage_of(tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
    """Return a weak reference to the tensor's storage, which no later storage can be taken for.

    Torch keeps one Python object per storage for as long as any tensor uses the storage.
    """
    return weakref.ref(devices.parts(tensor)[-1].untyped_storage())


@dataclass(frozen=True)
class _Made:
    """A live storage; the weak reference reports its end."""

    serial: int
    size: int
    reference: weakref.ref[Any]


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records allocations and releases of storages on a device.

    Args:
        device: only storages on devices of this type are recorded.
        state: tensors that exist before and are never counted.
        reads: further tensors that are never counted.

    Attributes:
        state: the storages of ``state``.
        live: bytes of each storage that was created and is still alive.
        count: number of storages created so far.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device: torch.device, state: Iterable[Tensor], reads: Iterable[Any] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self.state = {key_of(part) for tensor in state for part in devices.parts(tensor)}
        # storages that do not count; weak references, because a later one may take a freed address
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.ignore(state)
        self.ignore(tensor for tensor in reads if isinstance(tensor, Tensor))
        self._made: dict[int, _Made] = {}
        # the size of each new storage, and the negative size of each freed storage
        self._changes: list[int] = []
        self.count = 0

    @property
    def live(self) -> dict[int, int]:
        """Return the bytes of each storage that was created and is still alive."""
        return {key: made.size for key, made in self._made.items()}

    def serial(self, key: int) -> int:
        """Return the creation number of a storage; 0 if it existed before."""
        return self._made[key].serial if key in self._made else 0

    def identity(self, tensor: Tensor) -> tuple[int, int]:
        """Return the tensor's storage and its number, which differs when an address is reused."""
        return key_of(tensor), self.serial(key_of(tensor))

    def begin(self, counted: Iterable[int]) -> None:
        """Start a new peak; freeing one of the ``counted`` live storages lowers it."""
        self._changes.clear()
        counted = set(counted)
        self._made = {key: made for key, made in self._made.items() if key in counted}

    def restart(self) -> None:
        """Start a new peak above all live storages, whose end does not lower it."""
        self._known.update((key, made.reference) for key, made in self._made.items())
        self.begin(())

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude the storages of these tensors."""
        for tensor in tensors:
            self._known.update((key_of(part), storage_of(part)) for part in devices.parts(tensor))

    def peak_bytes(self) -> int:
        """Return the peak of the bytes held since the start, beyond those held at the start."""
        return max(0, *itertools.accumulate(self._changes, initial=0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(devices.dispatches, types)):
            # the subclass decomposes the operation; the mode sees the operations inside
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
        known = self._known.get(key)
        if key in self._made or (known is not None and known() is storage):
            return
        self.count += 1
        serial, size = self.count, storage.nbytes()
        self._changes.append(size)
        self._made[key] = _Made(
            serial, size, weakref.ref(storage, lambda _: self._freed(key, serial))
        )

    def _freed(self, key: int, serial: int) -> None:
        # the address may already belong to a newer storage
        made = self._made.get(key)
        if made is not None and made.serial == serial:
            del self._made[key]
            self._changes.append(-made.size)


def peak_bytes(device: torch.device, log: StorageLog, run: Callable[[], object]) -> int:
    """Return the peak memory of a run in bytes, beyond what was held before.

    On CUDA, torch's allocator counts, which includes workspaces of libraries.

    Args:
        device: where it runs.
        log: the log to count with where no allocator counts. It is not active on CUDA: while it is
            active, autograd adds a second gradient out of place instead of in place, which costs
            memory.
        run: the work, executed once.
    """
    if not devices.counts_bytes(device):
        with log:
            run()
        return log.peak_bytes()
    return devices.peak_bytes(device, run) or 0
