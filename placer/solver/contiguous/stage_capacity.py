"""Whether a device has the memory for a stage, told exactly, for sets of nodes that may be looked
at again and again.

What it needs is no sum over nodes: it has a worst moment, and what crosses is there only where it
does. So sums (``capacity.least_held``, ``most_held``) tell soon of most sets that they are too
large, or small enough, and this of the few that are left.
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

SETS_A_WORK = 3_000
"""Sets that are looked at for the first time in a unit of work, in the measure of ``cpsat.Meter``.
"""


class StageRoom:
    """The memory of stages.

    Args:
        problem: what is asked, contiguity understood.
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
        """Return, by node, the bytes that a stage has for it at the least, with so many
        micro-batches in flight.
        """
        flight = 1 if self._problem.recompute[device] != "never" else flight
        if (device, flight) not in self._least:
            self._least[device, flight] = least_by_node(self._problem, self._nodes, device, flight)
        return self._least[device, flight]

    def most(self, flight: int) -> Vector:
        """Return, by node, bytes of which a stage has no more for it, with so many micro-batches in
        flight.
        """
        if flight not in self._most:
            self._most[flight] = most_by_node(self._problem, self._nodes, flight)
        return self._most[flight]

    def more_ms(self, device: int, flight: int, members: Bools) -> float:
        """What a stage takes longer because of its memory.

        0, its forward passes once more, or infinitely long.
        """
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
