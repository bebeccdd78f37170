"""The referee's own computation of loads: one pass over layers, one over crossing values.

It shares nothing with the solver, and implements the formulas in the docstring of ``costs.py`` a
second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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


def times_of(request: PlacementRequest, where: Where) -> dict[str, Times]:
    """Return, by device, what it does."""
    times = {device.name: Times() for device in request.devices}
    types, links = {device.name: device.type for device in request.devices}, links_of(request)
    for layer in request.profile.layers:
        name = where[layer.name]
        times[name].compute_ms += layer.forward_ms[types[name]]
        times[name].compute_ms += layer.backward_ms[types[name]] if request.is_training else 0.0
    for edge, source, target in crossings(request, where):
        there = edge.repeats * links[source, target].transfer_ms(edge.bytes)
        has_gradient = request.is_training and edge.gradient_bytes > 0
        back = links[target, source].transfer_ms(edge.gradient_bytes) if has_gradient else 0.0
        times[source].send_ms += there
        times[source].receive_ms += back
        times[target].send_ms += back
        times[target].receive_ms += there
    return times


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
