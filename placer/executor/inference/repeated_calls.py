"""Calls without gradients whose shape comes again: they go through what a stream has recorded.

Eagerly, the host issues every operation of every micro-batch, and several GPUs work faster than
that. One GPU may also do so where the batch is small: a call that is not cut is recorded if the
host is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from placer import devices
from placer.capture import autocast
from placer.errors import StageError
from placer.executor.inference.stream import Known, Streams, inference
from placer.executor.model_captures import Capture, shapes
from placer.utils.bounded_dict import BoundedDict
from placer.utils.user_warnings import warn

_LOOKS = {4**power for power in range(1, 8)}
"""A call that is not cut is measured the 4th, 16th, ... time, since that waits for the devices."""

_HOSTS_SHARE = 0.5
"""The host is the bottleneck if issuing a call takes more than this share of its time."""


@dataclass(frozen=True)
class CapturedCall:
    """A call with the capture of each of its micro-batches.

    Attributes:
        captures: of each micro-batch.
        parts: the flattened inputs of each.
        sizes: samples in each.
        pipelines: of each.
    """

    captures: Sequence[Capture]
    parts: Sequence[Sequence[Any]]
    sizes: Sequence[int]
    pipelines: Sequence[int]

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for calls that are recorded alike."""
        rows = tuple(map(shapes, self.parts)), tuple(self.sizes), tuple(self.pipelines)
        return tuple(self.captures), *rows, autocast.current_dtypes()

    @property
    def batches(self) -> list[Known]:
        """The micro-batches as batches of a stream."""
        each = zip(self.captures, self.parts, self.pipelines, strict=True)
        return [Known(capture, part, pipeline=pipeline) for capture, part, pipeline in each]


class RepeatedCalls:
    """Which calls came before, and which come again.

    Args:
        streams: of the flow; they keep the recordings.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        # by call that came before: whether it is recorded; False if that failed
        self._known: BoundedDict[Hashable, bool] = BoundedDict()
        # how often each call came that is not cut
        self._uncut: BoundedDict[Hashable, int] = BoundedDict()

    def ahead(self, call: CapturedCall, is_unchanged: Callable[[], bool]) -> list[list[Any]] | None:
        """Run a recorded call before it is known whether the model is unchanged.

        Args:
            call: with the captures that it has if the model is unchanged.
            is_unchanged: whether the model is unchanged since it was recorded.

        Returns:
            The flattened results of each micro-batch; None if the call is not recorded, or the
            model has changed.
        """
        if not self._known.get(call.key):
            return None
        try:
            with inference():
                return self._streams.ahead(call.batches, is_unchanged)
        except (StageError, torch.OutOfMemoryError):
            return None  # it is run again, as one that is not known

    def run(self, call: CapturedCall) -> list[list[Any]] | None:
        """Run a call's micro-batches through the stream.

        Returns:
            The flattened results of each. None for a call that comes for the first time. None too
            for a call that failed here before: there was no memory for the recordings, or a layer
            failed, which an eager run names better.
        """
        if call.key not in self._known:
            if len(call.captures) > 1:
                self._known[call.key] = True
            else:
                self._uncut[call.key] = self._uncut.get(call.key, 0) + 1
            return None
        if not self._known[call.key]:
            return None
        try:
            with inference():
                return list(self._streams.open(call.batches))
        except (StageError, torch.OutOfMemoryError) as error:
            self._known[call.key] = False
            # Half-made recordings hold memory that the eager run needs.
            self._streams.clear()
            if isinstance(error, torch.OutOfMemoryError):
                warn(
                    f"flow(x, chunks={len(call.parts)}) is issued operation by operation, which "
                    f"takes the host more time: there is no memory to record it: {error}"
                )
            return None

    @contextmanager
    def looked_at(self, call: CapturedCall, places: Sequence[torch.device]) -> Iterator[None]:
        """Run a call that ``run`` did not; now and then measure whether the host is its bottleneck.

        Args:
            call: what the block runs.
            places: the devices that it runs on.
        """
        if (
            self._uncut.get(call.key) not in _LOOKS
            or call.captures[0].exported.input_changes is not None
            or call.key in self._known
        ):
            yield
            return
        for place in places:
            devices.synchronise(place)
        began = perf_counter()
        yield
        issued = perf_counter()
        for place in places:
            devices.synchronise(place)
        if issued - began > _HOSTS_SHARE * (perf_counter() - began):
            self._known[call.key] = True
