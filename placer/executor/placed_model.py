"""A model on the devices of its layers: its captures, their segments, and its hooks.

    call ──▶ capture that covers it ──▶ layers, each with its device ──▶ segments, kept
        └──▶ none: the model runs through hooks

Calls, streams and training steps are built on it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from placer import devices
from placer.capture.batch_dims.batch_layout import Call, Part
from placer.capture.export.export import Exported
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import flatten_inputs
from placer.errors import InputError
from placer.executor.checks.capture_check import difference
from placer.executor.engine.checkpointed_segments import with_checkpoints
from placer.executor.engine.fill_drain import run
from placer.executor.engine.segment_order import stage_by_stage
from placer.executor.hook_path import HookPath
from placer.executor.model_captures import Capture, ModelCaptures
from placer.executor.output_joining import Joining, join
from placer.executor.segments import MicroBatch, Segment, StateLookup, segments
from placer.executor.settings import Settings
from placer.executor.state.assignment import Assignment
from placer.executor.state.batch_statistics import BatchStatistics
from placer.executor.state.model_lock import ModelLock
from placer.executor.state.placed_weights import PlacedWeights
from placer.executor.state.resting.resting_weights import RestingWeights
from placer.executor.state.resting.weight_slots import Unit
from placer.schema import BatchOptions

Planned: TypeAlias = tuple[LayerGraph, list[Segment]]
"""The layers of a capture, and their segments."""


class PlacedModel:
    """A model, its captures, and the devices of its layers.

    Args:
        weights: the model's state.
        settings: of the flow.

    Attributes:
        module: the model.
        weights: the model's state.
        captures: of the model.
        hooks: for models that cannot be captured.
        lock: held by the thread whose call or stream runs; all flows of a model share one.
        gradients_wait: whether the next training step adds to existing gradients.
    """

    def __init__(self, weights: PlacedWeights, settings: Settings) -> None:
        self.module = weights.module
        self.weights = weights
        self.gradients_wait = False
        self._settings = settings
        self._start()

    def _start(self) -> None:
        self.lock = _lock_of(self.module)
        self.captures = ModelCaptures(self.module, self.difference)
        self.hooks = HookPath(self.module)
        self._plans: dict[tuple[Capture, int], Planned] = {}
        self._units: dict[Capture, dict[torch.device, list[Unit]]] = {}
        self._resting_for: Any = None
        self._planned_for: Any = None

    def sharing(self, settings: Settings) -> PlacedModel:
        """Return the model with a map of its own; it shares state, captures and hooks.

        Args:
            settings: with the map.
        """
        other = PlacedModel(self.weights, settings)
        other.captures, other.hooks = self.captures, self.hooks
        return other

    @property
    def assignment(self) -> Assignment | None:
        """Return the devices of the layers since the last ``update_flow``; None before it."""
        return self._settings.assignment

    @property
    def needs_captures(self) -> bool:
        """Return whether no call may run through hooks because a capture would take long."""
        return self.weights.clones is not None or self._settings.deferred_batch_norm

    @property
    def not_captured_because(self) -> str:
        """Return why the model runs through hooks in its present mode; empty unless it does."""
        with self.lock:
            return self.captures.refused.get(self.captures.mode(), "")

    @contextmanager
    def moved(
        self,
        assignment: Assignment,
        optimizers: Sequence[torch.optim.Optimizer],
        clear_cache: bool,
    ) -> Iterator[None]:
        """Move the state to its devices, and move it back if the block fails.

        Args:
            assignment: the devices.
            optimizers: whose state moves too, now and later.
            clear_cache: whether to return cached device memory.
        """
        self._forget_slots()
        with self.weights.moved(assignment, optimizers, clear_cache):
            if self.weights.clones is None:
                self.captures.accept_changes()
            self.weights.note_places(self.captures.state())
            yield

    def restore(self) -> None:
        """Restore the devices of all state, and all gradient flags."""
        self._forget_slots()
        self.weights.restore()
        self.captures.accept_changes()

    def laid_out(self, call: Call, options: BatchOptions | None = None) -> Part:
        """Return the flattened inputs of a call with their batch dimensions.

        Args:
            call: positional and keyword arguments.
            options: the declared batch layout; the flow's by default.
        """
        own = self._settings.batch_options
        tensors, inputs = flatten_inputs(*call)
        layout = self.captures.layout(call, tensors, inputs, own if options is None else options)
        if options is not None and options is not own:
            layout.refuse_misfit()
        return Part(tensors, inputs, layout.dims)

    def captured(self, part: Part, needed: bool = True) -> Capture | None:
        """Return the capture for inputs like these; None if the model runs through hooks.

        Args:
            part: the inputs.
            needed: False allows hooks if consecutive calls would each need their own capture.
        """
        captures = self.captures.captures([part], needed or self.needs_captures)
        return None if captures is None else captures[0]

    def has_replicas(self, capture: Capture) -> bool:
        """Return whether all pipelines may run a capture's batches.

        They have copies of the weights. What layers change, and random numbers, come from the first
        pipeline.
        """
        settings = self._settings
        if settings.replication.count == 1 or self.module.training or settings.resting:
            return False
        known = next(iter(capture.graphs.values()), None)
        graph = known or self.captures.graph(capture, settings.granularity)
        return not any(layer.mutated or layer.random for layer in graph.layers)

    def layers(self, capture: Capture, pipeline: int = 0) -> tuple[LayerGraph, list[torch.device]]:
        """Return a capture's layers, grouped by device where possible, and the device of each.

        Their state is moved into place.

        Args:
            capture: the capture.
            pipeline: of the placement; the first one by default.
        """
        assert self.assignment is not None
        graph = self.captures.graph(capture, self._settings.granularity)
        graph, places = stage_by_stage(graph, self.assignment.of_layers(graph))
        replication = self._settings.replication
        self.weights.settle(graph, places, self.captures.state(), replication)
        return graph, replication.places(pipeline, places)

    def current_state(self, graph: LayerGraph) -> StateLookup:
        """Return the lookup of the state that layers use, after updating clones."""
        self.weights.refresh_clones()
        return self.weights.lookup(graph)

    def _forget_slots(self) -> None:
        """Free the slots of weights that rest on the host, before their memory is needed."""
        if self.hooks.resting is not None:
            for slots in self.hooks.resting.slots:
                devices.synchronise(slots.device)
                slots.held = []  # units refer to their slots
        self.hooks.resting = self._resting_for = self._planned_for = None
        self._plans, self._units = {}, {}

    def prepare_resting(self) -> None:
        """Let hooks and captures read the weights that rest on the host from the devices' slots."""
        assignment = self.assignment
        parameters = () if assignment is None else self.weights.rest(assignment)
        key = assignment, self.weights.version, parameters
        if key == self._resting_for:
            return
        self._forget_slots()
        self._resting_for = key
        if assignment is not None and assignment.resting:
            self.hooks.resting = RestingWeights(self.module, assignment)

    def reading(self, capture: Capture, times: int = 1) -> AbstractContextManager[None]:
        """Provide the weights that rest on the host to passes through a capture's segments.

        Args:
            capture: of the first micro-batch.
            times: how often each layer runs before the next one.
        """
        resting = self.hooks.resting
        return nullcontext() if resting is None else resting.reading(self._units[capture], times)

    def plan(self, capture: Capture, pipeline: int = 0) -> Planned:
        """Return the segments of a capture under the map in force, made when first needed.

        Args:
            capture: the capture.
            pipeline: of the placement; the first one by default.
        """
        self._drop_outdated_plans()
        key = capture, pipeline
        if key not in self._plans:
            graph, places = self.layers(capture, pipeline)
            self._drop_outdated_plans()  # if that moved state
            # With replicas most parameters are elsewhere. In training a call is rare, and copies of
            # them would stay in addition to the copies of a training step.
            replicated = self._settings.replication.count > 1
            make_copy = None if replicated and self.module.training else self.weights.copies.get
            parts = segments(graph, places, self.weights.lookup(graph), make_copy)
            if self.hooks.resting is not None:
                self._units[capture] = self.hooks.resting.attach(parts)
            self._plans[key] = graph, with_checkpoints(parts, capture.exported.checkpoints)
        return self._plans[key]

    def _drop_outdated_plans(self) -> None:
        now = self.assignment, self.captures.times_forgotten, self.weights.version
        if now != self._planned_for:
            self._plans, self._units, self._planned_for = {}, {}, now
        self.prepare_resting()

    def planned(self, captures: Sequence[Capture], pipelines: Sequence[int] = ()) -> list[Planned]:
        """Return the segments of each micro-batch, once their state is in place.

        Args:
            captures: of each micro-batch.
            pipelines: of each micro-batch; the first one if empty.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.planned(captures, pipelines)
        self.weights.refresh_clones()
        self.bring_back()
        each = pipelines or [0] * len(captures)
        plans = [self.plan(*item) for item in zip(captures, each, strict=True)]
        for _, parts in plans:
            for part in parts:
                part.refresh()
        return plans

    def bring_back(self) -> None:
        """Move state back that another flow, or ``model.to``, has moved."""
        if self.assignment is not None and self.weights.bring_back(
            self.assignment, self.captures.state()
        ):
            self.captures.accept_changes()
        self.prepare_resting()

    def run_unsplit(self, call: Call) -> Any:
        """Run the model without cutting the call: through hooks if it is placed and allows them.

        It runs captured if it has clones, or modules that allow no hooks.

        Args:
            call: positional and keyword arguments.
        """
        if self.assignment is None:
            args, kwargs = call
            return self.module(*args, **kwargs)
        if self._may_have_hooks():
            self.bring_back()
            return self._hooked(call)[0]
        part = self.laid_out(call)
        captures = self.captures.captures([part])
        if captures is None:
            raise InputError(f"the model cannot be captured: {self.not_captured_because}")
        (plan,) = self.planned(captures)
        return self._through(plan, captures[0], part.tensors)[0]

    def difference(self, capture: Capture, part: Part) -> str:
        """Return how the results of a new graph differ from the placed model's.

        Args:
            capture: the graph.
            part: inputs that it holds for.

        Returns:
            A description; an empty string if nothing differs.
        """
        if self.assignment is None or not self._may_have_hooks():
            return ""

        def captured(call: Call) -> tuple[Any, Any]:
            tensors = self.laid_out(call).tensors
            result, made = self._through(self.plan(capture), capture, tensors)
            if capture.exported.input_changes is not None:
                capture.exported.input_changes.write_back(call, tensors, made)
            return result, call

        self.bring_back()
        return difference(self.module, capture.exported, part, self._hooked, captured)

    def _hooked(self, call: Call) -> tuple[Any, Any]:
        """Return the result of a call through hooks, and its arguments after in-place changes."""
        assert self.assignment is not None
        (leaves,), (structure,), after, _ = self.hooks.run(
            self.assignment, [self.laid_out(call)], self._settings.output_device
        )
        return structure.unflatten(leaves), after

    def _through(
        self, plan: Planned, capture: Capture, tensors: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Return the result of a call through its segments, and what it left in its inputs."""
        with self.reading(capture):
            results = call_captured([plan], [tensors], self._settings.output_device, False)
        return joined(results, [capture.exported], [1], Joining())

    def _may_have_hooks(self) -> bool:
        """Return whether the weights are the model's own, and no module refuses hooks."""
        return self.weights.clones is None and not any(
            isinstance(child, torch.jit.ScriptModule) for child in self.module.modules()
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without captures, hooks and locks, which are created on demand."""
        kept = ("module", "weights", "gradients_wait", "_settings")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


_locks: MutableMapping[nn.Module, ModelLock] = WeakIdKeyDictionary()
_choosing_lock = Lock()


def _lock_of(module: nn.Module) -> ModelLock:
    """Return the lock of a model, which all of its flows share because they move the same state."""
    with _choosing_lock:
        return _locks.setdefault(module, ModelLock())


def call_captured(
    plans: Sequence[Planned],
    parts: Sequence[Sequence[Any]],
    target: torch.device,
    deferred_batch_norm: bool,
    returned: int | None = None,
    by_layer: bool = False,
) -> list[list[Any]]:
    """Run every micro-batch through its segments.

    Args:
        plans: the graph and the segments of each micro-batch (a last, smaller one may have been
            captured apart).
        parts: the flattened inputs of each.
        target: the device of the results.
        deferred_batch_norm: whether running statistics follow the whole batch.
        returned: how many of the outputs the model returns. The outputs behind them, which it
            leaves in its inputs, stay where they were made. None to bring all of them to
            ``target``.
        by_layer: whether each layer whose parameters rest runs for all micro-batches before the
            next one.

    Returns:
        The flattened results of each.
    """
    batches = [
        MicroBatch(graph.inputs, part) for (graph, _), part in zip(plans, parts, strict=True)
    ]
    pipeline = [segments for _, segments in plans]
    if deferred_batch_norm and len(parts) > 1:
        statistics = BatchStatistics(plans[0][0].state)
        run(pipeline, batches, statistics.gather)
        statistics.commit()
    else:
        run(pipeline, batches, by_layer=by_layer)
    results = []
    for (graph, _), batch in zip(plans, batches, strict=True):
        stay = set() if returned is None else {*graph.outputs[returned:]}
        results.append(
            [
                batch.made(name) if name in stay else batch.read(name, target)
                for name in graph.outputs
            ]
        )
    return results


def joined(
    results: Sequence[list[Any]],
    captures: Sequence[Exported],
    sizes: Sequence[int],
    joining: Joining,
    weights: Sequence[float] | None = None,
) -> tuple[Any, list[Any]]:
    """Join the results of micro-batches that went through captured graphs.

    Args:
        results: the flattened results of each.
        captures: the graph of each.
        sizes: samples in each.
        joining: how results are joined.
        weights: of each in a mean; ``sizes`` if None.

    Returns:
        The model's result, and the tensors that it left in its inputs.
    """
    nests, left = [], []
    for leaves, exported in zip(results, captures, strict=True):
        count = len(exported.outputs.paths)
        nests.append(exported.outputs.unflatten(leaves[:count]))
        left.append(leaves[count:])
    return join(nests, sizes, joining, weights), join(
        left, sizes, Joining(dim=joining.dim), weights
    )
