"""Times of a placement's stages, run on their devices as the executor runs them.

These runs show what separate layers cannot: consecutive layers take more or less time together, the
last stage includes the loss, and gradients accumulate over micro-batches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture import input_forms
from placer.capture.layers import tensor_bytes
from placer.capture.loss_functions import loss_and_values
from placer.capture.pytrees import flatten
from placer.errors import InputError, ProfilingError
from placer.executor.dataflow import DataFlow
from placer.executor.engine.compiled_segments import Backend
from placer.executor.inference.stream import Known
from placer.executor.segments import MicroBatch, Segment, segments
from placer.profiler import profile_inputs
from placer.schema import Placement, Profile
from placer.schema.refinement import StageTime

Pass = Callable[[], None]
Timer = Callable[[Sequence[Pass], torch.device, int], list[float]]
"""A function from (consecutive passes, device, repeats) to the time of each pass in ms."""

# Seconds of work before timing, after which a device at its power limit has lowered its clocks.
_WARM_S = 0.2


class Stages:
    """A runner and timer of a model's stages under any placement; the model stays unchanged.

    Args:
        model: the model.
        example_inputs: one micro-batch.
        loss_fn: ``loss_fn(output, target)``, in training; None for a mean of the outputs.
        target: the target of one micro-batch for ``loss_fn``.
        repeats: how often each pass is timed.
        backend: of torch.compile; None for uncompiled stages.
        timer: times passes on a device.
        profile: the profile of the model, to verify that it is the same model.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        target: Any,
        repeats: int,
        backend: Backend | None,
        timer: Timer,
        profile: Profile,
    ) -> None:
        self._model = model
        self._param_bytes = (
            sum(layer.param_bytes for layer in profile.layers) if profile.graph_hash else None
        )
        args, kwargs = input_forms.call_arguments(example_inputs, "example_inputs")
        tensors, structure, _ = profile_inputs.trackable(args, kwargs)
        self._args, self._kwargs = structure.unflatten(tensors)
        self._loss_fn = loss_fn or _mean
        self._target = target
        self._repeats = repeats
        self._backend = backend
        self._timer = timer

    def measure(self, placement: Placement) -> list[StageTime]:
        """Return the time of each stage for one micro-batch.

        Of a placement with replicas, the stages of the first pipeline run, with its share.

        Raises:
            InputError: if the model rejects the inputs, or its parameters differ in size from the
                profile's.
            ProfilingError: if the model cannot be captured, so its stages cannot run separately.
        """
        model, placement = self._model, _first_pipeline(placement)
        places = [devices.parse(name) for name in dict.fromkeys(placement.layer_devices.values())]
        with (
            devices.keep_random_state(places),
            profile_inputs.mode(model, placement.training),
            _untouched(model),
        ):
            flow = DataFlow(model, places)
            try:
                flow.update_flow(placement)
                self._refuse_others(flow)
                return self._train(flow) if placement.training else self._infer(flow)
            finally:
                flow.undo()
                devices.release_cache()

    def _train(self, flow: DataFlow) -> list[StageTime]:
        batch: Any = self._kwargs if self._kwargs and not self._args else self._args
        if self._args and self._kwargs:
            raise InputError(
                "a training step takes positional or keyword arguments; give example_inputs as one "
                "of both"
            )
        step = flow.train_step(self._loss_fn, None, compile=self._backend or False)
        # one real step builds and records the pipeline, whose passes are then timed
        step(batch, self._target, chunks=1)
        (pipeline,) = step.pipelines
        loss = self._loss_ms(flow)
        measured = []
        for stage in pipeline.stages:
            slot = stage.slots[0]
            passes = [slot.passes[phase] for phase in stage.phases]
            forward, backward, *weights = self._timer(passes, stage.device, self._repeats)
            last = stage.head is not None
            # a recomputed stage runs forward again in its backward pass, which the solver adds
            # itself
            if stage.device in flow.settings.recomputed():
                backward = max(0.0, backward - forward)
            measured.append(
                StageTime(
                    device=str(stage.device),
                    layers=_names(stage.segment),
                    forward_ms=forward,
                    backward_ms=backward + sum(weights),
                    weight_grad_ms=weights[0] if weights else None,
                    loss_forward_ms=min(loss[0], forward) if last else 0.0,
                    loss_backward_ms=min(loss[1], backward) if last else 0.0,
                    compiled=stage.compiled,
                    not_compiled_because=stage.not_compiled_because,
                )
            )
        return measured

    def _loss_ms(self, flow: DataFlow) -> tuple[float, float]:
        """Return the forward and backward time of the loss by itself, in ms."""
        with torch.no_grad():
            outputs, where = flow.calls.run_for_loss(self._args, self._kwargs)
        leaves, structure = flatten(outputs)
        leaves = [
            leaf.detach().requires_grad_(leaf.is_floating_point())
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        goals, goal_structure = flatten(self._target)
        goals = [devices.move(goal, where) if isinstance(goal, Tensor) else goal for goal in goals]
        roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        made: list[Tensor] = []

        def forward() -> None:
            # a live autograd graph from another stream would add a dependency on it to the
            # recording
            made.clear()
            loss, _ = loss_and_values(
                self._loss_fn(structure.unflatten(leaves), goal_structure.unflatten(goals))
            )
            made.append(loss)

        def backward() -> None:
            torch.autograd.grad(made[0], roots, retain_graph=True, allow_unused=True)

        forward_ms, backward_ms = self._timed([forward, backward], where)
        return forward_ms, backward_ms

    def _infer(self, flow: DataFlow) -> list[StageTime]:
        inputs = flow.placed.laid_out((self._args, self._kwargs))
        capture, tensors = flow.placed.captured(inputs), inputs.tensors
        assert capture is not None  # _refuse_others has raised otherwise
        if self._backend is not None:
            return self._infer_compiled(flow, Known(capture, tensors, self._backend))
        graph, places = flow.placed.layers(capture)
        parts = segments(
            graph, places, lambda name, place: devices.move(graph.state[name].detach(), place)
        )
        batch = MicroBatch(graph.inputs, tensors)
        measured = []
        for part in parts:
            # inputs from other segments are copied before timing, so transfers do not count
            made = {name for step in part.steps for name in step.layer.writes}
            reads = {
                name: batch.read(name, part.device) for name in _reads(part) if name not in made
            }
            (forward,) = self._timed([partial(_forward, part, reads)], part.device)
            measured.append(
                StageTime(device=str(part.device), layers=_names(part), forward_ms=forward)
            )
            with torch.no_grad():
                part.run(batch)
        return measured

    @torch.no_grad()
    def _infer_compiled(self, flow: DataFlow, batch: Known) -> list[StageTime]:
        measured = []
        for stage in flow.calls.streams.stages(batch):
            (forward,) = self._timer(
                [stage.slots[0].passes["forward"]], stage.device, self._repeats
            )
            measured.append(
                StageTime(
                    device=str(stage.device),
                    layers=_names(stage.segment),
                    forward_ms=forward,
                    compiled=stage.compiled,
                    not_compiled_because=stage.not_compiled_because,
                )
            )
        return measured

    def _timed(self, passes: Sequence[Pass], device: torch.device) -> list[float]:
        """Return the times of new passes, recorded as CUDA graphs if possible."""
        for run in passes:
            run()
        if device.type == "cuda":
            with suppress(devices.NotRecordable):
                passes = devices.record(passes, device)
        return self._timer(passes, device, self._repeats)

    def _refuse_others(self, flow: DataFlow) -> None:
        """Raise for a model without stages, or one whose parameters differ from the profile's."""
        capture = flow.placed.captured(flow.placed.laid_out((self._args, self._kwargs)))
        if capture is None:
            self._refuse_what_fails(flow)
            raise ProfilingError(
                f"{type(self._model).__name__} runs through hooks, so its stages cannot be "
                f"measured apart: {flow.not_captured_because}"
            )
        graph, _ = flow.placed.layers(capture)
        used = {
            id(state): state
            for layer in graph.layers
            for state in map(graph.state.__getitem__, layer.state)
        }
        param_bytes = sum(
            tensor_bytes(state) for state in used.values() if isinstance(state, nn.Parameter)
        )
        if self._param_bytes not in (None, param_bytes):
            raise InputError(
                f"the layers of {type(self._model).__name__} have {param_bytes} bytes of "
                f"parameters, the profile's layers {self._param_bytes}; give the model that was "
                "profiled, made with the same arguments"
            )

    @torch.no_grad()
    def _refuse_what_fails(self, flow: DataFlow) -> None:
        """Raise an InputError for inputs that the model itself fails on."""
        try:
            flow(*self._args, chunks=1, **self._kwargs)
        except Exception as error:  # the model's own code may raise anything
            text = f"the model fails on the example inputs: {type(error).__name__}: {error}"
            text += input_forms.input_advice(error, self._args)
            raise InputError(f"{text}; give inputs like the profiled ones") from error


def device_times(passes: Sequence[Pass], device: torch.device, repeats: int) -> list[float]:
    """Return the time of each pass in ms, when they repeatedly run one after another.

    On CUDA this is the mean under a sustained load, since clocks oscillate at the power limit (see
    ``placer.devices.timing.sustained_load``). On the CPU it is the median.

    Args:
        passes: work that was issued at least once before.
        device: where they run.
        repeats: how often each is timed; on CUDA, in each of several rounds during two seconds.
    """
    if device.type == "cuda":
        return _under_lasting_load(passes, device, repeats)
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for run, column in zip(passes, times, strict=True):
            began = time.perf_counter()
            run()
            column.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(column) for column in times]


