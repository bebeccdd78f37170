"""What a training step takes: inputs and target, flattened, and how they are cut into micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from placer.graph.structure import Structure


class Batch(NamedTuple):
    """What a step takes, flattened.

    Attributes:
        tensors: the inputs.
        inputs: their structure.
        goals: the target.
        target: its structure.
        sizes: samples in each micro-batch.
    """

    tensors: list[Any]
    inputs: Structure
    goals: list[Any]
    target: Structure
    sizes: list[int]

    def without_gradients(self) -> Batch:
        """The same, nothing of which asks for a gradient."""
        return self._replace(tensors=_without_gradients(self.tensors), goals=_without_gradients(self.goals))

    def of_equal_sizes(self) -> Batch:
        """The same in the most micro-batches, up to as many, of one size."""
        wanted, size = len(self.sizes), sum(self.sizes)
        count = next(count for count in range(min(wanted, size), 0, -1) if size % count == 0)
        return self._replace(sizes=[size // count] * count)


def _without_gradients(tensors: list[Any]) -> list[Any]:
    return [tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
