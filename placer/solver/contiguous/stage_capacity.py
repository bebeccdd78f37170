"""Exact memory of stages, for sets of nodes that a search asks about repeatedly.

A stage's memory is not a sum over nodes: it has a peak, and crossing values exist only there. So
sums (``memory_bounds.least_by_node``, ``most_by_node``) decide most sets, and this module the rest.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from placer.schedule import least_in_flight
from placer.solver.bounds.memory_bounds import least_by_node, most_by_node
from placer.solver.memory import FootprintCache
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

Bools = NDArray[np.bool_]
Vector = NDArray[np.float64]


class StageCapacity:
    """The memory of stages.

    Args:
        problem: the placement problem, contiguity understood.
        nodes: its layers.
    """

    def __init__(self, problem: Problem, nodes: Reduction) -> None:
        self._problem, self._nodes = problem, nodes
        self._cache = FootprintCache(problem, nodes.nodes)
        self._least: dict[tuple[int, int], Vector] = {}
        self._most: dict[int, Vector] = {}

    @property
    def sets(self) -> int:
        """The number of sets whose memory was computed."""
        return self._cache.computed

    def flight(self, stages_left: int) -> int:
        """Return the micro-batches that a stage must be able to hold at once.

        Args:
            stages_left: the number of stages from this one on.
        """
        request = self._problem.request
        if not self._problem.training:
            return 1
        if not self._problem.one_stage_each:
            return request.chunks
        return least_in_flight(request.schedule, stages_left, 0, request.chunks)

    def least(self, device: int, flight: int) -> Vector:
        """Return, by node, the least bytes that a stage uses for it."""
        flight = 1 if self._problem.recompute[device] != "never" else flight
        if (device, flight) not in self._least:
            self._least[device, flight] = least_by_node(self._problem, self._nodes, device, flight)
        return self._least[device, flight]

    def most(self, flight: int) -> Vector:
        """Return, by node, the most bytes that a stage uses for it."""
        if flight not in self._most:
            self._most[flight] = most_by_node(self._problem, self._nodes, flight)
        return self._most[flight]

    def more_ms(self, device: int, flight: int, members: Bools) -> float:
        """Return a stage's extra time because of memory: 0, its forward passes, or infinite."""
        problem = self._problem
        one = self._cache.footprint(np.flatnonzero(members).tolist())
        rule, limit = problem.recompute[device], problem.devices[device].usable_bytes
        if rule != "always" and one.total_bytes(flight) <= limit:
            return 0.0
        if rule == "never" or one.total_bytes(flight, again=True) > limit:
            return inf
        if rule == "always":
            return 0.0
        layers = (layer for node in np.flatnonzero(members) for layer in self._nodes.nodes[node])
        return sum(problem.forward_ms[layer][device] for layer in layers)
