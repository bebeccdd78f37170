"""Calls without gradients whose shape comes again: their micro-batches go through what a stream has recorded.

Eagerly, the host issues every operation of every micro-batch; it is slower at that than several GPUs at their work.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from placer.errors import StageError
from placer.executor.calls import joined
from placer.executor.stream import Call, Streams
from placer.graph.layers import LayerGraph
from placer.graph.structure import Structure, flatten


class RepeatedCalls:
    """Which calls came before, and those that come again.

    Args:
        streams: of the flow; they keep the recordings.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()

    def are(self, call: Hashable) -> bool:
        """Whether such a call came before, and can be run from recordings; notes that it came.

        Args:
            call: what is the same in calls that are alike.
        """
        came_before = call in self._seen
        self._seen.add(call)
        return came_before and call not in self._refused

    def run(
        self,
        call: Hashable,
        parts: Sequence[Sequence[Any]],
        inputs: Structure,
        weights: Sequence[int],
        graph: LayerGraph,
        outputs: Structure,
    ) -> tuple[bool, Any]:
        """Run a call's micro-batches through the stream.

        Args:
            call: as it was asked for.
            parts: the flattened inputs of each micro-batch.
            inputs: their structure.
            weights: samples in each.
            graph: of the model.
            outputs: structure of the model's result.

        Returns:
            Whether that could be done, and what the model returns. It is not tried again where it could not: there was
            no memory for the recordings, or a layer failed, which an eager run names better.
        """
        try:
            found = list(self._streams.open([Call(*inputs.unflatten(part)) for part in parts]))
        except (StageError, torch.OutOfMemoryError) as error:
            self._refused.add(call)
            self._streams.clear()
            if isinstance(error, torch.OutOfMemoryError):
                warnings.warn(
                    f"flow(x, chunks={len(parts)}) is issued operation by operation, which takes the host more time: "
                    f"there is no memory to record it: {error}",
                    stacklevel=2,
                )
            return False, None
        results = [flatten(result)[0] for result in found]
        batched = [graph.values[name].batch_dim == 0 if name in graph.values else False for name in graph.outputs]
        return True, joined(results, batched, weights, outputs)
