"""The pieces of a stage whose gradients are exchanged: consecutive layers, with a pass each.

    backward pass of the stage    [ piece 3 ][ piece 2 ][ piece 1 ][ piece 0 ]
    gradients on their way                   [ of 3    ][ of 2    ][ of 1    ][ of 0    ]

A stage's gradients leave when its backward pass is over. In pieces, most of them leave earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch

from placer.capture.layers import LayerGraph, tensor_bytes
from placer.executor.state.replication import Replication
from placer.schedule import gradient_pieces


def piece_starts(
    graph: LayerGraph, places: Sequence[torch.device], replication: Replication
) -> set[int]:
    """Return the numbers of the layers with which a piece begins within a stage.

    A stage that one device holds exchanges nothing, and is one piece. Other pieces have about
    equally many bytes of gradients. Among borders that are about as good, one that few bytes cross
    is taken.

    Args:
        graph: the layers.
        places: the device of each.
        replication: the further devices that hold the same layers.
    """
    sizes = _gradient_bytes(graph)
    crossing = _crossing_bytes(graph)
    borders = [index for index, pair in enumerate(pairwise(places), 1) if pair[0] != pair[1]]
    return {
        first + start
        for first, last in pairwise([0, *borders, len(graph.layers)])
        if len(set(replication.of(places[first]))) > 1
        for start in gradient_pieces.piece_starts(sizes[first:last], crossing[first:last])
    }


def pieces_of_segments(places: Sequence[torch.device], starts: Collection[int]) -> list[list[int]]:
    """Return for each segment the numbers of its pieces, which are stages of their own.

    Args:
        places: the device of every layer.
        starts: numbers of layers with which a piece begins within a segment.
    """
    found: list[list[int]] = []
    count = 0
    for index, place in enumerate(places):
        is_new = index == 0 or place != places[index - 1]
        if is_new:
            found.append([])
        if is_new or index in starts:
            found[-1].append(count)
            count += 1
    return found


def _gradient_bytes(graph: LayerGraph) -> list[int]:
    """Return the bytes of the gradients that each layer is the first to use the parameters of."""
    seen: set[str] = set()
    sizes = []
    for layer in graph.layers:
        new = [name for name in layer.state if name not in seen and graph.state[name].requires_grad]
        seen.update(new)
        sizes.append(sum(tensor_bytes(graph.state[name]) for name in new))
    return sizes


def _crossing_bytes(graph: LayerGraph) -> list[int]:
    """Return by layer the bytes of values that were made before it and are still read."""
    made: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for index, layer in enumerate(graph.layers):
        made.update(dict.fromkeys(layer.writes, index))
        last_read.update(dict.fromkeys(layer.reads, index))
    return gradient_pieces.crossing_bytes(
        (
            (graph.values[name].bytes, made[name], last)
            for name, last in last_read.items()
            if name in made
        ),
        len(graph.layers),
    )
