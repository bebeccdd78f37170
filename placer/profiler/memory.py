"""Memory of one layer, from one run during which every tensor allocation is recorded.

    bytes held
      ▲              ┌─┐ forward workspace
      │          ┌───┘ └──┐┌──┐      ┌──┐ backward workspace: gradients of writes and reads,
      │      ┌───┘        ││  └──┐ ┌─┘  └──┐                  and temporaries of kernels
      │      │   saved    └┘     └─┘       └───
      └──────┴──── forward ────┴─── backward ───▶ time

State and the gradients of parameters are excluded: a placement holds both permanently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import tensor_bytes
from placer.devices.allocator.storage_watch import StorageLog, key_of, peak_bytes
from placer.profiler.backward_split.split_memory import Slices, measure_halves
from placer.profiler.trial import Trial

# Reserved memory of a recorded pass beyond its peak of allocated bytes. Small tensors use 2 MiB
# pieces, the last of which is not full; the same holds for medium ones, and gaps remain. On two
# H200s it was 2 to 39 MiB, 8 on average, in 28 passes of ResNet-101, a U-Net, Inception-v3 and a
# GPT.
_PIECES_BYTES = 8 * 2**20


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer for one micro-batch, in bytes.

    Attributes:
        saved_bytes: storages created inside the layer and saved for its backward pass, each counted
            once; without values that it reads or writes, and without its state.
        saved_reads: positions, among the layer's reads, of the values saved for its backward pass.
        saved_writes: positions, among its writes, of the values saved for its backward pass.
        forward_workspace_bytes: in training, the peak of the forward pass beyond state, reads and
            saved storages, plus the reads that are not saved. In inference, the peak beyond state,
            reads and writes.
        backward_workspace_bytes: the peak of the backward pass beyond state, existing gradients of
            parameters, and saved storages. It includes the gradients of writes until they are used,
            the gradients of reads, and new gradients of parameters until they are accumulated. 0 in
            inference.
        recorded_workspace_bytes: the backward peak of a recorded pass, in which no saved storage is
            freed and products accumulate into gradients of parameters directly. 0 in inference, and
            if the layer cannot run so.
        deferred_bytes: storages created by the input-gradient pass and needed by the
            weight-gradient pass: gradients of results of linear layers and convolutions, each
            storage once. 0 in inference.
        input_grad_workspace_bytes: the peak of the input-gradient pass beyond state, gradients of
            parameters and saved storages, none of which is freed. It includes ``deferred_bytes``
            and the gradients of reads, but not the deferred gradients of parameters. 0 in
            inference.
        weight_grad_workspace_bytes: the peak of the weight-gradient pass beyond its deferred
            storages: two operations of the largest kind.
        slices: for each storage of which gradients of reads are slices (after a concatenation), its
            bytes and the positions of these reads. All of it lives until its last slice is used.
        deferred_writes: positions of the writes whose gradients are part of ``deferred_bytes``.
        in_segments: whether the device's allocator reserves memory in segments.
        fragmented_bytes: the peak of unusable free memory in these segments.
    """

    saved_bytes: int = 0
    saved_reads: frozenset[int] = frozenset()
    saved_writes: frozenset[int] = frozenset()
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    recorded_workspace_bytes: int = 0
    deferred_bytes: int = 0
    input_grad_workspace_bytes: int = 0
    weight_grad_workspace_bytes: int = 0
    slices: tuple[Slices, ...] = ()
    deferred_writes: frozenset[int] = frozenset()
    in_segments: bool = False
    fragmented_bytes: int = 0

    @property
    def pieces_bytes(self) -> int:
        """Return the bytes to add to each workspace where passes are recorded."""
        return _PIECES_BYTES if self.in_segments else 0


def measure_memory(trial: Trial, training: bool) -> LayerMemory:
    """Run the layer once and account for its memory.

    Args:
        trial: the layer, after an earlier run, so that libraries hold their permanent workspaces.
        training: whether a backward pass follows.

    Returns:
        Bytes for one micro-batch. Tensors are recorded individually; on CUDA, the difference to the
        allocator's peak (workspaces of libraries, rounding) is added to the workspaces.
    """
    trial.writes = trial.gradients = ()
    log = StorageLog(trial.device, trial.state, trial.reads)
    noted: set[tuple[int, int]] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            noted.add(log.identity(tensor))
        return tensor.detach()  # a result that held itself would never be freed

    with log, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward_peak = devices.peak_bytes(trial.device, trial.forward)
    # the allocator's peak beyond the recorded tensors: workspaces of libraries, and rounding
    forward_extra = max(0, forward_peak - log.peak_bytes()) if forward_peak is not None else 0
    fragmented = devices.fragmented_bytes(trial.device)
    if not training:
        fresh = sum(_fresh_writes(trial, log).values())
        workspace = max(0, log.peak_bytes() - fresh) + forward_extra
        return LayerMemory(forward_workspace_bytes=workspace, fragmented_bytes=fragmented)
    # only storages that are still alive
    saved = {key for key, serial in noted if log.serial(key) == serial}
    forward, kept = _forward_memory(trial, log, saved, forward_extra)
    return _training_memory(trial, log, forward, kept, fragmented)


