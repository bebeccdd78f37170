"""What is held beside slices of gradients that wait.

Where values are concatenated their gradients are slices of one storage, all of which is held until
the last of them was
used: by the layer that made the value, or by one that reads it before, whose gradient is added to
the slice.

    skip = first(x); y = up(middle(skip)); last(cat(y, skip))

    last, backwards ──▶ slices of y and skip      up uses that of y; that of skip waits for middle, with all of it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placer.capture.layers import LayerGraph
from placer.profiler.measurement import Measurement


@dataclass(frozen=True)
class Rest:
    """What is held beside a slice of a gradient, and from which layer on, as ``schema.Edge`` has
    them.
    """

    bytes: int = 0
    until: str = ""


def beside_slices(
    graph: LayerGraph, measured: Mapping[str, Sequence[Measurement]], sizes: Mapping[str, int]
) -> tuple[list[int], dict[str, Rest]]:
    """What is held beside slices, where there are any.

    Args:
        graph: the layers.
        measured: by device type, one measurement for each layer.
        sizes: the bytes of every value.

    Returns:
        By layer, what its backward pass finds of storages whose slices wait for layers that made
        their values; and by value, what is held while its slice waits for a layer that reads it
        before, which depends on who is where.
    """
    around, rests = [0] * len(graph.layers), dict[str, Rest]()
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    made = {
        name: place[value.source]
        for name, value in graph.values.items()
        if value.source is not None
    }
    read = {
        name: sorted({place[reader] for reader in readers})
        for name, readers in graph.readers().items()
    }
    for rows in measured.values():
        beside = [0] * len(graph.layers)
        for index, (layer, row) in enumerate(zip(graph.layers, rows, strict=True)):
            for whole, positions in row.memory.slices:
                names = [
                    name
                    for name in dict.fromkeys(layer.reads[at] for at in positions)
                    if name in made
                ]
                alone = [made[name] for name in names if read[name][0] == index]
                begins = min(alone, default=index)
                for step in range(begins, index):
                    beside[step] += max(
                        0, whole - sum(sizes[name] for name in names if made[name] <= step)
                    )
                shared = [name for name in names if made[name] < read[name][0] < index]
                rest = whole - sum(sizes[name] for name in shared)
                before = {name: read[name][-2] for name in shared if read[name][-1] == index}
                longest = min(before, key=before.__getitem__, default="")
                if longest and before[longest] < begins and rest > rests.get(longest, Rest()).bytes:
                    rests[longest] = Rest(rest, graph.layers[begins].name if begins < index else "")
        around = list(map(max, around, beside))
    return around, rests
