"""The referee's own computation of loads: one pass over layers, one over crossing values.

It shares nothing with the solver, and implements the formulas in the docstring of ``costs.py`` a
second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from placer.schema import Edge, Link, PlacementRequest

Where = Mapping[str, str]


@dataclass
class Times:
    """What one device does for one micro-batch, in milliseconds.

    Attributes:
        compute_ms: its layers' passes.
        send_ms: of values and gradients that leave it.
        receive_ms: of those that reach it.
    """

    compute_ms: float = 0.0
    send_ms: float = 0.0
    receive_ms: float = 0.0

    def load_ms(self, request: PlacementRequest) -> float:
        """Return the three as the request joins them."""
        parts = self.compute_ms, self.send_ms, self.receive_ms
        return sum(parts) if request.transfers == "added" else max(parts)


def times_of(
    request: PlacementRequest,
    where: Where,
    members: Mapping[str, Sequence[str]] = MappingProxyType({}),
    units: int = 1,
) -> dict[str, Times]:
    """Return what each device of the cluster does for a micro-batch.

    Args:
        request: the question, of a unit.
        where: by layer, its device.
        members: by device of layers, all devices that hold them; that device alone by default.
        units: of a micro-batch.
    """
    times = {device.name: Times() for device in request.devices}
    types, links = {device.name: device.type for device in request.devices}, links_of(request)
    for layer in request.profile.layers:
        device = where[layer.name]
        own = members.get(device, (device,))
        unit_ms = layer.forward_ms[types[device]]
        unit_ms += layer.backward_ms[types[device]] if request.is_training else 0.0
        for name in own:
            times[name].compute_ms += units // len(own) * unit_ms
    for edge, *ends in crossings(request, where):
        has_gradient = request.is_training and edge.gradient_bytes > 0
        for source, target in unit_ends(ends, members, units):
            there = edge.repeats * links[source, target].transfer_ms(edge.bytes)
            back = links[target, source].transfer_ms(edge.gradient_bytes) if has_gradient else 0.0
            times[source].send_ms += there
            times[source].receive_ms += back
            times[target].send_ms += back
            times[target].receive_ms += there
    return times


def unit_ends(
    ends: Sequence[str], members: Mapping[str, Sequence[str]], units: int
) -> list[tuple[str, str]]:
    """Return, by unit of a micro-batch, the devices between which its value passes.

    Args:
        ends: the devices of the source's and the reader's layer.
        members: as for ``times_of``.
        units: as for ``times_of``.
    """
    own = [members.get(device, (device,)) for device in ends]
    source, target = ([name for name in one for _ in range(units // len(one))] for one in own)
    return list(zip(source, target, strict=True))


def busiest_ms(request: PlacementRequest, where: Where) -> float:
    """Return the largest load of a device."""
    return max(times.load_ms(request) for times in times_of(request, where).values())


def links_of(request: PlacementRequest) -> dict[tuple[str, str], Link]:
    """Return the links by source and target."""
    return {(link.source, link.target): link for link in request.placed_on.links}


def crossings(request: PlacementRequest, where: Where) -> Iterator[tuple[Edge, str, str]]:
    """Return every value that is sent, once for each device that receives it."""
    for edge in request.profile.edges:
        if not edge.repeats:
            continue
        for target in sorted({where[name] for name in edge.targets} - {where[edge.source]}):
            yield edge, where[edge.source], target
