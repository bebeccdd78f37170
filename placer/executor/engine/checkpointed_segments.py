"""Segments that keep the model's own checkpoints: their layers run again in the backward pass.

A captured graph holds the operations of ``torch.utils.checkpoint`` but not that they are to run
again. Here the layers of each checkpoint are one call of it. Three kinds of layers run only once:
layers that change their state; layers that read a value which is overwritten before they would run
again; and on GPUs layers that draw random numbers, which a recorded pass could not draw again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from placer.capture.layers import Layer
from placer.capture.python_state.mutable_inputs import written_inputs
from placer.capture.weight_grads.deferred import unsplit_backward
from placer.devices import Repeated
from placer.executor.segments import MicroBatch, Segment, Step
from placer.executor.stage_errors import Trail


@dataclass
class CheckpointedSegment(Segment):
    """A segment of which some layers run again in the backward pass.

    Attributes:
        groups: the steps in order, in one group for each checkpoint and each run between two of
            them.
    """

    groups: list[Group] = field(default_factory=list)

    def run(self, values: MicroBatch) -> None:
        """Compute the segment for one micro-batch."""
        for group in self.groups:
            group.run(values, self.device)


@dataclass
class Group:
    """Steps that follow one another.

    Attributes:
        steps: the steps, in order.
        again: whether they run again in the backward pass.
        reads: names of values that they read and others made.
        writes: names of values that they make and something later reads.
    """

    steps: list[Step]
    again: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @classmethod
    def from_steps(cls, steps: list[Step], again: bool) -> Group:
        """Return the group of these steps.

        Args:
            steps: one or more, in order.
            again: whether they run again in the backward pass.
        """
        made = dict.fromkeys(name for step in steps for name in step.layer.writes)
        released = {name for step in steps for name in step.forget}
        reads = dict.fromkeys(
            name for step in steps for name in step.layer.reads if name not in made
        )
        return cls(steps, again, tuple(reads), tuple(name for name in made if name not in released))

    def run(self, values: MicroBatch, device: torch.device) -> None:
        """Compute the steps for one micro-batch."""
        if not self.again or not torch.is_grad_enabled():
            for step in self.steps:
                step.run(values)
            return
        trails = [values.trail]

        def compute(*tensors: Any) -> tuple[Any, ...]:
            # The second run is a part of a backward pass: the trail names the layer of that pass.
            inner = MicroBatch(self.reads, tensors, trails.pop() if trails else Trail())
            for step in self.steps:
                step.run(inner)
            return tuple(inner.read(name, device) for name in self.writes)

        reads = [values.read(name, device) for name in self.reads]
        # Weight gradients of a checkpoint cannot be left for later: its activations are gone then.
        with unsplit_backward():
            made = checkpoint(
                compute,
                *reads,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=self._contexts(device),
            )
        values.write(self.writes, made)
        values.forget(name for step in self.steps for name in step.forget if name in self.reads)

    def _contexts(self, device: torch.device) -> Any:
        random_numbers = Repeated(device) if any(step.layer.random for step in self.steps) else None

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return (
                (nullcontext(), nullcontext())
                if random_numbers is None
                else (random_numbers.first(), random_numbers.again())
            )

        return contexts


def with_checkpoints(parts: Sequence[Segment], paths: Sequence[str]) -> list[Segment]:
    """Return segments that keep the model's checkpoints.

    Args:
        parts: segments.
        paths: the modules that the model runs under checkpoints.
    """
    return [_with_checkpoints(part, paths) for part in parts] if paths else list(parts)


def _with_checkpoints(part: Segment, paths: Sequence[str]) -> Segment:
    runs: list[tuple[str | None, list[Step]]] = []
    for step in part.steps:
        path = _checkpoint(step.layer, paths, part.device)
        if not runs or runs[-1][0] != path:
            runs.append((path, []))
        runs[-1][1].append(step)
    if all(path is None for path, _ in runs):
        return part
    # A group that reads what a later step overwrites would see other values the second time.
    overwritten = frozenset().union(*(_overwritten(step.layer) for step in part.steps))
    groups = [Group.from_steps(steps, path is not None) for path, steps in runs]
    kept = [
        replace(group, again=group.again and overwritten.isdisjoint(group.reads))
        for group in groups
    ]
    return CheckpointedSegment(part.device, part.steps, kept)


def _overwritten(layer: Layer) -> frozenset[str]:
    """Return the names of the values that a layer reads and writes to in place."""
    if layer.program is None:
        return frozenset()
    first = sum(node.op == "placeholder" for node in layer.program.nodes) - len(layer.reads)
    return frozenset(
        layer.reads[place - first] for place in written_inputs(layer.program) if place >= first
    )


def _checkpoint(layer: Layer, paths: Sequence[str], device: torch.device) -> str | None:
    """Return the path of the checkpoint that a layer is in; None if it is not to run again."""
    if layer.mutated or (layer.random and device.type == "cuda"):
        return None
    for path in paths:
        if layer.modules and all(f"{name}.".startswith(f"{path}.") for name in layer.modules):
            return path
    return None