def _under_lasting_load(passes: Sequence[Pass], device: torch.device, repeats: int) -> list[float]:
    """Return the mean over two seconds of the medians of ``repeats`` timings."""
    _warm_up(passes, device)
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while not rounds or time.perf_counter() - began < devices.LASTING_S:
        rounds.append(
            [statistics.median(times) for times in devices.queued_ms(passes, device, repeats)]
        )
    return [statistics.fmean(times) for times in zip(*rounds, strict=True)]


def _warm_up(passes: Sequence[Pass], device: torch.device) -> None:
    """Run the passes until a device at its power limit has lowered its clocks."""
    began = time.perf_counter()
    while time.perf_counter() - began < _WARM_S:
        for run in passes:
            run()
        devices.synchronise(device)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore the gradients of parameters and the values of buffers."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    values = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)


@torch.no_grad()
def _forward(part: Segment, reads: Mapping[str, Any]) -> None:
    part.run(MicroBatch(reads.keys(), reads.values()))


def _first_pipeline(placement: Placement) -> Placement:
    """Return a placement without replicas: what the first pipeline runs."""
    own = set(placement.layer_devices.values())
    changed = {
        "replicas": {},
        "recompute": tuple(name for name in placement.recompute if name in own),
        "batch_size": placement.batch_size // math.lcm(*placement.replicas_by_stage),
    }
    return placement.model_copy(update=changed)


def _reads(part: Segment) -> list[str]:
    return list(dict.fromkeys(name for step in part.steps for name in step.layer.reads))


def _names(part: Segment) -> tuple[str, ...]:
    return tuple(step.layer.name for step in part.steps)


def _mean(output: Any, target: Any) -> Tensor:
    """Return a loss of almost no cost: the sum of the means of all differentiable outputs."""
    # the first forward pass of a recomputed stage runs without gradients
    again = not torch.is_grad_enabled()
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    found = [
        leaf.float().mean()
        for leaf in leaves
        if leaf.requires_grad or (again and leaf.is_floating_point())
    ]
    if not found:
        raise InputError(
            "the model returns nothing that a gradient could come from: give a loss_fn"
        )
    return torch.stack(found).sum()
