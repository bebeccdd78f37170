"""Profiles of shares: measurements between two micro-batch sizes, interpolated linearly.

For a size n between the neighbouring measured sizes a and b, every time and every size that depends
on the micro-batch is::

    x(n) = x(a) + (x(b) - x(a)) * (n - a) / (b - a)        bytes are rounded up

Nothing is extrapolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placer.schema import Edge, Layer, Profile

TIMES = ("forward_ms", "backward_ms", "weight_grad_ms")
LAYER_BYTES = (
    "saved_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "recorded_workspace_bytes",
    "deferred_bytes",
    "input_grad_workspace_bytes",
    "weight_grad_workspace_bytes",
)
EDGE_BYTES = ("bytes", "gradient_bytes", "retained_bytes")

Way = tuple[int, int]
"""The part of the way from one measured size to the next: samples gone, and samples in all."""


def profile_of_share(profiles: Sequence[Profile], samples: int) -> Profile:
    """Return the profile of a micro-batch of some size.

    Args:
        profiles: of the same layers and values, by ascending micro-batch size.
        samples: the size, from the smallest to the largest measured one.
    """
    above = next(index for index, one in enumerate(profiles) if one.batch_size >= samples)
    high = profiles[above]
    if high.batch_size == samples:
        return high
    low = profiles[above - 1]
    way = samples - low.batch_size, high.batch_size - low.batch_size
    layers = tuple(_layer(*pair, way) for pair in zip(low.layers, high.layers, strict=True))
    edges = tuple(
        one.model_copy(update=_bytes(one, other, way, EDGE_BYTES))
        for one, other in zip(low.edges, high.edges, strict=True)
    )
    return low.model_copy(update={"batch_size": samples, "layers": layers, "edges": edges})


def can_interpolate(profiles: Sequence[Profile]) -> bool:
    """Return whether all profiles have the same values between the same layers."""
    first, *others = ([(edge.source, edge.targets) for edge in one.edges] for one in profiles)
    return all(other == first for other in others)


def _layer(low: Layer, high: Layer, way: Way) -> Layer:
    changed: dict[str, object] = {
        name: _times(getattr(low, name), getattr(high, name), way) for name in TIMES
    }
    return low.model_copy(update=changed | _bytes(low, high, way, LAYER_BYTES))


def _times(low: Mapping[str, float], high: Mapping[str, float], way: Way) -> dict[str, float]:
    gone, whole = way
    return {
        kind: low[kind] + (high[kind] - low[kind]) * gone / whole for kind in low if kind in high
    }


def _bytes(
    low: Layer | Edge, high: Layer | Edge, way: Way, names: Sequence[str]
) -> dict[str, object]:
    gone, whole = way
    return {
        name: getattr(low, name) - (getattr(low, name) - getattr(high, name)) * gone // whole
        for name in names
    }
