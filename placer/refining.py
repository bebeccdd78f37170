"""Closing the loop: a placement's stages run as the executor runs them, and the profile is corrected by their times.

    profile ──▶ solve ──▶ placement ──▶ stages on their devices ──▶ times ──▶ corrected profile ──▶ solve ...

Layers that run one after another cost less or more than apart, the loss is part of the last stage, and gradients are
added to those of earlier micro-batches: all that shows here, and nowhere before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placer import devices
from placer.correction import improve
from placer.errors import InputError, ProfilingError, kind_of
from placer.executor.compiled_segments import Backend, backend_of
from placer.executor.dataflow import DataFlow
from placer.executor.inference.stream import Known
from placer.executor.segments import MicroBatch, Segment, segments
from placer.graph import arguments
from placer.graph.batch import batch_size
from placer.graph.given import refuse_half_a_loss, refuse_no_loss, refuse_no_module
from placer.graph.layers import tensor_bytes
from placer.graph.losses import LossFunction
from placer.graph.structure import flatten, flatten_inputs
from placer.profiler import inputs
from placer.profiler.profile import profile as measure_profile
from placer.schema import Constraints, Placement, PlacementRequest, Profile
from placer.schema.refinement import Refinement, StageTime
from placer.solver.solve import solve

Pass = Callable[[], None]
Timer = Callable[[Sequence[Pass], torch.device, int], list[float]]
"""From passes that run one after another, their device and a number of repeats to the time of each, in ms."""

_WARM_S = 0.5
"""So long a device works before it is timed: under a load that lasts, one at its power limit lowers its clocks."""


def refine(
    placement: Placement,
    model: nn.Module,
    example_inputs: Any,
    *,
    profile: Profile | None = None,
    request: PlacementRequest | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    target: Any = None,
    rounds: int = 3,
    tolerance: float = 0.01,
    repeats: int = 7,
    compile: bool | Backend = False,
    timer: Timer | None = None,
) -> Refinement:
    """Measure a placement's stages, correct the profile by them, and solve again, until nothing moves.

    The model is left as it was and where it was: parameters, gradients, buffers, modes; so are the random number
    generators.

    Args:
        placement: of the model, as ``suggest`` or ``solve`` gave it.
        model: the model.
        example_inputs: of one micro-batch, as for ``profile``.
        profile: the one that the placement rests on; the request's, or a new one of the placement's layers, if None.
        request: the question that the placement answers, for its constraints; one like the placement if None.
        loss_fn: ``loss_fn(output, target)``, in training; its time goes to the layer that feeds it. If None, a mean of
            the outputs, which takes next to no time.
        target: of one micro-batch, for ``loss_fn``.
        rounds: the most placements that are measured.
        tolerance: a gain below this share of the objective is not worth another round.
        repeats: how often each pass is timed; medians are kept.
        compile: as for ``DataFlow.train_step``, or ``DataFlow.stream`` in inference: stages are measured as those run
            them, and tell what it gained, or why they were not compiled.
        timer: times passes on a device; by default CUDA graphs on a GPU, the host's clock on a CPU stand-in.

    Returns:
        The best placement that was measured, the corrected profile, and every round's prediction and measurement.

    Raises:
        InputError: there is no placement, or rounds or repeats are below 1; the profile is of other layers, another
            model or another batch; a loss or a target is given without the other; or torch knows no such backend.
        ProfilingError: the model cannot be captured, so its stages cannot be run.
    """
    if not isinstance(placement, Placement):
        raise InputError(f"placement is {kind_of(placement)}; give one that suggest or solve returned")
    if not placement.layer_devices:
        raise InputError(f"the placement is {placement.status} and places no layer, so there is nothing to measure")
    for name, number in (("rounds", rounds), ("repeats", repeats)):
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{name} is {number!r}; give a whole number, at least 1")
    refuse_no_module(model)
    refuse_half_a_loss(loss_fn, target)
    if loss_fn is not None:
        refuse_no_loss(loss_fn)
    backend = backend_of(compile)
    _refuse_others(profile, request)
    if request is None:
        request = _request(placement, profile or _profile(placement, model, example_inputs, loss_fn, target))
    elif profile is not None:
        request = request.model_copy(update={"profile": profile})
    request = _of_one_size(request, placement)
    _refuse_unlike(request.profile, placement, example_inputs)
    timed = timer or device_times
    stages = _Stages(model, example_inputs, loss_fn, target, repeats, backend, timed, request.profile)
    return improve(placement, request, stages.measure, solve, rounds, tolerance)


def device_times(passes: Sequence[Pass], device: torch.device, repeats: int) -> list[float]:
    """The median time of each pass, in ms, when they run one after another, again and again.

    Args:
        passes: work that was issued before at least once.
        device: where they run.
        repeats: how often each is timed.
    """
    if device.type == "cuda":
        _warm_up(passes, device)
        return [statistics.median(times) for times in devices.queued_ms(passes, device, repeats)]
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for run, column in zip(passes, times, strict=True):
            began = time.perf_counter()
            run()
            column.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(column) for column in times]


def _warm_up(passes: Sequence[Pass], device: torch.device) -> None:
    """Until the clocks are those of a device that works on this."""
    began = time.perf_counter()
    while time.perf_counter() - began < _WARM_S:
        for run in passes:
            run()
        devices.synchronise(device)


class _Stages:
    """Runs a model's stages under any placement, and times them."""

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
        self._param_bytes = sum(layer.param_bytes for layer in profile.layers) if profile.graph_hash else None
        args, kwargs = inputs.split(example_inputs)
        tensors, structure = inputs.trackable(args, kwargs)
        self._args, self._kwargs = structure.unflatten(tensors)
        self._loss_fn = loss_fn or _mean
        self._target = target
        self._repeats = repeats
        self._backend = backend
        self._timer = timer

    def measure(self, placement: Placement) -> list[StageTime]:
        """The time of each stage for one micro-batch."""
        model = self._model
        places = [devices.parse(name) for name in dict.fromkeys(placement.layer_devices.values())]
        with devices.keep_random_state(places), inputs.mode(model, placement.training), _untouched(model):
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
                "a training step takes positional or keyword arguments; give example_inputs as one of both"
            )
        step = flow.train_step(self._loss_fn, None, compile=self._backend or False)
        step(batch, self._target, chunks=1)
        (pipeline,) = step.pipelines
        loss = self._loss_ms(flow)
        measured = []
        for stage in pipeline.stages:
            slot = stage.slots[0]
            passes = [slot.forward, slot.backward] + ([slot.weights] if stage.split else [])
            forward, backward, *weights = self._timer(passes, stage.device, self._repeats)
            last = stage.head is not None
            if stage.device in flow.recomputed():  # its backward pass has one more forwards, which is no layer's
                backward = max(0.0, backward - forward)
            measured.append(
                StageTime(
                    device=str(stage.device),
                    layers=_names(stage.segment),
                    forward_ms=forward,
                    backward_ms=backward + sum(weights),
                    weights_ms=weights[0] if weights else None,
                    loss_forward_ms=min(loss[0], forward) if last else 0.0,
                    loss_backward_ms=min(loss[1], backward) if last else 0.0,
                    compiled=stage.compiled,
                    not_compiled_because=stage.not_compiled_because,
                )
            )
        return measured

    def _loss_ms(self, flow: DataFlow) -> tuple[float, float]:
        """The time of the loss alone, forwards and backwards."""
        with torch.no_grad():
            outputs = flow(*self._args, chunks=1, **self._kwargs)
        leaves, structure = flatten(outputs)
        where = flow.output_device
        leaves = [
            leaf.detach().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        goals, goal_structure = flatten(self._target)
        goals = [devices.move(goal, where) if isinstance(goal, Tensor) else goal for goal in goals]
        roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        made: list[Tensor] = []

        def forward() -> None:
            made.clear()  # a graph of autograd that lived on from another lane would be waited for in a recording
            made.append(self._loss_fn(structure.unflatten(leaves), goal_structure.unflatten(goals)))

        def backward() -> None:
            torch.autograd.grad(made[0], roots, retain_graph=True, allow_unused=True)

        forward_ms, backward_ms = self._timed([forward, backward], where)
        return forward_ms, backward_ms

    def _infer(self, flow: DataFlow) -> list[StageTime]:
        tensors, structure = flatten_inputs(self._args, self._kwargs)
        capture = flow.captured(tensors, structure)
        assert capture is not None  # else it was refused
        if self._backend is not None:
            return self._infer_compiled(flow, Known(capture, tensors, self._backend))
        graph, places = flow.layers(capture)
        parts = segments(graph, places, lambda name, place: devices.move(graph.state[name].detach(), place))
        batch = MicroBatch(graph.inputs, tensors)
        measured = []
        for part in parts:
            made = {name for step in part.steps for name in step.layer.writes}
            reads = {name: batch.read(name, part.device) for name in _reads(part) if name not in made}
            (forward,) = self._timed([partial(_forward, part, reads)], part.device)
            measured.append(StageTime(device=str(part.device), layers=_names(part), forward_ms=forward))
            with torch.no_grad():
                part.run(batch)
        return measured

    @torch.no_grad()
    def _infer_compiled(self, flow: DataFlow, batch: Known) -> list[StageTime]:
        measured = []
        for stage in flow.streamed(batch):
            (forward,) = self._timer([stage.slots[0].run], stage.device, self._repeats)
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
        """The times of passes that were not run before, as CUDA graphs where that can be."""
        for run in passes:
            run()
        if device.type == "cuda":
            with suppress(devices.NotRecordable):
                passes = devices.record(passes, device)
        return self._timer(passes, device, self._repeats)

    def _refuse_others(self, flow: DataFlow) -> None:
        """A model without stages, or one whose layers are called like the profile's and are not the profile's."""
        capture = flow.captured(*flatten_inputs(self._args, self._kwargs))
        if capture is None:
            self._refuse_what_fails(flow)
            raise ProfilingError(
                f"{type(self._model).__name__} runs through hooks, so its stages cannot be measured apart: "
                f"{flow.not_captured_because}"
            )
        graph, _ = flow.layers(capture)
        used = {id(state): state for layer in graph.layers for state in map(graph.state.__getitem__, layer.state)}
        param_bytes = sum(tensor_bytes(state) for state in used.values() if isinstance(state, nn.Parameter))
        if self._param_bytes not in (None, param_bytes):
            raise InputError(
                f"the layers of {type(self._model).__name__} have {param_bytes} bytes of parameters, those of the "
                f"profile {self._param_bytes}; give the model that was profiled, made with the same arguments"
            )

    @torch.no_grad()
    def _refuse_what_fails(self, flow: DataFlow) -> None:
        """Inputs that the model itself fails on, as it does when it is captured."""
        try:
            flow(*self._args, chunks=1, **self._kwargs)
        except Exception as error:  # whatever the model's own code may raise
            text = f"the model fails on the example inputs: {type(error).__name__}: {error}"
            text += arguments.advice(error, self._args)
            raise InputError(f"{text}; give inputs such as it was profiled with") from error


def _refuse_others(profile: Any, request: Any) -> None:
    for name, given, kind in (("profile", profile, Profile), ("request", request, PlacementRequest)):
        if not (given is None or isinstance(given, kind)):
            wanted = kind.__name__
            raise InputError(
                f"{name} is {kind_of(given)}; give a {wanted}, which {wanted}.model_validate_json(text) makes of JSON"
            )


def _of_one_size(request: PlacementRequest, placement: Placement) -> PlacementRequest:
    """The question with the micro-batches that were placed alone: times of these correct no profile of others."""
    if not request.profiles:
        return request
    sizes = {profile.batch_size: profile for profile in (request.profile, *request.profiles)}
    placed = sizes.get(placement.batch_size, request.profile)
    chosen = {"profile": placed, "profiles": (), "cluster": request.placed_on}
    return request.model_copy(update={**chosen, "batch_size": request.whole_batch_size})


def _refuse_unlike(profile: Profile, placement: Placement, example_inputs: Any) -> None:
    """A profile of other layers or of another micro-batch would be corrected by times that are not its own."""
    known = {layer.name for layer in profile.layers}
    unknown = next((name for name in placement.layer_devices if name not in known), None)
    if unknown is not None:
        raise InputError(
            f"the placement has a layer {unknown!r}, and the profile has none; give the profile that it was solved from"
        )
    samples = batch_size(flatten(inputs.split(example_inputs))[0])
    if profile.graph_hash and profile.batch_size != samples:  # one that was written by hand need not say its batch
        raise InputError(
            f"example_inputs are a micro-batch of {samples}, and the profile is of one of {profile.batch_size}; "
            "give both of one size"
        )
    if profile.graph_hash and profile.batch_size != placement.batch_size:
        raise InputError(
            f"the placement is of micro-batches of {placement.batch_size}, and the profile is of one of "
            f"{profile.batch_size}; give the profile of the placement's size"
        )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Gives parameters their gradients, and buffers their values, back."""
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


def _reads(part: Segment) -> list[str]:
    return list(dict.fromkeys(name for step in part.steps for name in step.layer.reads))


def _names(part: Segment) -> tuple[str, ...]:
    return tuple(step.layer.name for step in part.steps)


def _mean(output: Any, target: Any) -> Tensor:
    """A loss of next to no time: the sum of the means of all that can be differentiated."""
    again = not torch.is_grad_enabled()  # the first of two passes forwards, which keeps nothing
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    found = [leaf.float().mean() for leaf in leaves if leaf.requires_grad or (again and leaf.is_floating_point())]
    if not found:
        raise InputError("the model returns nothing that a gradient could come from: give a loss_fn")
    return torch.stack(found).sum()


def _profile(
    placement: Placement, model: nn.Module, example_inputs: Any, loss_fn: LossFunction | None, target: Any
) -> Profile:
    """A profile of the placement's layers on the devices that it uses, with the loss where it has a target."""
    names = list(dict.fromkeys(placement.layer_devices.values()))
    has_loss = placement.training and loss_fn is not None
    return measure_profile(
        model,
        example_inputs,
        names,
        training=placement.training,
        granularity=tuple(placement.layer_devices),
        loss_fn=loss_fn if has_loss else None,
        target=target if has_loss else None,
    )


def _request(placement: Placement, profile: Profile) -> PlacementRequest:
    """A question like the one that the placement answers, as far as it tells."""
    return PlacementRequest(
        profile=profile,
        objective=placement.objective,
        constraints=Constraints(contiguous=placement.contiguous, recompute="auto" if placement.recompute else "never"),
        training=placement.training,
        chunks=placement.chunks,
        schedule=placement.schedule,
        steps="alone" if placement.step is None else placement.step.steps,
    )
