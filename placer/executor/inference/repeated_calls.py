"""Calls without gradients whose shape comes again: they go through what a stream has recorded.

Eagerly, the host issues every operation of every micro-batch, and several GPUs work faster than
that. One GPU may also do so where the batch is small: a call that is not cut is recorded if the
host is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeAlias

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
_Call: TypeAlias = tuple[
    tuple[Capture, ...], tuple[Hashable, ...], tuple[int, ...], tuple[int, ...], Hashable
]


class RepeatedCalls:
    """Which calls came before, and which come again.

    Args:
        streams: of the flow; they keep the recordings.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        # by call that came before: whether it is recorded; False if that failed
        self._known: BoundedDict[_Call, bool] = BoundedDict()
        # how often each call came that is not cut
        self._uncut: BoundedDict[_Call, int] = BoundedDict()

    def ahead(
        self,
        captures: Sequence[Capture],
        parts: Sequence[Sequence[Any]],
        weights: Sequence[int],
        pipelines: Sequence[int],
        is_unchanged: Callable[[], bool],
    ) -> list[list[Any]] | None:
        """Run a recorded call before it is known whether the model is unchanged.

        Args:
            captures: of each micro-batch, if the model is unchanged.
            parts: the flattened inputs of each.
            weights: samples in each.
            pipelines: of each.
            is_unchanged: whether the model is unchanged since it was recorded.

        Returns:
            The flattened results of each; None if the call is not recorded, or the model has
            changed.
        """
        call = _call(captures, parts, weights, pipelines)
        if not self._known.get(call):
            return None
        try:
            with inference():
                return self._streams.ahead(_known(captures, parts, pipelines), is_unchanged)
        except (StageError, torch.OutOfMemoryError):
            return None  # it is run again, as one that is not known

    def run(
        self,
        captures: Sequence[Capture],
        parts: Sequence[Sequence[Any]],
        weights: Sequence[int],
        pipelines: Sequence[int],
    ) -> list[list[Any]] | None:
        """Run a call's micro-batches through the stream.

        Args:
            captures: of each micro-batch.
            parts: the flattened inputs of each.
            weights: samples in each.
            pipelines: of each.

        Returns:
            The flattened results of each. None for a call that comes for the first time. None too
            for a call that failed here before: there was no memory for the recordings, or a layer
            failed, which an eager run names better.
        """
        call = _call(captures, parts, weights, pipelines)
        if call not in self._known:
            if len(captures) > 1:
                self._known[call] = True
            else:
                self._uncut[call] = self._uncut.get(call, 0) + 1
            return None
        if not self._known[call]:
            return None
        try:
            with inference():
                return list(self._streams.open(_known(captures, parts, pipelines)))
        except (StageError, torch.OutOfMemoryError) as error:
            self._known[call] = False
            # Half-made recordings hold memory that the eager run needs.
            self._streams.clear()
            if isinstance(error, torch.OutOfMemoryError):
                warn(
                    f"flow(x, chunks={len(parts)}) is issued operation by operation, which takes "
                    f"the host more time: there is no memory to record it: {error}"
                )
            return None

    @contextmanager
    def looked_at(
        self,
        captures: Sequence[Capture],
        parts: Sequence[Sequence[Any]],
        weights: Sequence[int],
        pipelines: Sequence[int],
        places: Sequence[torch.device],
    ) -> Iterator[None]:
        """Run a call that ``run`` did not; now and then measure whether the host is its bottleneck.

        Args:
            captures: of each micro-batch.
            parts: the flattened inputs of each.
            weights: samples in each.
            pipelines: of each.
            places: the devices that it runs on.
        """
        call = _call(captures, parts, weights, pipelines)
        if (
            self._uncut.get(call) not in _LOOKS
            or captures[0].exported.input_changes is not None
            or call in self._known
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
            self._known[call] = True


def _known(
    captures: Sequence[Capture], parts: Sequence[Sequence[Any]], pipelines: Sequence[int]
) -> list[Known]:
    """Return the micro-batches of a call as batches of a stream."""
    each = zip(captures, parts, pipelines, strict=True)
    return [Known(capture, part, pipeline=pipeline) for capture, part, pipeline in each]


def _call(
    captures: Sequence[Capture],
    parts: Sequence[Sequence[Any]],
    weights: Sequence[int],
    pipelines: Sequence[int],
) -> _Call:
    """Return the key of a call."""
    rows = tuple(captures), tuple(map(shapes, parts)), tuple(weights), tuple(pipelines)
    return *rows, autocast.current_dtypes()
