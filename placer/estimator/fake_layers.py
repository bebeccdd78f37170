"""Memory of a graph's layers, from runs on fake tensors.

    layer ──▶ fake state and reads ──▶ the trial of ``placer.profiler`` ──▶ LayerMemory

A fake tensor has a shape, a dtype and a storage with a size, but no data. Runs on fake tensors
therefore create and free the same storages as real runs, without memory and without devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import GradientEdge

from placer import devices
from placer.capture import autocast
from placer.capture.layers import Layer, LayerGraph, tensor_bytes
from placer.errors import InputError, PlacerError, ProfilingError
from placer.estimator.cuda_operations import CudaOperations
from placer.estimator.cuda_workspaces import CudaWorkspaces
from placer.profiler.backward_split.concurrent_passes import LANES
from placer.profiler.cache.layer_cache import Remembered
from placer.profiler.loss_measurement import Loss, as_run
from placer.profiler.measurement import Measurement
from placer.profiler.memory import measure_memory
from placer.profiler.timing import LayerTime
from placer.profiler.trial import Trial, bring_input

# The fake tensors' device. Every build of torch can run autograd on it.
_PLACE = torch.device("cpu", 0)


class Estimated(NamedTuple):
    """Measurements of fake runs, with times of 0.

    Attributes:
        layers: one for each layer, in order.
        loss: of the loss; None without one.
    """

    layers: list[Measurement]
    loss: Measurement | None


def estimate_layers(
    graph: LayerGraph,
    inputs: Sequence[Any],
    training: bool,
    on_gpu: bool,
    loss: FakeLoss | None = None,
) -> Estimated:
    """Estimate the memory of every layer of a graph; layers with equal signatures once.

    Args:
        graph: the layers.
        inputs: the model's inputs, in the order of ``graph.inputs``; only shapes and dtypes count.
        training: whether backward passes are estimated.
        on_gpu: whether kernels, workspaces and the allocator are CUDA's.
        loss: reads the results; None for none.

    Raises:
        InputError: if the loss fails on such results and its target.
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
        results = [_fake_like(values[name]) for name in graph.outputs]
        row = None if loss is None else loss.estimate(graph, results, on_gpu)
    return Estimated(
        [found for layer in graph.layers if (found := known.get(layer)) is not None], row
    )


class FakeLoss(Loss):
    """A loss that runs on fake results, instead of being measured on a device."""

    def estimate(self, graph: LayerGraph, results: Sequence[Any], on_gpu: bool) -> Measurement:
        """Estimate the memory of the loss, where the tensors that it makes are fake.

        Args:
            graph: the layers, whose results the loss reads.
            results: the results.
            on_gpu: as for ``estimate_layers``.

        Raises:
            InputError: if the loss fails on such results and its target.
        """
        kind = _CudaTrial if on_gpu else Trial
        try:
            goals = [bring_input(goal, _PLACE) for goal in self.target]
            layer = self._layer(graph, _PLACE)
            trial = kind(layer, _PLACE, goals, list(results), graph.values, True)
            return as_run(_estimated(trial, True), trial.reads, on_gpu)
        except PlacerError:
            raise
        except Exception as error:  # a user's function may raise anything
            failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise InputError(
                f"loss_fn failed on {_PLACE}, for {self._given(graph)}: {failure}"
            ) from error


@contextmanager
def _without_devices(on_gpu: bool) -> Iterator[None]:
    """Make tensors fake inside, and select operations as CUDA would if ``on_gpu``."""
    operations = CudaOperations() if on_gpu else nullcontext()
    # A fallback would run an operation without a fake kernel on real zeros, of any size.
    fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with fake, operations:
        yield


class _CudaTrial(Trial):
    """A trial on fake tensors whose passes take the workspaces of CUDA's libraries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._workspaces = CudaWorkspaces()

    @property
    def weight_pass_bytes(self) -> int:
        """Return the largest peak of a convolution's weight-gradient computation."""
        return self._workspaces.weight_pass_bytes

    def forward(self) -> None:
        with self._workspaces:
            super().forward()

    def accumulate_alone(self, again: bool = False) -> None:
        with self._workspaces:
            super().accumulate_alone(again)

    def backward_by_input(
        self, edges: Sequence[GradientEdge], left_out: Collection[int], again: bool
    ) -> tuple[Tensor | None, ...]:
        with self._workspaces:
            return super().backward_by_input(edges, left_out, again)


def _trial(
    layer: Layer, graph: LayerGraph, reads: Sequence[Any], training: bool, on_gpu: bool
) -> Trial:
    """Return a layer with fake state and reads, ready to run."""
    tensors = (graph.state[name] for name in layer.state)
    state = [
        devices.rebuilt(tensor, _without_data).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]
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
    if training and isinstance(trial, _CudaTrial):
        memory = replace(
            memory,
            # CUDA's allocator reserves memory in segments
            in_segments=True,
            # the profiler computes weight gradients outside the trial's passes
            weight_grad_workspace_bytes=max(
                memory.weight_grad_workspace_bytes, LANES * trial.weight_pass_bytes
            ),
        )
    return Measurement(LayerTime(0.0, 0.0, 0.0), memory, write_bytes)


def _fake_like(value: Any) -> Any:
    """Return a fake tensor of equal metadata, or the value itself if it is not a tensor."""
    if not isinstance(value, Tensor):
        return value
    is_strided = value.layout == torch.strided
    return _without_data(value) if is_strided else devices.rebuilt(value, _without_data)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_PLACE)