def _forward_memory(
    trial: Trial, log: StorageLog, saved: set[int], forward_extra: int
) -> tuple[LayerMemory, set[int]]:
    """Return what a forward pass keeps and needs, and the new storages that it keeps.

    Args:
        trial: the layer, after a forward pass.
        log: the storages of the pass.
        saved: the storages that autograd saved.
        forward_extra: bytes that the allocator took beyond the storages.
    """
    fresh = _fresh_writes(trial, log)
    kept_writes = {key: size for key, size in fresh.items() if key in saved}
    #     storages alive after the forward pass
    #       fresh    made for writes: the edges of the graph carry their size
    #       inside   all others: saved for the backward pass
    inside = {key: size for key, size in log.live.items() if key not in fresh}
    # If a storage is larger than the writes that lie in it, the rest of it is kept as well.
    rest = sum(log.live[key] - size for key, size in kept_writes.items())
    kept = sum(kept_writes.values()) + sum(inside.values()) + rest
    write_keys = [key_of(write) if isinstance(write, Tensor) else None for write in trial.writes]
    saved_writes = frozenset(
        i for i, key in enumerate(write_keys) if key in saved and key not in log.state
    )
    read_keys = {i: key_of(read) for i, read in enumerate(trial.reads) if isinstance(read, Tensor)}
    saved_reads = frozenset(
        i for i, key in read_keys.items() if key in saved and key not in write_keys
    )
    held = {key for key in read_keys.values() if key in saved}
    unsaved_reads = sum(
        tensor_bytes(trial.reads[i]) for i, key in read_keys.items() if key not in held
    )
    memory = LayerMemory(
        saved_bytes=sum(inside.values()) + rest,
        saved_reads=saved_reads,
        saved_writes=saved_writes,
        forward_workspace_bytes=max(0, log.peak_bytes() - kept) + unsaved_reads + forward_extra,
    )
    return memory, {*inside, *kept_writes}


def _training_memory(
    trial: Trial, log: StorageLog, forward: LayerMemory, kept: set[int], fragmented: int
) -> LayerMemory:
    """Return the memory of both passes, after running the backward pass.

    Args:
        trial: the layer, after a forward pass.
        log: the storages of the pass.
        forward: the memory of the forward pass.
        kept: the new storages that it keeps.
        fragmented: bytes of unusable free memory in the forward pass.
    """
    trial.set_gradients(present=True)
    # saved storages lower the peak as soon as autograd frees them
    log.begin(kept)
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    backward_workspace = peak_bytes(trial.device, log, trial.accumulate_alone)
    trial.set_gradients(present=False)
    fragmented = max(fragmented, devices.fragmented_bytes(trial.device))
    halves = measure_halves(trial)
    return replace(
        forward,
        backward_workspace_bytes=backward_workspace,
        # Without saved storages nothing would be freed early, and without parameters nothing
        # accumulates: the recorded pass equals the eager one.
        recorded_workspace_bytes=_recorded_workspace(trial) if kept or trial.parameters else 0,
        fragmented_bytes=fragmented,
        deferred_bytes=sum(halves.deferred),
        input_grad_workspace_bytes=halves.input_grad_workspace_bytes,
        weight_grad_workspace_bytes=halves.weight_grad_workspace_bytes,
        slices=halves.slices,
        deferred_writes=halves.deferred_writes,
        in_segments=devices.counts_bytes(trial.device),
    )


def _recorded_workspace(trial: Trial) -> int:
    """Return the peak of a backward pass that frees no saved storage.

    0 if the layer cannot run so.
    """
    log = StorageLog(trial.device, trial.state, trial.reads)
    trial.set_gradients(present=True)
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    try:
        with log:
            trial.forward_adding()
        log.restart()
        return peak_bytes(trial.device, log, partial(trial.accumulate_alone, again=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # some operations (such as torch.compile's) cannot retain their graph
        return 0
    finally:
        trial.set_gradients(present=False)


def _fresh_writes(trial: Trial, log: StorageLog) -> dict[int, int]:
    """Return the storages created for writes, with the bytes that the writes use of each."""
    sizes: dict[int, int] = {}
    for write in trial.writes:
        if isinstance(write, Tensor) and key_of(write) in log.live:
            key = key_of(write)
            sizes[key] = min(log.live[key], sizes.get(key, 0) + tensor_bytes(write))
    return sizes
