"""What nodes and nets load devices with, where loads alone judge a placement (see ``local.applies``)."""

from __future__ import annotations

from collections.abc import Sequence

from placer.solver.nets import Net, joined_nets
from placer.solver.problem import Problem
from placer.solver.program import memory_rules
from placer.solver.reduce import Reduction


class Loads:
    """Nodes and nets with what they cost.

    Args:
        problem: what is asked.
        nodes: its layers, joined where they must be together.

    Attributes:
        nets: what nodes exchange.
        nets_of: by node, the nets that begin or end there, by their places in ``nets``.
        work_ms: by node and device.
        state_bytes: by node, what it takes of a device's memory.
        limited: whether memory may be too small.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self._problem = problem
        self.nets = joined_nets(problem, nodes)
        self.nets_of: list[list[int]] = [[] for _ in nodes.nodes]
        for place, net in enumerate(self.nets):
            for node in (net.source, *net.readers):
                self.nets_of[node].append(place)
        devices = range(len(problem.devices))
        self.work_ms = [
            [sum(problem.compute_ms(layer, d) for layer in layers) for d in devices] for layers in nodes.nodes
        ]
        self.state_bytes = [
            sum(memory_rules.state_bytes(problem, problem.layers[layer]) for layer in layers) for layers in nodes.nodes
        ]
        self.limited = memory_rules.can_bind(problem)

    def by_device(self, devices: Sequence[int]) -> list[float]:
        """By device, its load, in milliseconds.

        Args:
            devices: by node.
        """
        load = [0.0] * len(self._problem.devices)
        for net in self.nets:
            source = devices[net.source]
            takers = {devices[reader] for reader in net.readers} - {source}
            for device in takers:
                load[device] += net.there_ms + net.back_ms
            load[source] += self.sent_ms(net, len(takers))
        for device in self._problem.untaxed:
            load[device] = 0.0
        for node, device in enumerate(devices):
            load[device] += self.work_ms[node][device]
        return load

    def sent_ms(self, net: Net, takers: int) -> float:
        """What a net that so many other devices read costs its source's."""
        sends = min(takers, 1) if self._problem.multicast else takers
        return net.there_ms * sends + net.back_ms * takers
