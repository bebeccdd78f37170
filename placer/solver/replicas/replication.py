r"""What replicas add to the costs of one pipeline.

R pipelines run the same stages on devices of their own, each on its share of every micro-batch.
The devices that hold one stage are its replicas. Each holds parameters and gradients in full; the
optimizer's state is divided among them by whole parameters, of about equal bytes. Once per step::

    reduce    every replica sends each other the gradients that the other one owns, and adds what
              it receives (reduce-scatter)
    update    every replica runs the optimizer for the parameters that it owns
    gather    every replica sends its parameters to all others (all-gather), before the first pass
              of the stage in the next step

Times, in ms, of b bytes of gradients on the replicas D of a stage, R of them. A replica sends one
message of b / R bytes to each other one, one after another, while it receives as many. ``rate`` is
the measured rate of a link while the other direction is busy, too, and if measured while both
devices compute::

    latency   = the largest, over i in D, of the sum of latency(i, j), or of latency(j, i), over j
    per_byte  = the largest, over i in D, of the sum of 1 / rate(i, j), or of 1 / rate(j, i), over j
    add       = 3 (R - 1) / ADD_BYTES_PER_S
    reduce(b) = latency + b / R * (per_byte + add)        with rates while devices compute
    gather(b) = latency + b / R * per_byte                with rates while they do not

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5.1 (the division of optimizer state).

**Profiles of shares** lie between two measured micro-batch sizes. For a size n between the
neighbouring measured sizes a and b, every time and every size that depends on the micro-batch is::

    x(n) = x(a) + (x(b) - x(a)) * (n - a) / (b - a)        bytes are rounded up

Nothing is extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.schema import Device, Edge, Layer, Link, Profile, Rate

Links = dict[tuple[str, str], Link]


class ExchangeTime(NamedTuple):
    """The time of a replica's exchange with all others: ``latency_ms + bytes * byte_ms``."""

    latency_ms: float
    byte_ms: float

    def time_ms(self, size_bytes: int) -> float:
        """Return the time of an exchange; nothing takes no time."""
        return self.latency_ms + size_bytes * self.byte_ms if size_bytes else 0.0


@dataclass(frozen=True)
class Replication:
    """Replicas of the devices of a pipeline.

    Attributes:
        replicas: their number, two or more.
        reduce: by device of the pipeline, the time of a reduction of gradients.
        gather: by device of the pipeline, the time to gather parameters.
    """

    replicas: int
    reduce: tuple[ExchangeTime, ...]
    gather: tuple[ExchangeTime, ...]

    def byte_ms(self, device: int) -> float:
        """Return the time that a byte of gradients takes a device in a step, without latency."""
        return self.reduce[device].byte_ms + self.gather[device].byte_ms

    def alike(self, one: int, other: int) -> bool:
        """Return whether the replicas of two devices exchange equally fast."""
        return all(
            isclose(mine, theirs)  # sums may come in another order
            for times in (self.reduce, self.gather)
            for mine, theirs in zip(times[one], times[other], strict=True)
        )


def replication(positions: Sequence[Sequence[Device]], links: Links) -> Replication | None:
    """Return what replicas of a pipeline cost, or None if two of them are not linked.

    Args:
        positions: by device of the pipeline, the devices that hold its layers.
        links: of the cluster, by the names of both ends.
    """
    reduce, gather = [], []
    for devices in positions:
        names = [device.name for device in devices]
        if any((one, other) not in links for one in names for other in names if one != other):
            return None
        reduce.append(with_additions(slowest(names, links, computing=True), len(names)))
        gather.append(slowest(names, links, computing=False))
    return Replication(len(positions[0]), tuple(reduce), tuple(gather))


def with_additions(gather: ExchangeTime, count: int) -> ExchangeTime:
    """Return the time of a reduction among so many devices, which add what they gather."""
    add_ms = 1e3 * 3 * (count - 1) / count / ADD_BYTES_PER_S
    return ExchangeTime(gather.latency_ms, gather.byte_ms + add_ms)


def slowest(names: Sequence[str], links: Links, computing: bool) -> ExchangeTime:
    """Return the time in which the slowest replica sends and receives."""

    def sums(ways: Iterable[tuple[str, str]]) -> tuple[float, float]:
        rates = [loaded_rate(links[way], computing) for way in ways]
        return (
            sum(rate.latency_s for rate in rates),
            sum(1 / rate.bandwidth_bytes_per_s for rate in rates),
        )

    others = {name: [other for other in names if other != name] for name in names}
    totals = [sums((name, other) for other in others[name]) for name in names]
    totals += [sums((other, name) for other in others[name]) for name in names]
    latency_s, byte_s = (max(column) for column in zip(*totals, strict=True))
    return ExchangeTime(1e3 * latency_s, 1e3 * byte_s / len(names))


def loaded_rate(link: Link, computing: bool) -> Rate | Link:
    """Return the measured rate of a link whose other direction is as busy, or its plain rate.

    Args:
        link: between two replicas.
        computing: whether both devices run passes meanwhile.
    """
    both = (link.bidirectional_computing if computing else None) or link.bidirectional
    return both or (link.computing if computing else None) or link


def shared_profile(profile: Profile, replicas: int) -> Profile:
    """Return a profile in which a replica has only its part of the optimizer.

    State, temporaries and time of the optimizer are divided evenly; state is rounded up by layer.
    """
    layers = tuple(
        layer.model_copy(
            update={
                "optimizer_ms": {kind: ms / replicas for kind, ms in layer.optimizer_ms.items()},
                "optimizer_bytes": -(-layer.optimizer_bytes // replicas),
            }
        )
        for layer in profile.layers
    )
    share = profile.optimizer_workspace_ratio / replicas
    return profile.model_copy(update={"layers": layers, "optimizer_workspace_ratio": share})


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
"""Fields of a layer that grow with the number of samples."""

EDGE_BYTES = ("bytes", "gradient_bytes", "retained_bytes")
"""Fields of an edge that grow with the number of samples."""

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
    """Return whether all profiles have the same values between the same layers, and parameters."""
    first, *others = (
        (
            [(edge.source, edge.targets) for edge in one.edges],
            [(layer.param_bytes, layer.grad_bytes) for layer in one.layers],
        )
        for one in profiles
    )
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
