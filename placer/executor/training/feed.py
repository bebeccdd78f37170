"""A batch and its target on their way to the stages that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.batch_dims.batch_layout import cut_tensor
from placer.devices import Courier, Lane, Mark
from placer.executor.training.stages.training_slot import Key


class Feed:
    """The micro-batches of one batch.

    A tensor on another GPU than the stage that reads it is brought there whole, at once. Otherwise
    its owner would have to wait until the pipeline has come to the last micro-batch, and could not
    begin the next step meanwhile.

    Args:
        given: the caller's inputs, by name, and target, by position.
        sizes: samples in each micro-batch.
        courier: for the copies.
        ready: by device, a mark behind the caller's work on these tensors.
        dims: of each tensor, the dimension that it is cut along; None where every micro-batch has
            all of it.
        parts_on: by device, the micro-batches that it reads; a device that is not named may read
            all of them.

    Attributes:
        read: for each device that has a part of the batch, and each that reads it, a mark behind
            the last copy.
    """

    def __init__(
        self,
        given: Mapping[Key, Any],
        sizes: Sequence[int],
        courier: Courier,
        ready: Mapping[torch.device, Mark],
        dims: Mapping[Key, int | None],
        parts_on: Mapping[torch.device, Sequence[int]] | None = None,
    ) -> None:
        self._parts_on = parts_on or {}
        self._given = given
        self._sizes = sizes
        self._dims = dims
        self._parts = {key: self._cut(key, tensor) for key, tensor in given.items()}
        self._courier = courier
        self._ready = ready
        self._brought: dict[tuple[Key, torch.device], tuple[Mapping[int, Tensor], Mark]] = {}
        self.read: dict[tuple[torch.device, torch.device], Mark] = {}

    def send(
        self,
        key: Key,
        chunk: int,
        place: torch.device,
        target: Tensor,
        free: Sequence[Mark],
        label: Any,
    ) -> Mark:
        """Copy a part of the batch into a stage's slot.

        Args:
            key: which tensor.
            chunk: which micro-batch of it.
            place: the stage's device.
            target: of the same shape.
            free: marks after which it may be overwritten.
            label: how a trace names the copy.

        Returns:
            A mark behind the copy.
        """
        given = self._parts[key][chunk]
        here = devices.location(given)
        if here.type == place.type and not devices.same(here, place):
            parts, there = self._bring(key, here, place, label)
            return self._courier.send(parts[chunk], there, target, free, "batch", label)
        source = devices.staged(given, place)
        mark = self._courier.send(source, self._ready[here], target, free, "batch", label)
        if source is given:
            self.read[here, place] = mark
        return mark

    def _bring(
        self, key: Key, here: torch.device, place: torch.device, label: Any
    ) -> tuple[Mapping[int, Tensor], Mark]:
        """Return a device's micro-batches of a tensor, and a mark behind their copies."""
        if (key, place) not in self._brought:
            parts = self._parts[key]
            mine = self._parts_on.get(place, range(len(parts)))
            is_whole = len(mine) == len(parts) or self._dims[key] is None
            sources = [self._given[key]] if is_whole else [parts[chunk] for chunk in mine]
            sources = [source.detach() for source in sources]
            landed = [
                self._courier.landing((key, number), source, place)
                for number, source in enumerate(sources)
            ]
            # New memory may still be in use by the caller. Later it is free once all copies from it
            # into slots are done.
            free = Lane(place, caller=True).mark(), self._courier.mark(place, place, "batch")
            mark = self._courier.send_all(sources, self._ready[here], landed, free, "batch", label)
            if is_whole:
                every = self._cut(key, landed[0])
                landed = [every[chunk] for chunk in mine]
            self._brought[key, place] = dict(zip(mine, landed, strict=True)), mark
            self.read[here, place] = mark
        return self._brought[key, place]

    def _cut(self, key: Key, tensor: Any) -> Sequence[Any]:
        return cut_tensor(tensor, self._dims[key], str(key), self._sizes)
