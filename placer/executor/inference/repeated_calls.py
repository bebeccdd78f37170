"""Calls without gradients whose shape comes again: their micro-batches go through what a stream has recorded.

Eagerly, the host issues every operation of every micro-batch; it is slower at that than several GPUs at their work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch

from placer.errors import StageError
from placer.executor.inference.stream import Known, Streams, inference
from placer.executor.program import Capture, shapes
from placer.graph import autocast

_KNOWN_CALLS = 1000
_Call: TypeAlias = tuple[tuple[Capture, ...], tuple[Hashable, ...], tuple[int, ...], Hashable]


class RepeatedCalls:
    """Which calls came before, and those that come again.

    Args:
        streams: of the flow; they keep the recordings.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._seen: set[_Call] = set()
        self._refused: set[_Call] = set()

    def keep_only(self, holds: Callable[[Capture], bool]) -> None:
        """Forget the calls of other captures than those that this is true of."""
        for calls in (self._seen, self._refused):
            calls -= {call for call in calls if not all(map(holds, call[0]))}

    def ahead(
        self,
        captures: Sequence[Capture],
        parts: Sequence[Sequence[Any]],
        weights: Sequence[int],
        is_unchanged: Callable[[], bool],
    ) -> list[list[Any]] | None:
        """Run a call that is recorded, before it is known whether the recordings are of the model as it is.

        Args:
            captures: of each micro-batch, if the model is as it was.
            parts: the flattened inputs of each.
            weights: samples in each.
            is_unchanged: whether it is.

        Returns:
            The flattened results of each. None if the call is not recorded, or the model is another now.
        """
        call = _call(captures, parts, weights)
        if call in self._refused or call not in self._seen:
            return None
        try:
            with inference():
                return self._streams.ahead(list(map(Known, captures, parts)), is_unchanged)
        except (StageError, torch.OutOfMemoryError):
            return None  # it is run again, as one that is not known

    def run(
        self, captures: Sequence[Capture], parts: Sequence[Sequence[Any]], weights: Sequence[int]
    ) -> list[list[Any]] | None:
        """Run a call's micro-batches through the stream.

        Args:
            captures: of each micro-batch.
            parts: the flattened inputs of each.
            weights: samples in each.

        Returns:
            The flattened results of each. None for a call that comes for the first time, and for one that was tried
            and is not tried again: there was no memory for the recordings, or a layer failed, which an eager run names
            better.
        """
        call = _call(captures, parts, weights)
        if call in self._refused:
            return None
        if call not in self._seen:
            if len(self._seen) >= _KNOWN_CALLS:
                self._seen.clear()
            self._seen.add(call)
            return None
        try:
            with inference():
                return list(self._streams.open(list(map(Known, captures, parts))))
        except (StageError, torch.OutOfMemoryError) as error:
            self._refused.add(call)
            self._streams.clear()
            if isinstance(error, torch.OutOfMemoryError):
                warnings.warn(
                    f"flow(x, chunks={len(parts)}) is issued operation by operation, which takes the host more time: "
                    f"there is no memory to record it: {error}",
                    stacklevel=2,
                )
            return None


def _call(captures: Sequence[Capture], parts: Sequence[Sequence[Any]], weights: Sequence[int]) -> _Call:
    """What tells a call from others."""
    return tuple(captures), tuple(map(shapes, parts)), tuple(weights), autocast.state()
