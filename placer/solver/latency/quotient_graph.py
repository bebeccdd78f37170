"""The graph of devices that wait for one another, updated as nodes move; it must stay acyclic."""

from __future__ import annotations

from collections.abc import Sequence

from placer.solver.problem import Problem, arcs_of
from placer.solver.reduce import Reduction


class Quotient:
    """The graph over devices that an assignment of nodes induces.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        device: by node; callers announce each move before they make it.

    Attributes:
        before: by node, the nodes that it reads from.
        after: by node, the nodes that read from it.
    """

    def __init__(self, problem: Problem, nodes: Reduction, device: list[int]) -> None:
        self._device = device
        self.before: list[list[int]] = [[] for _ in nodes.nodes]
        self.after: list[list[int]] = [[] for _ in nodes.nodes]
        self._arcs = [[0] * len(problem.devices) for _ in problem.devices]
        for source, reader in sorted(nodes.arcs(arcs_of(problem.values))):
            self.after[source].append(reader)
            self.before[reader].append(source)
            self._arcs[device[source]][device[reader]] += 1

    def move(self, node: int, device: int) -> None:
        """Bring a node to a device."""
        old, at, arcs = self._device[node], self._device, self._arcs
        for reader in self.after[node]:
            arcs[old][at[reader]] -= 1
            arcs[device][at[reader]] += 1
        for source in self.before[node]:
            arcs[at[source]][old] -= 1
            arcs[at[source]][device] += 1
        at[node] = device

    def is_acyclic(self) -> bool:
        """Return whether no device waits for itself by way of others."""
        waiting = [
            sum(1 << other for other, arcs in enumerate(row) if arcs and other != d)
            for d, row in enumerate(self._arcs)
        ]
        left, last = (1 << len(waiting)) - 1, -1
        while left != last:
            last = left
            for device, readers in enumerate(waiting):
                if not readers & left:
                    left &= ~(1 << device)
        return not left

    def closed(self, node: int, arcs: Sequence[Sequence[int]]) -> list[int]:
        """Return a node with all that follows it by such arcs and is where it is."""
        found, seen = [node], {node}
        for one in found:
            for other in arcs[one]:
                if other not in seen and self._device[other] == self._device[node]:
                    seen.add(other)
                    found.append(other)
        return found
