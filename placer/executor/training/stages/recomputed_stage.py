"""A stage that keeps only the inputs of a micro-batch, and runs forwards again to go backwards.

    forward     inputs ──▶ (no graph) ──▶ outputs          kept: the inputs
    backward    inputs ──▶ forward again ──▶ backward ──▶ input gradients; nothing is kept

It holds the activations of one micro-batch, in its backward pass, instead of the activations of
every micro-batch in flight. It pays for that with one more forward pass. Random numbers and buffers
are in the second pass what they were in the first.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; GPipe (Huang et al.,
NeurIPS 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast
from placer.devices import Repeated
from placer.executor.segments import MicroBatch, Segment
from placer.executor.training.stages.training_slot import TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage


class RecomputedStage(TrainingStage):
    """A training stage that recomputes its activations.

    It is never split: it keeps nothing that a pass of its own could make weight gradients of.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers, self._again = _with_copies(self.segment)
        self._written = _written_weights(self.segment)
        self._random = any(step.layer.random for step in self.segment.steps)
        self._before: dict[int, list[Tensor]] = {}
        self._chances: dict[int, Repeated] = {}

    def begin(self) -> None:
        """Draw new random numbers for a batch."""
        if self.is_recorded:
            for chance in self._chances.values():
                chance.seed()

    def _opened(
        self, count: int, inputs: Mapping[str, Any], targets: Sequence[Any], weight: float
    ) -> tuple[list[TrainingSlot], dict[str, Any]]:
        # The buffers before the forward pass are kept for each slot, because later micro-batches
        # change them before this one runs again.
        slots, made = super()._opened(count, inputs, targets, weight)
        for slot in slots:
            # All recorded passes share one memory, so results that others read lie outside of it.
            slot.outputs = {name: self._static(value) for name, value in made.items()}
            slot.landing = self._landing(slot)
            self._before[id(slot)] = [
                torch.empty_like(tensor, requires_grad=False) for tensor in self._changed()
            ]
            if self._random:
                self._chances[id(slot)] = Repeated(self.device)
        return slots, made

    def close_slots(self) -> None:
        """Release the slots and what is kept for them."""
        super().close_slots()
        self._before.clear()
        self._chances.clear()

    def release(self) -> None:
        """Let go of what a failed batch left: between passes nothing else is in the slots."""
        self._accumulation.drop()
        for slot in self.all_slots():
            self._let_go(slot)

    def _rooms(self, slot: TrainingSlot, shares_backward: bool) -> list[devices.Rooms]:
        """Return no rooms: each pass takes memory piece by piece.

        Both passes share one memory, in which the larger leaves room for the smaller. They are not
        warm.
        """
        return []

    def _recorded(
        self, slot: TrainingSlot, backward_pool: Any, rooms: Sequence[devices.Rooms], warm: bool
    ) -> None:
        """Record the passes of a slot; they run first, since they are not warm.

        No pass leaves anything but in static tensors, so that all of them share their memory.
        """
        chance = self._chances.get(id(slot))
        generators = (
            [[generator] for generator in chance.generators] if chance is not None else None
        )
        replays = devices.record(
            [slot.passes[phase] for phase in self.phases],
            self.device,
            pools=[self._shared_memory] * 2,
            generators=generators,
        )
        slot.passes.update(zip(self.phases, replays, strict=True))

    @torch.no_grad()
    def forward(self, slot: TrainingSlot) -> None:
        """Compute the segment in a slot without a graph of autograd."""
        _write(self._before[id(slot)], self._changed())
        # A layer may write to what it reads, and the backward pass needs that unchanged.
        inputs = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in slot.inputs.items()
        }
        batch = MicroBatch(inputs.keys(), inputs.values(), self.trail)
        with autocast.uncached(self.device), self._chance(slot, "first"):
            with self.segment.counting(), self.gather():
                self.segment.run(batch)
            for name, static in slot.outputs.items():
                made = batch.read(name, self.device)
                if isinstance(static, Tensor):
                    static.copy_(made)
            if self.head is not None:
                self._lose(self.head, slot, batch)
                self.head.total.add_(slot.roots[0])
        slot.roots = []

    def backward(self, slot: TrainingSlot) -> None:
        """Run forwards once more, and then backwards."""
        outputs, before = slot.outputs, self._before[id(slot)]
        #     forward m    ... forward m+1 ...   backward m
        #     weights w0   w1                    restore w0, run forwards again, then put w1 back
        now = [weight.detach().clone() for weight in self._written]
        _write([copy for _, copy in self._buffers] + self._written, before)
        try:
            with self._chance(slot, "again"):
                self._compute(slot, self._again)
            super().backward(slot)
        finally:
            slot.outputs = outputs
            _write(self._written, now)
            self._let_go(slot)

    def _changed(self) -> list[Tensor]:
        """Return what a forward pass changes: the buffers, and then the weights."""
        return [buffer for buffer, _ in self._buffers] + self._written

    def _chance(self, slot: TrainingSlot, which: str) -> AbstractContextManager[None]:
        chance = self._chances.get(id(slot))
        if chance is None:
            return nullcontext()
        return chance.first() if which == "first" else chance.again()

    def _let_go(self, slot: TrainingSlot) -> None:
        for leaf in slot.leaves.values():
            leaf.grad = None
        slot.leaves, slot.roots = {}, []


def _with_copies(segment: Segment) -> tuple[list[tuple[Tensor, Tensor]], Segment]:
    """Return the buffers that a segment changes, each with a copy, and the segment over the copies.

    Weights are not among them: gradients belong to the weights themselves.
    """
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    steps = []
    for step in segment.steps:
        state = list(step.state)
        for index, name in enumerate(step.layer.state):
            if name in step.layer.mutated and not state[index].requires_grad:
                buffer = state[index]
                state[index] = copies.setdefault(id(buffer), (buffer, buffer.clone()))[1]
        steps.append(replace(step, state=state))
    return list(copies.values()), Segment(segment.device, steps)


def _written_weights(segment: Segment) -> list[Tensor]:
    """Return the weights that forward writes to, as an embedding with a largest norm does."""
    found = {
        id(tensor): tensor
        for step in segment.steps
        for name, tensor in zip(step.layer.state, step.state, strict=True)
        if name in step.layer.mutated and tensor.requires_grad
    }
    return list(found.values())


@torch.no_grad()
def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)
