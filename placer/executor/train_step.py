"""What ``DataFlow.train_step`` returns: one batch at a time, forwards, backwards and the optimizer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from placer.errors import InputError
from placer.executor.assignment import Assignment
from placer.executor.pipeline import scatter
from placer.executor.program import Capture
from placer.executor.train import SCHEDULES, Loss, Order, TrainingPipeline
from placer.graph.export import batch_size
from placer.graph.layers import LayerGraph
from placer.graph.structure import Structure, flatten


class Flow(Protocol):
    """What a training step needs of a ``DataFlow``."""

    module: nn.Module
    chunks: int
    enable_clone: bool

    @property
    def assignment(self) -> Assignment | None:
        """The devices of the layers; None before the first ``update_flow``."""

    def captured(self, tensors: list[Any], inputs: Structure) -> Capture | None:
        """The capture for inputs like these; None where the model runs through hooks."""

    def layers(self, capture: Capture) -> tuple[LayerGraph, list[torch.device]]:
        """The layers of a capture and the device of each."""

    def __call__(self, *args: Any, chunks: int | None = None, **kwargs: Any) -> Any:
        """Run the model."""


class TrainStep:
    """A training step of a flow.

    Args:
        flow: a flow to which ``update_flow`` has been called.
        loss_fn: ``loss_fn(output, target)``, a mean over the samples that it is given.
        optimizer: stepped after every batch; None to leave that to the caller.
        schedule: the order of micro-batches.

    Raises:
        InputError: the loss is no function, or the schedule is not known.
    """

    def __init__(self, flow: Flow, loss_fn: Loss, optimizer: torch.optim.Optimizer | None, schedule: Order) -> None:
        if not callable(loss_fn):
            raise InputError(f"loss_fn is {loss_fn!r}; give a function of the output and the target")
        if schedule not in SCHEDULES:
            raise InputError(f"schedule {schedule!r} is not known; give one of {', '.join(SCHEDULES)}")
        self.flow = flow
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.schedule = schedule
        self._pipelines: dict[Any, TrainingPipeline] = {}
        self._placed: Any = None

    def __call__(self, inputs: Any, target: Any, chunks: int | None = None) -> Tensor:
        """Train on one batch; afterwards every parameter's ``grad`` is that of the mean loss.

        Args:
            inputs: one tensor, a tuple of positional or a dict of keyword arguments, the batch first.
            target: what the loss compares with, the batch first.
            chunks: micro-batches; what the placement says if None. A batch that cannot be cut into so many equal ones
                is cut into the most equal ones below.

        Returns:
            The mean loss, detached.

        Raises:
            InputError: the flow is not placed yet, or keeps clones, or its module is in eval mode, or the target is of
                another size than the batch.
        """
        self._refuse()
        args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        tensors, structure = flatten((args, kwargs))
        goals, target_structure = flatten(target)
        size = batch_size(tensors)
        _refuse_other_sizes(goals, size)
        count = _equal_chunks(self.flow.chunks if chunks is None else chunks, size)
        pipeline = self._pipeline(tensors, structure, target_structure, count, size)
        if pipeline is None:
            loss = self._through_hooks(
                scatter(tensors, count, size), structure, scatter(goals, count, size), target_structure
            )
        else:
            loss = pipeline.run(tensors, goals, size)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def _refuse(self) -> None:
        flow = self.flow
        if flow.assignment is None:
            raise InputError("the flow is not placed yet: call update_flow() before a training step")
        if flow.enable_clone:
            raise InputError("clones are not trained: make the flow without enable_clone to train it")
        if not flow.module.training:
            raise InputError("the model is in eval mode: call flow.train() before a training step")

    def _pipeline(
        self, tensors: list[Any], inputs: Structure, target: Structure, chunks: int, size: int
    ) -> TrainingPipeline | None:
        """The stages for batches like this one; None where the model runs through hooks."""
        flow = self.flow
        if flow.assignment is not self._placed:
            self._pipelines.clear()
            self._placed = flow.assignment
        capture = flow.captured(scatter(tensors, chunks, size)[0], inputs)
        if capture is None:
            return None
        key = (capture, chunks, size, target.key)
        if key not in self._pipelines:
            graph, places = flow.layers(capture)
            self._pipelines[key] = TrainingPipeline(
                graph, places, capture.exported.outputs, self.loss_fn, target, self.schedule, chunks
            )
        return self._pipelines[key]

    def _through_hooks(
        self, parts: list[list[Any]], inputs: Structure, goals: list[list[Any]], target: Structure
    ) -> Tensor:
        """A model that could not be captured: micro-batches one after another."""
        for parameter in self.flow.module.parameters():
            parameter.grad = None
        losses = []
        for part, goal in zip(parts, goals, strict=True):
            args, kwargs = inputs.unflatten(part)
            loss = self.loss_fn(self.flow(*args, chunks=1, **kwargs), target.unflatten(goal)) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def _refuse_other_sizes(targets: list[Any], size: int) -> None:
    for target in targets:
        if isinstance(target, Tensor) and target.dim() and target.shape[0] != size:
            raise InputError(
                f"a target of shape {tuple(target.shape)} goes with a batch of {size}; "
                "its first dimension must be the batch"
            )


def _equal_chunks(wanted: int, size: int) -> int:
    """The most micro-batches, up to those wanted, of one size."""
    if not isinstance(wanted, int) or wanted < 1:
        raise InputError(f"chunks={wanted!r}: give a whole number of micro-batches, 1 or more")
    return next(count for count in range(min(wanted, size), 0, -1) if size % count == 0)
