"""What one layer keeps and needs in memory, by running it once while every allocation of a tensor is written down.

    bytes held
      ▲              ┌─┐ forward workspace
      │          ┌───┘ └──┐┌──┐      ┌──┐ backward workspace: gradients of writes and reads, and what kernels need
      │      ┌───┘        ││  └──┐ ┌─┘  └──┐
      │      │   saved    └┘     └─┘       └───
      └──────┴──── forward ────┴─── backward ───▶ time

State is never counted here, nor the gradients that parameters keep: a placement holds both all the time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer import devices
from placer.graph.halves import can_wait
from placer.graph.layers import tensor_bytes
from placer.profiler.trial import Trial


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer for one micro-batch.

    Attributes:
        saved_bytes: storages made inside the layer and kept for its backward pass, each counted once, without those of
            values that it reads or writes, and without its state.
        saved_reads: positions, among the layer's reads, of the values that it keeps for its backward pass.
        saved_writes: the same among its writes.
        forward_workspace_bytes: in training: the peak of the forward pass beyond state, reads, and all that is kept for
            the backward pass, plus the reads that are not kept. In inference: the peak beyond state, reads and writes.
        backward_workspace_bytes: the peak of the backward pass beyond state, the gradients that the parameters have,
            and all that was kept for it. The gradients of writes, until they were used, and of reads are part of it,
            and those of parameters until they are added to the ones that an earlier micro-batch left. 0 in inference.
        deferred_bytes: storages made by the half of the backward pass by input that the half by weight needs, where the
            two run apart: gradients of results of linear layers and convolutions, each storage once. 0 in inference.
        fragmented_bytes: the most memory that stood empty beside the layer's tensors, where an allocator counts it.
    """

    saved_bytes: int = 0
    saved_reads: frozenset[int] = frozenset()
    saved_writes: frozenset[int] = frozenset()
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    deferred_bytes: int = 0
    fragmented_bytes: int = 0


def measure_memory(trial: Trial, training: bool) -> LayerMemory:
    """Run the layer once and account for its memory.

    Args:
        trial: the layer; it must have run before, so that libraries hold what they hold for good.
        training: whether a backward pass follows.

    Returns:
        Bytes for one micro-batch. Tensors are followed one by one; on CUDA, what the allocator's peak shows beyond them
        (workspaces of libraries, rounding) is added to the workspaces.
    """
    trial.writes = trial.gradients = ()
    log = _StorageLog(trial)
    noted: set[tuple[int, int]] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            noted.add(log.identity(tensor))
        return tensor.detach()  # a result that held itself would never be freed

    with log, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward_peak = devices.peak_bytes(trial.device, trial.forward)
    forward_extra = max(0, forward_peak - log.peak_bytes()) if forward_peak is not None else 0
    fragmented = devices.fragmented_bytes(trial.device)
    if not training:
        fresh = sum(_fresh_writes(trial, log).values())
        workspace = max(0, log.peak_bytes() - fresh) + forward_extra
        return LayerMemory(forward_workspace_bytes=workspace, fragmented_bytes=fragmented)
    saved = {key for key, serial in noted if log.serial(key) == serial}  # of what lives still
    return _training_memory(trial, log, saved, forward_extra, fragmented)


def _training_memory(
    trial: Trial, log: _StorageLog, saved: set[int], forward_extra: int, fragmented: int
) -> LayerMemory:
    fresh = _fresh_writes(trial, log)
    kept_writes = {key: size for key, size in fresh.items() if key in saved}
    inside = {key: size for key, size in log.live.items() if key not in fresh}
    # A storage that is larger than the values that the layer writes of it: the rest is kept with them.
    rest = sum(log.live[key] - size for key, size in kept_writes.items())
    kept = sum(kept_writes.values()) + sum(inside.values()) + rest
    write_keys = [_key(write) if isinstance(write, Tensor) else None for write in trial.writes]
    saved_writes = frozenset(i for i, key in enumerate(write_keys) if key in saved and key not in log.state)
    read_keys = {i: _key(read) for i, read in enumerate(trial.reads) if isinstance(read, Tensor)}
    saved_reads = frozenset(i for i, key in read_keys.items() if key in saved and key not in write_keys)
    held = {key for key in read_keys.values() if key in saved}
    unsaved_reads = sum(tensor_bytes(trial.reads[i]) for i, key in read_keys.items() if key not in held)
    forward_workspace = max(0, log.peak_bytes() - kept) + unsaved_reads + forward_extra

    trial.set_gradients(present=True)
    log.begin({*inside, *kept_writes})
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    with log:
        backward_peak = devices.peak_bytes(trial.device, trial.accumulate_alone)
    trial.set_gradients(present=False)
    backward_extra = max(0, backward_peak - log.peak_bytes()) if backward_peak is not None else 0
    return LayerMemory(
        saved_bytes=sum(inside.values()) + rest,
        saved_reads=saved_reads,
        saved_writes=saved_writes,
        forward_workspace_bytes=forward_workspace,
        backward_workspace_bytes=log.peak_bytes() + backward_extra,
        fragmented_bytes=max(fragmented, devices.fragmented_bytes(trial.device)),
        deferred_bytes=_deferred_bytes(trial),
    )


