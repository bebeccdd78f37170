"""Time and memory of the loss function, on the device of the layer that makes the result.

    layer ──▶ result ──┐
                       ├──▶ loss       an additional pass of that layer: its forward runs after
             target ───┘               the layer's, its backward before the layer's

The loss is measured as a layer of its own on random results, and added to the last layer that makes
a result; so it moves with that layer. Cached measurements of layers exclude it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices, schema
from placer.capture.argument_checks import require_loss_function, require_loss_with_target
from placer.capture.batch_dims.batch_layout import BatchLayout
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS, target_layout
from placer.capture.layers import Layer, LayerGraph, Value, tensor_bytes
from placer.capture.loss_functions import (
    LossFunction,
    loss_and_values,
    refuse_arrays,
    require_gradient,
    require_real_number,
)
from placer.capture.pytrees import Structure, flatten, outline
from placer.errors import InputError, PlacerError, ProfilingError
from placer.profiler import profile_inputs
from placer.profiler.measure import measure_trial, ran_out
from placer.profiler.measurement import Measurement
from placer.profiler.memory import LayerMemory
from placer.profiler.timing import significant
from placer.profiler.trial import Trial, bring_input
from placer.schema import BatchOptions

_NAME = "(loss)"


@dataclass(frozen=True)
class Loss:
    """A loss function with the target of one micro-batch.

    Attributes:
        function: maps the model's result and the target to a scalar.
        target: its flattened leaves.
        structure: rebuilds the target from them.
        layout: the batch dimension of each leaf.
        values: the further values of the loss, by name, as empty tensors; filled when measured.
    """

    function: LossFunction
    target: Sequence[Any]
    structure: Structure
    layout: BatchLayout
    values: dict[str, Any] = field(default_factory=dict)

    def resized(self, sizes: Sequence[int] | None) -> list[Loss]:
        """Return the loss for micro-batches of these sizes, smallest first; itself if None."""
        if sizes is None:
            return [self]
        if all(dim is None for dim in self.layout.dims):
            return [self] * len(sizes)
        return [
            replace(self, target=target)
            for target in profile_inputs.resized(self.target, self.layout, sizes)
        ]

    def measure(
        self, graph: LayerGraph, layers: Sequence[Measurement], device: torch.device, repeats: int
    ) -> Measurement:
        """Measure the loss on one device.

        Args:
            graph: the graph whose result the loss reads.
            layers: the measurements of the graph's layers on this device.
            device: where it runs.
            repeats: how often each pass is timed.

        Raises:
            InputError: if it fails on such results and this target, does not return a number, or
                its value does not depend on a result.
            ProfilingError: if memory ran out.
        """
        try:
            with devices.current(device):
                # the trial treats targets like state, and results like reads
                goals = [bring_input(goal, device) for goal in self.target]
                trial = Trial(
                    self._layer(graph, device),
                    device,
                    goals,
                    _results(graph, layers, device),
                    graph.values,
                    True,
                )
                measured = measure_trial(trial, True, repeats)
                return as_run(measured, trial.reads, recorded=device.type == "cuda")
        except PlacerError:
            raise
        except Exception as error:  # a user's function may raise anything
            failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if ran_out(error):
                raise ProfilingError(f"loss_fn failed on {device}: {failure}") from error
            raise InputError(
                f"loss_fn failed on {device}, for {self._given(graph)}: {failure}"
            ) from error

    def _given(self, graph: LayerGraph) -> str:
        results = ", ".join(str(graph.values[name].shape) for name in graph.outputs)
        targets = ", ".join(
            str(tuple(goal.shape)) for goal in self.target if isinstance(goal, Tensor)
        )
        return f"results of shape {results}" + (
            f" and a target of shape {targets}" if targets else ""
        )

    def _layer(self, graph: LayerGraph, where: torch.device) -> Layer:
        assert graph.result is not None  # a graph without it was captured again
        result, function = graph.result, _there(self.function, where)

        def run(
            device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]
        ) -> tuple[Any, ...]:
            loss, values = loss_and_values(
                function(result.unflatten(reads), self.structure.unflatten(state))
            )
            require_real_number(loss)
            require_gradient(loss)
            self.values.update(outline(flatten(values)[1]))
            return (loss,)

        return Layer(_NAME, (), "", (), (), graph.outputs, (_NAME,), run, _NAME)


def given_loss(
    loss_fn: LossFunction | None,
    target: Any,
    training: bool,
    batch: int,
    options: BatchOptions = DEFAULT_OPTIONS,
) -> Loss | None:
    """Return the user's loss, or None.

    Args:
        loss_fn: the function.
        target: the target of one micro-batch.
        training: whether a training step is measured.
        batch: number of samples in the example inputs.
        options: the declared batch layout.

    Raises:
        InputError: if only one of the two is given, the loss has parameters, inference is measured,
            or the target has another batch size.
    """
    require_loss_with_target(loss_fn, target)
    if loss_fn is None:
        return None
    if not training:
        raise InputError(
            "loss_fn and target belong to training; leave them out with training=False"
        )
    require_loss_function(loss_fn)
    leaves, structure = flatten(target)
    refuse_arrays(target)
    layout = target_layout(target, leaves, structure, options, batch)
    return Loss(
        loss_fn,
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        structure,
        layout,
    )


def with_loss(
    profile: schema.Profile, graph: LayerGraph, loss: Loss, measured: Mapping[str, Measurement]
) -> schema.Profile:
    """Return a profile that counts the loss with the last layer that makes the result.

    Args:
        profile: the profile of the graph's layers.
        graph: the layers.
        loss: the loss and its target, which exists once for each micro-batch in flight.
        measured: the loss's measurement by device type.
    """
    makers = [
        layer.name for layer in graph.layers if not set(graph.outputs).isdisjoint(layer.writes)
    ]
    if not makers:
        raise InputError(
            "the model returns what no layer of it made, so a loss of it trains nothing; return "
            "the result of a layer, or leave out loss_fn"
        )
    target_bytes = sum(tensor_bytes(leaf) for leaf in loss.target if isinstance(leaf, Tensor))
    layers = tuple(
        _joined(layer, measured, target_bytes) if layer.name == makers[-1] else layer
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers, "with_loss": True})


def _joined(
    layer: schema.Layer, measured: Mapping[str, Measurement], target_bytes: int
) -> schema.Layer:
    """Return the layer followed by the loss: saved bytes add up, the larger workspace counts."""
    times, memories = (
        {kind: row.time for kind, row in measured.items()},
        [row.memory for row in measured.values()],
    )
    saved = max(memory.saved_bytes for memory in memories)
    pieces = max(memory.pieces_bytes for memory in memories)
    forward = max(memory.forward_workspace_bytes for memory in memories)
    return layer.model_copy(
        update={
            "forward_ms": _sum(
                layer.forward_ms, {kind: time.forward_ms for kind, time in times.items()}
            ),
            "backward_ms": _sum(
                layer.backward_ms, {kind: time.backward_ms for kind, time in times.items()}
            ),
            "host_ms": _sum(layer.host_ms, {kind: time.host_ms for kind, time in times.items()}),
            "saved_bytes": layer.saved_bytes + saved + target_bytes,
            # what the loss saves is part of ``saved_bytes`` already, so the layer's own peak
            # shrinks
            "forward_workspace_bytes": max(layer.forward_workspace_bytes - saved, pieces + forward),
            "input_grad_workspace_bytes": max(
                layer.input_grad_workspace_bytes or layer.backward_workspace_bytes,
                *(pieces + _input_grad_workspace(row) for row in memories),
            ),
            "recorded_workspace_bytes": max(
                layer.recorded_workspace_bytes or layer.backward_workspace_bytes,
                *(pieces + _recorded_workspace(row) for row in memories),
            ),
            "backward_workspace_bytes": max(
                layer.backward_workspace_bytes,
                *(pieces + row.backward_workspace_bytes for row in memories),
            ),
        }
    )


def _sum(times_ms: Mapping[str, float], more_ms: Mapping[str, float]) -> dict[str, float]:
    return {kind: significant(time + more_ms[kind]) for kind, time in times_ms.items()}


def as_run(measured: Measurement, results: Sequence[Any], recorded: bool) -> Measurement:
    """Return the loss's measurement, adjusted to its position after the model.

    Results that the loss only reads are kept anyway. A recorded pass owns its workspace
    permanently: a layer's workspace is used again for the activations of later layers, but nothing
    follows the loss. So its workspace counts as saved, once for each micro-batch in flight.

    Args:
        measured: the loss, measured as a layer of its own.
        results: the results that it read.
        recorded: whether passes are recorded as CUDA graphs.
    """
    memory = measured.memory
    only_read = sum(
        tensor_bytes(result)
        for index, result in enumerate(results)
        if isinstance(result, Tensor) and index not in memory.saved_reads
    )
    saved, workspace = memory.saved_bytes, max(0, memory.forward_workspace_bytes - only_read)
    # a recorded pass keeps its memory, and no later layer reuses it
    if recorded:
        saved, workspace = saved + workspace, 0
    return replace(
        measured, memory=replace(memory, saved_bytes=saved, forward_workspace_bytes=workspace)
    )


def _results(graph: LayerGraph, layers: Sequence[Measurement], device: torch.device) -> list[Any]:
    """Return random results between 0 and 1, valid for any loss; numbers are 1."""
    sizes = {
        name: size
        for layer, row in zip(graph.layers, layers, strict=True)
        for name, size in zip(layer.writes, row.write_bytes, strict=False)
    }
    return [_result(graph.values[name], sizes.get(name), device) for name in graph.outputs]


def _result(value: Value, size_bytes: int | None, device: torch.device) -> Any:
    if value.dtype is None:
        return 1
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    made = torch.empty(value.shape, device=device).uniform_(0.01, 0.99).to(value.dtype)
    # autocast may produce another dtype than the capture did
    if torch.is_autocast_enabled(device.type):
        other = made.to(torch.get_autocast_dtype(device.type))
        return other if tensor_bytes(other) == size_bytes else made
    return made


def _there(function: LossFunction, device: torch.device) -> LossFunction:
    """Return the function; for a module, a copy with its buffers on the device."""
    return copy.deepcopy(function).to(device) if isinstance(function, nn.Module) else function


__all__ = ["Loss", "as_run", "given_loss", "with_loss"]


def _input_grad_workspace(memory: LayerMemory) -> int:
    """Return the workspace of an input-gradient pass; 0 stands for the eager backward pass."""
    return memory.input_grad_workspace_bytes or memory.backward_workspace_bytes


def _recorded_workspace(memory: LayerMemory) -> int:
    """Return the workspace of a recorded pass; 0 stands for the eager backward pass."""
    return memory.recorded_workspace_bytes or memory.backward_workspace_bytes
