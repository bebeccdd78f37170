"""The end of the line: the loss, or the outputs, of each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placer.distributed.parcels import Parcel
from placer.errors import InputError
from placer.executor.faults import Place, explain
from placer.executor.joining import Output, gather, refuse_sizes
from placer.executor.pipeline import scatter
from placer.executor.training.reached import parameters
from placer.executor.training.weighing import Weighing
from placer.graph.losses import refuse_no_number, refuse_untrained
from placer.graph.structure import Structure, flatten


class Head:
    """From the last stage's flat outputs to what the user knows.

    Args:
        loss_fn: ``loss_fn(output, target)``, weighed by what samples weigh; None without training.
        structure: of the model's result.
        parcels: the model's flat outputs.
        outputs: what each of them is.
        is_fixed: whether the graph holds for one size of micro-batches alone, so that it tells no size from a constant.
        chunks: micro-batches in a batch.
        device: of this process.
        elsewhere: the model's parameters that belong to other processes, their names by identity.

    Attributes:
        targets: of each micro-batch; None where the library was given the target itself.
    """

    def __init__(
        self,
        loss_fn: Weighing | None,
        structure: Structure,
        parcels: Sequence[Parcel],
        outputs: Sequence[Output],
        is_fixed: bool,
        chunks: int,
        device: torch.device,
        elsewhere: Mapping[int, str],
    ) -> None:
        self._loss_fn, self._chunks, self._device = loss_fn, chunks, device
        self._elsewhere: Mapping[int, str] | None = elsewhere
        self._structure, self._parcels, self._outputs, self._is_fixed = structure, parcels, outputs, is_fixed
        self.targets: Sequence[Any] | None = None

    def take(self, target: Any, size: int) -> None:
        """Take the target of a batch of so many samples."""
        assert self._loss_fn is not None
        leaves, structure = flatten(target)
        if self._chunks > 1:
            leaves, structure = self._loss_fn.with_weights(None, target, [], size)
        here = [leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.targets = [structure.unflatten(part) for part in scatter(here, self._chunks, size)]

    def loss(self, output: Any, target: Any) -> Tensor:
        """A micro-batch's share of the batch's loss.

        Args:
            output: of the last stage.
            target: the number of the micro-batch, or, where a user drives the schedule, its part of the target.

        Raises:
            InputError: the loss is no number, no gradient comes from it, or it reads what is trained elsewhere.
            StageError: it failed.
        """
        assert self._loss_fn is not None
        number, goal = (0, target) if self.targets is None else (int(target), self.targets[int(target)])
        try:
            loss = self._loss_fn(self.result(output), goal)
        except Exception as error:  # whatever a user's function raises
            raise explain(error, Place(number, "forward", 0, 0, self._device, "(loss)")) from error
        refuse_no_number(loss)
        refuse_untrained(loss)
        self._refuse_elsewhere(loss)
        return loss / self._chunks

    def _refuse_elsewhere(self, loss: Tensor) -> None:
        """Once: what a loss reads by itself of another process's parameters is neither up to date nor trained."""
        known, self._elsewhere = self._elsewhere, None
        if known is not None:
            name = next((known[id(item)] for item in parameters(loss) if id(item) in known), None)
            if name is not None:
                raise InputError(
                    f"loss_fn reads {name!r}, which belongs to another process, so that it would not be trained by it: "
                    "let the model return what the loss needs of it"
                )

    def result(self, output: Any) -> Any:
        """What the model returns, from the last stage's output."""
        return self._structure.unflatten(self._leaves(output))

    def join(self, outputs: Sequence[Any], weight: int) -> Any:
        """The results of all micro-batches as one.

        Args:
            outputs: of the last stage, by micro-batch.
            weight: samples in each.
        """
        weights, way_out = [weight] * len(outputs), "give build(..., chunks=1)"
        if self._is_fixed:
            refuse_sizes([self._structure] * len(outputs), weights, way_out)
        columns = zip(*(self._leaves(output) for output in outputs), strict=True)
        joined = [
            gather(parts, output, weights, path, way_out)
            for parts, output, path in zip(columns, self._outputs, self._structure.paths, strict=True)
        ]
        return self._structure.unflatten(joined)

    def _leaves(self, output: Any) -> list[Any]:
        flat = [output] if isinstance(output, Tensor) else list(output)
        return [
            tensor if parcel.value.dtype is not None else parcel.unpack(tensor)
            for parcel, tensor in zip(self._parcels, flat, strict=True)
        ]
