"""What one layer keeps and needs in memory, by running it once while every allocation of a tensor
is written down.

    bytes held
      ▲              ┌─┐ forward workspace
      │          ┌───┘ └──┐┌──┐      ┌──┐ backward workspace: gradients of writes and reads, and what kernels need
      │      ┌───┘        ││  └──┐ ┌─┘  └──┐
      │      │   saved    └┘     └─┘       └───
      └──────┴──── forward ────┴─── backward ───▶ time

State is never counted here, nor the gradients that parameters keep: a placement holds both all the
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import tensor_bytes
from placer.devices.allocator.storage_watch import StorageLog, key_of, peak_bytes
from placer.profiler.backward_split.split_memory import Slices, measure_halves
from placer.profiler.trial import Trial

# What a recorded pass takes of a GPU beyond what it holds at once. Small tensors have pieces of 2
# MiB of their own, of which the last is not full; nor is what lies beside it; and gaps stay. On two
# H200s it was 2 to 39 MiB, 8 in the mean, in 28 passes of ResNet-101, a U-Net, Inception-v3 and a
# GPT.
_PIECES_BYTES = 8 * 2**20


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer for one micro-batch.

    Attributes:
        saved_bytes: storages made inside the layer and kept for its backward pass, each counted
            once, without those of values that it reads or writes, and without its state.
        saved_reads: positions, among the layer's reads, of the values that it keeps for its
            backward pass.
        saved_writes: the same among its writes.
        forward_workspace_bytes: in training: the peak of the forward pass beyond state, reads, and
            all that is kept for the backward pass, plus the reads that are not kept. In inference:
            the peak beyond state, reads and writes.
        backward_workspace_bytes: the peak of the backward pass beyond state, the gradients that the
            parameters have, and all that was kept for it. The gradients of writes, until they were
            used, and of reads are part of it, and those of parameters until they are added to the
            ones that an earlier micro-batch left. 0 in inference.
        pass_workspace_bytes: the same where nothing that was kept is freed while the backward pass
            runs, and products are added to the gradients of parameters as they are made: a recorded
            pass. 0 in inference, and where the layer cannot run so.
        deferred_bytes: storages made by the half of the backward pass by input that the half by
            weight needs, where the two run apart: gradients of results of linear layers and
            convolutions, each storage once. 0 in inference.
        input_workspace_bytes: the peak of the half by input where the two run apart, beyond state,
            gradients of the parameters, and all that was kept, none of which is freed:
            ``deferred_bytes`` and the gradients of reads included, those of parameters that wait
            not. 0 in inference.
        weights_workspace_bytes: the peak of the half by weight beyond what it waits with, of two
            operations like the largest.
        slices: of each storage of which gradients of reads are slices, as those of what is
            concatenated are: its bytes, and the positions of these reads. All of it is held until
            the last of them was used.
        deferred_writes: the positions of the writes whose gradients are part of ``deferred_bytes``.
        in_segments: whether the device's allocator takes memory in such segments.
        fragmented_bytes: the most memory that stood empty beside the layer's tensors, where an
            allocator counts it.
    """

    saved_bytes: int = 0
    saved_reads: frozenset[int] = frozenset()
    saved_writes: frozenset[int] = frozenset()
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    pass_workspace_bytes: int = 0
    deferred_bytes: int = 0
    input_workspace_bytes: int = 0
    weights_workspace_bytes: int = 0
    slices: tuple[Slices, ...] = ()
    deferred_writes: frozenset[int] = frozenset()
    in_segments: bool = False
    fragmented_bytes: int = 0

    @property
    def pieces_bytes(self) -> int:
        """What comes on top of each workspace where passes are recorded."""
        return _PIECES_BYTES if self.in_segments else 0


def measure_memory(trial: Trial, training: bool) -> LayerMemory:
    """Run the layer once and account for its memory.

    Args:
        trial: the layer; it must have run before, so that libraries hold what they hold for good.
        training: whether a backward pass follows.

    Returns:
        Bytes for one micro-batch. Tensors are followed one by one; on CUDA, what the allocator's
        peak shows beyond them (workspaces of libraries, rounding) is added to the workspaces.
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
    forward_extra = max(0, forward_peak - log.peak_bytes()) if forward_peak is not None else 0
    fragmented = devices.fragmented_bytes(trial.device)
    if not training:
        fresh = sum(_fresh_writes(trial, log).values())
        workspace = max(0, log.peak_bytes() - fresh) + forward_extra
        return LayerMemory(forward_workspace_bytes=workspace, fragmented_bytes=fragmented)
    # of what lives still
    saved = {key for key, serial in noted if log.serial(key) == serial}
    return _training_memory(trial, log, saved, forward_extra, fragmented)


def _training_memory(
    trial: Trial, log: StorageLog, saved: set[int], forward_extra: int, fragmented: int
) -> LayerMemory:
    fresh = _fresh_writes(trial, log)
    kept_writes = {key: size for key, size in fresh.items() if key in saved}
    inside = {key: size for key, size in log.live.items() if key not in fresh}
    # A storage that is larger than the values that the layer writes of it: the rest is kept with
    # them.
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
    forward_workspace = max(0, log.peak_bytes() - kept) + unsaved_reads + forward_extra

    trial.set_gradients(present=True)
    log.begin({*inside, *kept_writes})
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    backward_workspace = peak_bytes(trial.device, log, trial.accumulate_alone)
    trial.set_gradients(present=False)
    fragmented = max(fragmented, devices.fragmented_bytes(trial.device))
    halves = measure_halves(trial)
    return LayerMemory(
        saved_bytes=sum(inside.values()) + rest,
        saved_reads=saved_reads,
        saved_writes=saved_writes,
        forward_workspace_bytes=forward_workspace,
        backward_workspace_bytes=backward_workspace,
        # Where nothing was made and kept, nothing is freed; without parameters no product is added
        # either.
        pass_workspace_bytes=_pass_workspace(trial)
        if inside or kept_writes or trial.parameters
        else 0,
        fragmented_bytes=fragmented,
        deferred_bytes=sum(halves.deferred),
        input_workspace_bytes=halves.input_workspace_bytes,
        weights_workspace_bytes=halves.weights_workspace_bytes,
        slices=halves.slices,
        deferred_writes=halves.deferred_writes,
        in_segments=devices.counts_bytes(trial.device),
    )


def _pass_workspace(trial: Trial) -> int:
    """What a backward pass holds that frees nothing of what was kept; 0 where the layer refuses to
    run so.
    """
    log = StorageLog(trial.device, trial.state, trial.reads)
    trial.set_gradients(present=True)
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    try:
        with log:
            trial.forward_adding()
        log.begin_anew()
        return peak_bytes(trial.device, log, partial(trial.accumulate_alone, again=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # some operations (those of torch.compile) refuse to keep what a backward pass has used
        return 0
    finally:
        trial.set_gradients(present=False)


def _fresh_writes(trial: Trial, log: StorageLog) -> dict[int, int]:
    """The storages that the layer made for its writes, with the bytes that the writes take of each."""
    sizes: dict[int, int] = {}
    for write in trial.writes:
        if isinstance(write, Tensor) and key_of(write) in log.live:
            key = key_of(write)
            sizes[key] = min(log.live[key], sizes.get(key, 0) + tensor_bytes(write))
    return sizes
