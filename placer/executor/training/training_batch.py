"""The batch of a training step: inputs and target, flattened, and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from placer.capture.batch_dims.batch_layout import BatchLayout, Call, Parameters, Part
from placer.capture.pytrees import Structure
from placer.executor.output_joining import Joining
from placer.executor.training.loss.loss_weights import Goals, Spelt


@dataclass(frozen=True)
class Batch:
    """Inputs and target of a step, flattened.

    Attributes:
        tensors: the inputs.
        inputs: their structure.
        layout: where their samples lie.
        open_dims: of each input, the dimension that a graph leaves open, also of one that is not
            cut after all.
        goals: the target.
        sizes: samples in each micro-batch.
        joining: how results of micro-batches are joined.
        parameters: of the model's forward method.
    """

    tensors: list[Any]
    inputs: Structure
    layout: BatchLayout
    open_dims: tuple[int | None, ...]
    goals: Goals
    sizes: list[int]
    joining: Joining
    parameters: Parameters

    def spelt(self) -> list[Spelt]:
        """Return the tensors of inputs and target with the texts that read them."""
        paths = self.inputs.paths
        # paths begin with [0] for positional and [1] for keyword arguments
        texts = ["inputs"] if paths == ("[0][0]",) else [f"inputs{path[3:]}" for path in paths]
        return [*zip(texts, self.tensors, self.layout.dims, strict=True), *self.goals.spelt()]

    @property
    def has_lists(self) -> bool:
        """Whether a list has samples for items, so that micro-batches are of unlike structure."""
        return len(self.sizes) > 1 and bool(self.layout.lists or self.goals.layout.lists)

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The dimension that each input is cut along; None where a micro-batch has all of it."""
        return self.layout.dims if len(self.sizes) > 1 else (None,) * len(self.tensors)

    @property
    def goal_dims(self) -> tuple[int | None, ...]:
        """The dimension that each tensor of the target is cut along; None as for ``dims``."""
        return self.goals.layout.dims

    def part(self, place: int) -> Part:
        """Return the inputs of a micro-batch, where no list has samples for items."""
        return Part(self.layout.cut(self.tensors, self.sizes)[place], self.inputs, self.open_dims)

    def parts(self, given: list[Any]) -> list[tuple[Call, Any]]:
        """Return the arguments and the target of each micro-batch.

        Args:
            given: inputs and target, flattened: the batch's, or others in their places.
        """
        count = len(self.tensors)
        call: Call = self.inputs.unflatten(given[:count])
        target = self.goals.structure.unflatten(given[count:])
        if len(self.sizes) == 1:
            return [(call, target)]
        calls = self.layout.cut_call(call, self.parameters, self.sizes)
        goals = self.goals.layout.cut_values({"": target}, self.sizes)
        return [(part, goal[""]) for part, goal in zip(calls, goals, strict=True)]

    def without_gradients(self) -> Batch:
        """Return the same batch, nothing of which asks for a gradient."""
        goals = self.goals._replace(leaves=_without_gradients(self.goals.leaves))
        return replace(self, tensors=_without_gradients(self.tensors), goals=goals)

    def of_equal_sizes(self, pipelines: int = 1) -> Batch | None:
        """Return the batch in micro-batches of one size: as many as its count allows.

        Args:
            pipelines: the number of micro-batches is a multiple of it.

        Returns:
            None if the batch does not divide.
        """
        wanted, size = len(self.sizes), sum(self.sizes)
        counts = (
            count
            for count in range(min(wanted, size), 0, -1)
            if size % count == 0 and count % pipelines == 0
        )
        count = next(counts, None)
        return None if count is None else replace(self, sizes=[size // count] * count)


def _without_gradients(tensors: list[Any]) -> list[Any]:
    return [tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