def _deferred_bytes(trial: Trial) -> int:
    """What a backward pass by input leaves to the one by weight, beside what the forward pass left to both."""
    log, waiting = _StorageLog(trial), _Waiting()
    trial.set_gradients(present=True)
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    with log:
        with waiting:
            trial.forward()
        before = log.count
        if waiting.found:
            trial.accumulate_alone()
    trial.set_gradients(present=False)
    keys = {_key(gradient) for gradient in waiting.gradients if gradient.layout == torch.strided}
    return sum(log.live[key] for key in keys if log.serial(key) > before)


def _fresh_writes(trial: Trial, log: _StorageLog) -> dict[int, int]:
    """The storages that the layer made for its writes, with the bytes that the writes take of each."""
    sizes: dict[int, int] = {}
    for write in trial.writes:
        if isinstance(write, Tensor) and _key(write) in log.live:
            key = _key(write)
            sizes[key] = min(log.live[key], sizes.get(key, 0) + tensor_bytes(write))
    return sizes


def _key(tensor: Tensor) -> int:
    """The same for two tensors that share a storage; unique among the storages that live at one time."""
    return int(tensor.untyped_storage()._cdata)


class _Waiting(TorchFunctionMode):
    """Holds on to the gradients of results of operations whose weight gradients can wait.

    Attributes:
        found: how many such operations ran.
        gradients: what came back to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = 0
        self.gradients: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if can_wait(func, args, kwargs):
            self.found += 1
            result.register_hook(self.gradients.append)
        return result


@dataclass(frozen=True)
class _Made:
    """A storage that lives: the reference tells when it ends."""

    serial: int
    size: int
    reference: weakref.ref[Any]


class _StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down when storages are made on the trial's device, and when they are freed.

    Attributes:
        state: the storages of the layer's state.
        live: the bytes of the storages that were made and still live.
        count: how many were made.
    """

    def __init__(self, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = trial.device.type
        self.state = {_key(tensor) for tensor in trial.state}
        self._known = self.state | {_key(tensor) for tensor in trial.reads if isinstance(tensor, Tensor)}
        self._made: dict[int, _Made] = {}
        self._changes: list[int] = []  # the size of what was made, minus that of what was freed
        self.count = 0

    @property
    def live(self) -> dict[int, int]:
        return {key: made.size for key, made in self._made.items()}

    def serial(self, key: int) -> int:
        """The number of the storage among those made; 0 for one that was there before."""
        return self._made[key].serial if key in self._made else 0

    def identity(self, tensor: Tensor) -> tuple[int, int]:
        """The tensor's storage, told apart from an earlier one in the same place."""
        return _key(tensor), self.serial(_key(tensor))

    def begin(self, counted: Iterable[int]) -> None:
        """Start a new peak; of the storages that live already, those counted lower it when they are freed."""
        self._changes.clear()
        counted = set(counted)
        self._made = {key: made for key, made in self._made.items() if key in counted}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors out."""
        self._known |= {_key(tensor) for tensor in tensors}

    def peak_bytes(self) -> int:
        """The most that was held at one time beyond what was held at the beginning."""
        return max(0, *itertools.accumulate(self._changes, initial=0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device and tensor.layout == torch.strided:
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._known or key in self._made:
            return
        self.count += 1
        serial, size = self.count, storage.nbytes()
        self._changes.append(size)
        self._made[key] = _Made(serial, size, weakref.ref(storage, lambda _: self._freed(key, serial)))

    def _freed(self, key: int, serial: int) -> None:
        made = self._made.get(key)
        if made is not None and made.serial == serial:
            del self._made[key]
            self._changes.append(-made.size)
