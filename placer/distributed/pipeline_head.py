"""The last stage's head: the loss, or the outputs, of each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placer.capture.batch_dims.declared_layout import refuse_absent_outputs
from placer.capture.loss_functions import require_gradient, require_real_number
from placer.capture.pytrees import Structure, detached_nest
from placer.distributed.replicas import Pipelines
from placer.distributed.tensor_codec import Parcel
from placer.errors import InputError
from placer.executor.checks.label_counts import LateCounts, Uneven, uneven
from placer.executor.output_joining import Joining, join
from placer.executor.stage_errors import Place, explain
from placer.executor.training.autograd_reach import parameters
from placer.executor.training.loss.label_weights import LabelWatch
from placer.executor.training.loss.loss_check import compare_losses
from placer.executor.training.loss.loss_weights import Goals, Weighing


class Head:
    """The conversion of the last stage's flat outputs to the loss or the model's result.

    Args:
        loss_fn: the loss of a micro-batch; None without training.
        structure: of the model's result.
        parcels: the model's flat outputs.
        joining: how results of micro-batches are joined.
        sizes: samples in each part of a batch. The parts of a micro-batch follow one another, one
            for each pipeline.
        device: of this process.
        elsewhere: names of the model's parameters in other processes, by identity.
        pipelines: that share each micro-batch.

    Attributes:
        targets: of each part; None if the library was given the target itself.
    """

    def __init__(
        self,
        loss_fn: Weighing | None,
        structure: Structure,
        parcels: Sequence[Parcel],
        joining: Joining,
        sizes: Sequence[int],
        device: torch.device,
        elsewhere: Mapping[int, str],
        pipelines: Pipelines,
    ) -> None:
        self._pipelines = pipelines
        self._chunks = len(sizes) // pipelines.count
        self._own = pipelines.parts(self._chunks)
        self._loss_fn, self._sizes, self._device = loss_fn, list(sizes), device
        self._elsewhere: Mapping[int, str] | None = elsewhere
        self._structure, self._parcels, self._joining = structure, parcels, joining
        self._goals: Goals | None = None
        self._made: list[tuple[Any, dict[str, Any]]] | None = None
        self.targets: Sequence[Any] | None = None
        self._now: Uneven = frozenset()
        self._uneven: Uneven = frozenset()
        self._late = LateCounts()

    def take(self, target: Any) -> None:
        """Set the target of a batch.

        Raises:
            InputError: if it has another batch size.
        """
        assert self._loss_fn is not None
        goals = self._loss_fn.goals(None, target, sum(self._sizes), len(self._sizes) > 1)
        if len(self._sizes) > 1:
            self._loss_fn.tell_of_labels(goals.spelt())
        labels = goals.leaves, goals.layout, self._sizes
        # torch's own mean losses determine their weights for every batch
        is_exact = getattr(self._loss_fn.options.weigh, "may_give_none", False)
        # replicas have to decide alike, so they look at labels on the host only
        may_wait = not is_exact and self._pipelines.count == 1
        waits = may_wait and self._late.is_due(None, *labels, self._uneven)
        self._now = uneven(*labels, waits=waits)
        leaves = [
            leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in goals.leaves
        ]
        self._goals = goals._replace(leaves=leaves)
        nest = goals.structure.unflatten(leaves)
        parts = (
            goals.layout.cut_values({"": nest}, self._sizes)
            if len(self._sizes) > 1
            else [{"": nest}]
        )
        self.targets = [part[""] for part in parts]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return a micro-batch's share of the batch's loss.

        Args:
            output: of the last stage.
            target: the number of the part among this process's parts, or its target if a user runs
                the schedule directly.

        Raises:
            InputError: if the loss is not a number, has no gradient, or reads a parameter of
                another process.
            StageError: if it failed.
        """
        assert self._loss_fn is not None
        number = 0 if self.targets is None else int(target)
        part = self._own[number]
        goal = target if self.targets is None else self.targets[part]
        try:
            result = self.result(output)
            loss, values = self._loss_fn(result, goal)
        except Exception as error:  # a user's function may raise anything
            micro_batch = part // self._pipelines.count
            place = Place(micro_batch, "forward", 0, 0, self._device, "(loss)")
            raise explain(error, place) from error
        require_real_number(loss)
        require_gradient(loss)
        self._refuse_elsewhere(loss)
        if self._made is not None:
            self._made.append((detached_nest(result), detached_nest(values)))
        # scaled, because the gradients of all parts are added up
        return loss * self._loss_fn.shares(self._sizes)[part]

    def collect(self, wanted: bool) -> None:
        """Start or stop keeping the results of micro-batches for ``compare``."""
        self._made = [] if wanted else None

    def has_other_labels(self) -> bool:
        """Return whether the numbers of labels are unequal in a new way."""
        return not self._now <= self._uneven

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch, detached, from the losses of this process's parts."""
        loss = torch.stack([loss.detach() for loss in losses]).sum()
        replicas = self._pipelines.replicas
        return loss if replicas is None else replicas.total(loss)

    def compare(self, loss: Tensor | None) -> None:
        """Compare the combined losses of micro-batches with the loss of the whole batch.

        Args:
            loss: of the batch; None where other processes have it.

        Raises:
            BatchError: if they differ.
        """
        if (
            loss is not None
            and self._loss_fn is not None
            and self._goals is not None
            and self._made is not None
        ):
            refuse_absent_outputs(self._loss_fn.options, *self._made[0])
            compare_losses(
                self._loss_fn,
                self._goals,
                self._sizes,
                self._joining,
                loss,
                self._parts(self._made),
                LabelWatch(),
            )
            goals = self._goals
            self._uneven |= uneven(goals.leaves, goals.layout, self._sizes, waits=True)

    def _refuse_elsewhere(self, loss: Tensor) -> None:
        """Raise an InputError, once, if the loss reads a parameter of another process.

        Such a parameter would be neither current nor trained here.
        """
        known, self._elsewhere = self._elsewhere, None
        if known is not None:
            name = next((known[id(item)] for item in parameters(loss) if id(item) in known), None)
            if name is not None:
                raise InputError(
                    f"loss_fn reads {name!r}, which belongs to another process, so that it would "
                    "not be trained by it: let the model return what the loss needs of it"
                )

    def result(self, output: Any) -> Any:
        """Return the model's result from the last stage's output."""
        return self._structure.unflatten(self._leaves(output))

    def join(self, outputs: Sequence[Any]) -> Any:
        """Join the results of all micro-batches.

        Args:
            outputs: of this process's last stage, by part.
        """
        results = [self.result(output) for output in self._parts(outputs)]
        return join(results, self._sizes, self._joining)

    def _parts(self, found: Sequence[Any]) -> list[Any]:
        """Return what the last stages of all pipelines have of each part of a batch.

        Args:
            found: what this process has, by part.
        """
        replicas = self._pipelines.replicas
        if replicas is None:
            return list(found)
        each = [iter(some) for some in replicas.exchanged(found)]
        own = len(self._pipelines.own)
        return [next(one) for _ in range(self._chunks) for one in each for _ in range(own)]

    def _leaves(self, output: Any) -> list[Any]:
        flat = [output] if isinstance(output, Tensor) else list(output)
        return [
            tensor if parcel.value.dtype is not None else parcel.unpack(tensor)
            for parcel, tensor in zip(self._parcels, flat, strict=True)
        ]
