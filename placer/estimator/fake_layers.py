"""Memory of a graph's layers, from runs on fake tensors.

    layer ──▶ fake state and reads ──▶ the trial of ``placer.profiler`` ──▶ LayerMemory

A fake tensor has a shape, a dtype and a storage with a size, but no data. Runs on fake tensors
therefore create and free the same storages as real runs, without memory and without devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from placer import devices
from placer.capture import autocast
from placer.capture.layers import Layer, LayerGraph, tensor_bytes
from placer.devices.allocator.storage_watch import StorageLog
from placer.errors import ProfilingError
from placer.estimator.cuda_log import CudaLog
from placer.estimator.cuda_operations import CudaOperations
from placer.profiler.cache.layer_cache import Remembered
from placer.profiler.loss_measurement import Loss
from placer.profiler.measurement import Measurement
from placer.profiler.memory import measure_memory
from placer.profiler.timing import LayerTime
from placer.profiler.trial import Trial

# The fake tensors' device. Every build of torch can run autograd on it.
_PLACE = torch.device("cpu", 0)


def estimate_layers(
    graph: LayerGraph, inputs: Sequence[Any], training: bool, on_gpu: bool
) -> list[Measurement]:
    """Estimate the memory of every layer of a graph; layers with equal signatures once.

    Args:
        graph: the layers.
        inputs: the model's inputs, in the order of ``graph.inputs``; only shapes and dtypes count.
        training: whether backward passes are estimated.
        on_gpu: whether kernels, workspaces and the allocator are CUDA's.

    Returns:
        One measurement for each layer, in order, with times of 0.

    Raises:
        ProfilingError: if a layer cannot run on fake tensors; the message names it.
    """
    known = Remembered()
    # Layers of equal signatures write tensors of equal metadata, so only the first of them runs.
    written: dict[str, tuple[Any, ...]] = {}
    with _without_devices(on_gpu):
        values = dict(zip(graph.inputs, map(_fake_like, inputs), strict=True))
        for layer in graph.layers:
            reads = [values[name] for name in layer.reads]
            if layer.signature not in written:
                try:
                    trial = _trial(layer, graph, reads, training, on_gpu)
                    known.put(layer, _estimated(trial, training))
                except Exception as error:  # a layer runs a user's code
                    raise _failure(layer, error) from error
                written[layer.signature] = tuple(map(_fake_like, trial.writes))
            values.update(zip(layer.writes, written[layer.signature], strict=True))
    return [found for layer in graph.layers if (found := known.get(layer)) is not None]


def estimate_loss(
    loss: Loss, graph: LayerGraph, rows: Sequence[Measurement], on_gpu: bool
) -> Measurement:
    """Estimate the memory of a loss function, see ``Loss.measure``.

    Args:
        loss: the loss and its target.
        graph: the layers, whose results the loss reads.
        rows: the measurements of the layers.
        on_gpu: as for ``estimate_layers``.

    Raises:
        InputError: if it fails on such results and this target.
    """
    kind = _CudaTrial if on_gpu else Trial
    with _without_devices(on_gpu):
        return loss.run(graph, rows, _PLACE, partial(_estimated, training=True), on_gpu, kind)


@contextmanager
def _without_devices(on_gpu: bool) -> Iterator[None]:
    """Make tensors fake inside, and select operations as CUDA would if ``on_gpu``."""
    operations = CudaOperations() if on_gpu else nullcontext()
    # A fallback would run an operation without a fake kernel on real zeros, of any size.
    fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with fake, operations:
        yield


class _CudaTrial(Trial):
    """A trial on fake tensors whose memory is counted as on CUDA."""

    def log(self) -> StorageLog:
        return CudaLog(self.device, self.state, self.reads)


def _trial(
    layer: Layer, graph: LayerGraph, reads: Sequence[Any], training: bool, on_gpu: bool
) -> Trial:
    """Return a layer with fake state and reads, ready to run."""
    state = [_fake_state(graph.state[name]) for name in layer.state]
    versions = [read._version if isinstance(read, Tensor) else 0 for read in reads]
    with torch.no_grad():
        layer.function(_PLACE, state, reads)
    mutated = [
        index
        for index, read in enumerate(reads)
        if isinstance(read, Tensor) and read._version != versions[index]
    ]
    kind = _CudaTrial if on_gpu else Trial
    return kind(layer, _PLACE, state, reads, graph.values, training, mutated)


def _failure(layer: Layer, error: Exception) -> ProfilingError:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = f"it depends on the values of a tensor ({error.func})"
    else:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ProfilingError(
        f"layer {layer.name!r} cannot run on fake tensors, which have no values: {why}; measure the"
        " model with placer.profile instead"
    )


def _estimated(trial: Trial, training: bool) -> Measurement:
    with autocast.uncached(trial.device):
        memory = measure_memory(trial, training)
        write_bytes = tuple(
            tensor_bytes(write) if isinstance(write, Tensor) else 0 for write in trial.writes
        )
    # CUDA's allocator reserves memory in segments
    memory = replace(memory, in_segments=training and isinstance(trial, _CudaTrial))
    return Measurement(LayerTime(0.0, 0.0, 0.0), memory, write_bytes)


def _fake_state(tensor: Tensor) -> Tensor:
    """Return a fake copy of a parameter or buffer."""
    return devices.rebuilt(tensor, _without_data).requires_grad_(tensor.requires_grad)


def _fake_like(value: Any) -> Any:
    """Return a fake tensor of equal metadata, or the value itself if it is not a tensor."""
    if not isinstance(value, Tensor):
        return value
    is_strided = value.layout == torch.strided
    return _without_data(value) if is_strided else devices.rebuilt(value, _without_data)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_PLACE)
