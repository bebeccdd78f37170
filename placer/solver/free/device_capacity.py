"""Capacity of devices in free placements: sizes that add up, and a correction from the last check.

State adds up, node by node, and so do the bytes that micro-batches in flight keep for their
backward passes. The peak of a device does not: it includes workspaces, values that arrive, and
values that two layers keep. So a device can hold as much as at the last computation of
``memory.footprint``, which also decides whether a placement fits. Where only state takes memory,
sizes are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from placer.solver.bounds import memory_bounds
from placer.solver.memory import FootprintCache
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction


class DeviceCapacity:
    """The memory of devices that may hold any nodes; those that only may recompute do not.

    Args:
        problem: the placement problem, placements free.
        nodes: its layers, joined where they must be together.

    Attributes:
        limited: whether memory may be too small.
        size_bytes: by node, what it takes on any device, and at the most what adds up.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self._problem, self._nodes = problem, nodes
        self.limited = memory_bounds.can_bind(problem)
        self._adds_up = memory_bounds.holds_state_alone(problem) and not problem.shared
        self.size_bytes = self._sizes()
        self._usable = [float(device.usable_bytes) for device in problem.devices]
        self._unsized = [0.0] * len(self._usable)
        self._cache = FootprintCache(problem, nodes.nodes)

    def _sizes(self) -> list[int]:
        """Return, by node, the bytes that add up: its state and what micro-batches keep there."""
        if not self.limited or self._adds_up or not self._problem.training:
            return memory_bounds.state_of_nodes(self._problem, self._nodes)
        flight = self._problem.request.chunks
        return memory_bounds.kept_of_nodes(self._problem, self._nodes, flight)

    def capacity_bytes(self, device: int) -> float:
        """Return the sum of sizes that a device can hold, as far as is known, in bytes."""
        return self._usable[device] - self._unsized[device]

    def holds(self, devices: Sequence[int]) -> bool:
        """Return whether a placement fits; update the capacity if sizes do not decide it.

        Args:
            devices: by node.
        """
        if not self.limited:
            return True
        held: list[list[int]] = [[] for _ in self._usable]
        for node, device in enumerate(devices):
            held[device].append(node)
        sizes = [sum(self.size_bytes[node] for node in nodes) for nodes in held]
        if self._adds_up:
            return all(size <= usable for size, usable in zip(sizes, self._usable, strict=True))
        uses = [self._use_bytes(device, nodes) for device, nodes in enumerate(held)]
        self._unsized = [use - size for use, size in zip(uses, sizes, strict=True)]
        return all(use <= usable for use, usable in zip(uses, self._usable, strict=True))

    def _use_bytes(self, device: int, nodes: Sequence[int]) -> int:
        """Return the memory of a device with these nodes."""
        if not nodes:
            return 0
        again = self._problem.recompute[device] == "always"
        chunks = self._problem.request.chunks
        use = self._cache.footprint(nodes)
        return use.total_bytes(chunks, again, self._problem.backwards(chunks))
