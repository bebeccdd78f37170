"""Memory that slices of a shared gradient keep alive.

The gradients of concatenated values are slices of one storage. The storage lives until its last
slice is used: by the layer that made the value, or by an earlier reader whose gradient is added to
the slice.

    skip = first(x); y = up(middle(skip)); last(cat(y, skip))

    last, backward ──▶ slices for y and for skip
    up, backward       uses the slice for y
    middle, backward   the slice for skip still waits, and keeps the whole storage alive
    first, backward    uses the slice for skip
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from placer.capture.layers import Layer, LayerGraph
from placer.profiler.measurement import Measurement


@dataclass(frozen=True)
class Rest:
    """Bytes kept alive next to a slice of a gradient, and the layer until which they are kept.

    The fields match ``retained_bytes`` and ``retained_until`` of ``schema.Edge``.
    """

    bytes: int = 0
    until: str = ""


def kept_by_slices(
    graph: LayerGraph, measured: Mapping[str, Sequence[Measurement]], sizes: Mapping[str, int]
) -> tuple[list[int], dict[str, Rest]]:
    """Return the memory that waiting gradient slices keep alive.

    Args:
        graph: the layers.
        measured: by device type, one measurement for each layer.
        sizes: the bytes of every value.

    Returns:
        For each layer, the bytes present during its backward pass in storages whose slices wait for
        layers that made their values. And by value, the bytes kept while its slice waits for an
        earlier reader; they depend on the placement of the layers.
    """
    around, rests = [0] * len(graph.layers), dict[str, Rest]()
    made, read = _makers_and_readers(graph)
    # the device type with the most memory counts
    for rows in measured.values():
        kept = [0] * len(graph.layers)
        for index, (layer, row) in enumerate(zip(graph.layers, rows, strict=True)):
            for whole, positions in row.memory.slices:
                names = _made_reads(layer, positions, made)
                # without another reader before it, the slice waits for the layer that made the
                # value
                alone = [made[name] for name in names if read[name][0] == index]
                begins = min(alone, default=index)
                for step in range(begins, index):
                    kept[step] += max(
                        0, whole - sum(sizes[name] for name in names if made[name] <= step)
                    )
                # with an earlier reader, the slice is freed once that reader's gradient is added to
                # it
                shared = [name for name in names if made[name] < read[name][0] < index]
                rest = whole - sum(sizes[name] for name in shared)
                before = {name: read[name][-2] for name in shared if read[name][-1] == index}
                # the slice that waits longest, until its earliest other reader
                longest = min(before, key=before.__getitem__, default="")
                if longest and before[longest] < begins and rest > rests.get(longest, Rest()).bytes:
                    rests[longest] = Rest(rest, graph.layers[begins].name if begins < index else "")
        around = list(map(max, around, kept))
    return around, rests


def _makers_and_readers(graph: LayerGraph) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return by value the index of the layer that makes it, and the sorted indices of its readers.

    The model's inputs have no maker.
    """
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
    return made, read


def _made_reads(layer: Layer, positions: Iterable[int], made: Collection[str]) -> list[str]:
    """Return the values at these positions of a layer's reads that another layer makes."""
    reads = dict.fromkeys(layer.reads[position] for position in positions)
    return [name for name in reads if name in made]
