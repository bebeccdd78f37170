"""Loads of devices from nodes and nets, where loads alone judge a placement."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from math import inf

from placer.schema import Link
from placer.solver.problem import Problem
from placer.solver.reduce import Net, Reduction, exchanges

Times = list[list[float]]
LinkRate = tuple[float, float]
"""Bandwidth and latency."""


def loads_add_up(problem: Problem) -> bool:
    """Return whether loads alone judge a placement: transfers are added, and all devices linked."""
    request = problem.request
    numbers = range(len(problem.devices))
    linked = all(problem.links[a][b] is not None for a in numbers for b in numbers if a != b)
    return (
        not problem.contiguous
        and request.objective == "throughput"
        and request.transfers == "added"
        and linked
        and (problem.one_link is not None or not problem.multicast)
    )


class Loads:
    """Nodes and nets with what they cost.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.

    Attributes:
        nets: what nodes exchange, with the times over some link.
        nets_of: by node, the nets that begin or end there, by their places in ``nets``.
        each_ms: by net, device of its source and another one, what a copy for that one costs both
            of them.
        work_ms: by node and device.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self._problem = problem
        self.nets, self.each_ms = _exchanged(problem, nodes)
        self.nets_of: list[list[int]] = [[] for _ in nodes.nodes]
        for place, net in enumerate(self.nets):
            for node in (net.source, *net.readers):
                self.nets_of[node].append(place)
        devices = range(len(problem.devices))
        self.work_ms = [[problem.work_ms(layers, d) for d in devices] for layers in nodes.nodes]

    def by_device(self, devices: Sequence[int]) -> list[float]:
        """Return, by device, its load, in milliseconds.

        Args:
            devices: by node.
        """
        load = [0.0] * len(self._problem.devices)
        for place, net in enumerate(self.nets):
            source = devices[net.source]
            takers = {devices[reader] for reader in net.readers} - {source}
            for device in takers:
                load[device] += self.each_ms[place][source][device]
            load[source] += self.sent_ms(place, source, takers)
        for device in self._problem.untaxed:
            load[device] = 0.0
        for node, device in enumerate(devices):
            load[device] += self.work_ms[node][device]
        return load

    def sent_ms(self, net: int, source: int, takers: Collection[int]) -> float:
        """Return what a net with some receiving devices costs its source's device."""
        copies_ms = sum(self.each_ms[net][source][taker] for taker in takers)
        return (
            copies_ms - self.nets[net].there_ms * max(0, len(takers) - 1) * self._problem.multicast
        )


def _exchanged(problem: Problem, nodes: Reduction) -> tuple[list[Net], list[Times]]:
    """Return the nets over some link, and by net, source and target device, the time of a copy."""
    links = {_rate_of(link): link for link in problem.kinds_of_links}
    found = exchanges(problem, nodes) if links else []
    over = {way: [exchange.over(link) for exchange in found] for way, link in links.items()}
    pairs = _there_and_back(problem)
    # Many pairs of devices have the same links there and back: compute each copy once for them.
    kinds = {pair: kind for kind, pair in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
    places = [[kinds[pair] for pair in row] for row in pairs]
    nets, each_ms = [], []
    for number, alike in enumerate(zip(*over.values(), strict=True)):
        if not any(net.there_ms or net.back_ms for net in alike):
            continue
        copy_ms = [
            over[a][number].there_ms + over[b][number].back_ms if a and b else inf for a, b in kinds
        ]
        nets.append(alike[0])
        each_ms.append(_by_pair(copy_ms, places, problem.one_link is not None))
    return nets, each_ms


def _by_pair(copy_ms: list[float], kinds: list[list[int]], same_links: bool) -> Times:
    """Return the time of a copy by source and target device, from the kinds of their links."""
    if same_links:
        return [[min(copy_ms)] * len(kinds)] * len(kinds)
    return [[copy_ms[kind] for kind in row] for row in kinds]


def _there_and_back(problem: Problem) -> list[list[tuple[LinkRate | None, LinkRate | None]]]:
    """Return, by device and another one, the way there and that back."""
    rates = [[None if link is None else _rate_of(link) for link in row] for row in problem.links]
    return [
        list(zip(there, back, strict=True))
        for there, back in zip(rates, zip(*rates, strict=True), strict=True)
    ]


def _rate_of(link: Link) -> LinkRate:
    """Return a key that is equal for links with equal transfer times."""
    return link.bandwidth_bytes_per_s, link.latency_s
