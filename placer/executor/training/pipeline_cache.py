"""The pipelines of a training step, one for each shape that comes.

    batch ──▶ capture that covers it ──▶ pipeline of its shape, kept or made now
        └─────────────┴──▶ none, with a warning: micro-batches run one after another

A shape is all that a pipeline depends on: sizes and types, which tensors require gradients, and
what the flow asks of its passes. The pipelines that were used last are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import LayerGraph
from placer.errors import InputError
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.shape_cache import LatestShapes
from placer.executor.engine.shares import refuse_unreplicable
from placer.executor.model_captures import Capture, shapes
from placer.executor.placed_model import PlacedModel
from placer.executor.segments import segments, taken_in_turn
from placer.executor.settings import Settings
from placer.executor.stage_errors import nothing_held
from placer.executor.state.assignment import Assignment
from placer.executor.training.loss.loss_weights import Weighing
from placer.executor.training.stages.weight_aliases import Weights
from placer.executor.training.training_batch import Batch
from placer.executor.training.training_pipeline import (
    PENALTY,
    Order,
    PenaltyError,
    Recipe,
    TrainingPipeline,
)
from placer.utils.user_warnings import warn

_every: WeakSet[Pipelines] = WeakSet()
"""All training steps' pipelines: a step that runs short of memory releases the others'."""


class Pipelines:
    """The pipelines of one training step, the latest used last.

    Args:
        placed: the model whose layers they run.
        settings: of the flow.
        loss_fn: the loss of a micro-batch.
        schedule: the order of micro-batches.
        compile: the backend of torch.compile; None to compile nothing.
    """

    def __init__(
        self,
        placed: PlacedModel,
        settings: Settings,
        loss_fn: Weighing,
        schedule: Order,
        compile: Backend | None,
    ) -> None:
        self._placed = placed
        self._settings = settings
        self._loss_fn = loss_fn
        self._schedule = schedule
        self._compile = compile
        self._made: LatestShapes[TrainingPipeline] = LatestShapes(lambda pipeline: pipeline.lanes)
        self._made_for: Assignment | None = None
        _every.add(self)

    def __iter__(self) -> Iterator[TrainingPipeline]:
        return iter(self._made.values())

    def ready(
        self,
        batch: Batch,
        outputs: bool = False,
        is_compared: bool = False,
        has_waiting: Callable[[], bool] = lambda: False,
    ) -> TrainingPipeline | None:
        """Return the stages for batches like this one, with their passes.

        If there is no memory, the passes of other shapes and steps are released first. Every shape
        but the first is recorded when it comes for the second time.

        Args:
            batch: what to train on.
            outputs: whether the caller wants the model's results.
            is_compared: whether the loss will be compared with the whole batch's. Then results are
                collected this once, by passes that are not recorded.
            has_waiting: whether gradients of earlier batches wait. Recording runs the passes, which
                would add to them, so it is left to a later step. Not called once the passes are
                recorded, because it looks at every parameter.

        Returns:
            The stages; None where micro-batches run one after another.
        """
        collects = outputs or is_compared
        pipeline = self._collecting(batch, collects)
        if pipeline is None:
            return None
        try:
            self._prepare(pipeline, batch, is_compared, has_waiting)
            return pipeline
        except PenaltyError as error:
            tell_in_turn(str(error))
            return None
        except torch.OutOfMemoryError as error:
            kept = [one for one in _every if one._placed is self._placed]
            others = sum(len(one._made) for one in kept) - 1
            if not others:
                raise
            why = str(error)
        # outside of the handler, since the error holds what was half made
        del pipeline
        for one in kept:
            one._made.keep_only(lambda key: False)
        devices.release_cache()
        warn(
            f"there is no memory for a batch of this shape in addition to the passes of {others} "
            "other(s), of this step or of other steps of the flow, which are released and made "
            f"again when such a batch comes: {why}"
        )
        return self._collecting(batch, collects)

    def _collecting(self, batch: Batch, collects: bool) -> TrainingPipeline | None:
        """Return the stages for a batch, which collect results if asked to; None without stages."""
        pipeline = self.pipeline_for(batch)
        if pipeline is not None and not pipeline.collect(collects):
            self._made.keep_only(lambda key: self._made[key] is not pipeline)
            pipeline = self.pipeline_for(batch)
            assert pipeline is not None
            pipeline.collect(collects)
        return pipeline

    def _prepare(
        self,
        pipeline: TrainingPipeline,
        batch: Batch,
        is_compared: bool,
        has_waiting: Callable[[], bool],
    ) -> None:
        """Make the passes of the stages; see ``ready`` for the arguments."""
        with nothing_held():
            # Recording pays where a shape comes back. The first shape probably will; others
            # are recorded once they do.
            comes_back = pipeline.is_prepared or len(self._made) == 1
            is_done = pipeline.is_prepared and pipeline.is_recorded
            record = comes_back and not is_compared and (is_done or not has_waiting())
            pipeline.prepare(batch.tensors, batch.goals.leaves, record=record)

    def pipeline_for(self, batch: Batch, needed: bool = False) -> TrainingPipeline | None:
        """Return the stages for batches like this one, or None where micro-batches run one by one.

        They run one by one, through the flow, if

        - there is no capture;
        - a layer reads a number that another took from a tensor: passes are prepared once, and
          would keep the number that they were prepared with;
        - a segment uses what another one changes;
        - a trained parameter is sparse or a wrapper of other tensors;
        - parameters have hooks, which passes over aliases of them would not run;
        - the loss reads parameters by itself, whose gradients such passes would not find;
        - a list has samples for items.

        Args:
            batch: what to train on, or a batch like it.
            needed: whether to capture the model even if call after call would need a new capture.
        """
        placed, settings, sizes = self._placed, self._settings, batch.sizes
        if placed.assignment is not self._made_for:
            self._made.keep_only(lambda key: False)
            self._made_for = placed.assignment
        if batch.has_lists:
            tell_in_turn("a list has samples for items")
            return None
        first = batch.part(0)
        capture = placed.captured(first, needed)
        if capture is None:
            return None
        settings.refuse_resting("a training step")
        recompute = settings.recomputed()
        asked = _requires_gradients(batch)
        room = self._room()
        ways = settings.deferred_batch_norm, recompute, room
        goals = batch.goals.structure.key, _kinds(batch.goals.leaves), batch.goal_dims
        key = (capture, shapes(first.tensors), tuple(sizes), batch.dims, goals, asked, *ways)
        known = self._made.used(key)
        if known is not None and not known.is_stale():
            return None if _is_unusable(known) else known
        self._made.keep_only(lambda other: other != key and placed.captures.holds(other[0]))
        graph, places = placed.layers(capture)
        if _runs_one_by_one(graph):
            return None
        if len(sizes) > 1 and _in_turn(graph, places, settings.deferred_batch_norm):
            return None
        replication = settings.replication
        deferred = settings.deferred_batch_norm
        refuse_unreplicable(replication, graph, placed.module, deferred)
        others = {size: place for place, size in enumerate(sizes) if size != sizes[0]}
        if any(placed.captured(batch.part(place)) is not capture for place in others.values()):
            # A smaller micro-batch has another graph, perhaps of other layers: equal ones then.
            equal = batch.of_equal_sizes(replication.count)
            if equal is None:
                tell_in_turn(_other_graph(sizes, others))
                return None
            _tell_of(equal.sizes, sizes)
            return self.pipeline_for(equal, needed)
        recipe = Recipe(
            self._loss_fn,
            capture.exported.outputs,
            batch.goals.structure,
            self._schedule,
            tuple(sizes),
            batch.dims,
            batch.goal_dims,
            settings.deferred_batch_norm,
            recompute,
            self._compile,
            capture.exported.checkpoints,
            room,
            replication,
        )
        # Evict first: the copies of two pipelines may not fit into memory together.
        self._made.make_room()
        weights = self._weights_of(capture, recipe)
        self._made[key] = made = TrainingPipeline(graph, places, recipe, weights)
        made.weights.leave_out(placed.module.parameters())
        return made

    def _room(self) -> tuple[int, ...]:
        """Return for how many micro-batches each segment has room; empty without a choice."""
        has_choice = self._schedule in ("interleaved", "zero-bubble")
        return room_of(self._settings.in_flight) if has_choice else ()

    def _weights_of(self, capture: Capture, recipe: Recipe) -> Weights | None:
        """Return the weights of another shape's pipeline over the same layers, if there is one.

        Gradients and replicas take memory only once then.
        """
        keys: list[Any] = [*self._made]
        others = [self._made[key] for key in keys if key[0] is capture]
        return next(
            (
                other.weights
                for other in others
                if other.pipelines == recipe.pipelines and not other.is_stale()
            ),
            None,
        )

    def let_go(self, interrupted: TrainingPipeline | None) -> None:
        """Release pipelines whose passes were half made, and the one that was interrupted.

        An interrupt comes anywhere, and may have left its passes in any state.
        """
        for key, pipeline in list(self._made.items()):
            if pipeline is interrupted or not pipeline.is_prepared:
                # a lost device raises here too; the first error has already reported it
                with suppress(RuntimeError):
                    self._made.let_go(key)


def room_of(in_flight: Any) -> tuple[int, ...]:
    """Return for how many micro-batches each segment has room.

    Args:
        in_flight: the flow's attribute.

    Raises:
        InputError: it is not a sequence of whole numbers, 1 or more.
    """
    if (
        isinstance(in_flight, str)
        or not isinstance(in_flight, Sequence)
        or not all(type(one) is int and one > 0 for one in in_flight)
    ):
        raise InputError(
            f"flow.in_flight is {in_flight!r}: give a number of micro-batches, 1 or more, for each "
            "segment, or () for as many as the order needs"
        )
    return tuple(in_flight)


def tell_in_turn(why: str) -> bool:
    """Warn why batches have no pipeline; return True."""
    warn(f"{why}: micro-batches run one after another")
    return True


def _hooked(weights: Weights) -> bool:
    """Return whether the user has hooks on a parameter; warn if so."""
    name = weights.hooked()
    return name is not None and tell_in_turn(
        f"parameter {name!r} has hooks, which a pipeline would not run"
    )


def _has_unusual_gradients(graph: LayerGraph) -> bool:
    """Return whether a trained parameter is sparse or wraps other tensors; warn if so.

    Passes add to a gradient that is one block of numbers. The class of such a parameter decides
    what its gradient is.
    """
    used = (name for layer in graph.layers for name in layer.state)
    name = next(
        (
            name
            for name in used
            if (it := graph.state[name]).requires_grad and not devices.is_block(it)
        ),
        None,
    )
    return name is not None and tell_in_turn(
        f"parameter {name!r} is trained and not a plain tensor"
    )


def _penalised(pipeline: TrainingPipeline) -> bool:
    """Return whether the loss reads parameters by itself; warn if so."""
    return bool(pipeline.penalised) and tell_in_turn(PENALTY)


def _in_turn(graph: LayerGraph, places: list[torch.device], gathered: bool) -> bool:
    """Return whether a micro-batch would find in a buffer what later ones left; warn if so."""
    name = taken_in_turn(segments(graph, places, lambda name, _: graph.state[name]), gathered)
    return name is not None and tell_in_turn(
        f"buffer {name!r} is changed in one segment and used in another"
    )


def _other_graph(sizes: Sequence[int], others: Iterable[int]) -> str:
    return (
        f"forward does something else with {max(others)} samples than with {sizes[0]}, and the "
        "batch does not divide into equal parts for all replicas"
    )


def _tell_of(equal: list[int], sizes: list[int]) -> None:
    """Warn that micro-batches are of other sizes than the caller asked for."""
    warn(
        f"forward does something else with the {sizes[-1]} samples of the last micro-batch than "
        f"with {sizes[0]}: micro-batches are {len(equal)} of {equal[0]}, not {len(sizes)}; "
        f"a batch whose size {len(sizes)} divides keeps them"
    )


def _kinds(goals: list[Any]) -> Hashable:
    """Return what passes keep of a target in addition to its values."""
    return tuple((goal.shape, goal.dtype) if isinstance(goal, Tensor) else None for goal in goals)


def _requires_gradients(batch: Batch) -> tuple[bool, ...]:
    """Return for each input and target whether it is a tensor that requires a gradient."""
    given = (*batch.tensors, *batch.goals.leaves)
    return tuple(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in given)


def _runs_one_by_one(graph: LayerGraph) -> bool:
    """Return whether the graph's passes cannot be prepared; see ``Pipelines.pipeline_for``."""
    return (
        graph.passes_value_numbers
        or _hooked(Weights.from_graph(graph))
        or _has_unusual_gradients(graph)
    )


def _is_unusable(known: TrainingPipeline) -> bool:
    return _hooked(known.weights) or _penalised(known)
