"""The integer program: variables, the rules of costs and memory, and its search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import inf

from ortools.sat.python import cp_model

from placer.solver.cpsat import cost_constraints, memory_constraints
from placer.solver.cpsat.runner import Answer, Limits, run
from placer.solver.cpsat.variables import PlacementVariables
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction

MOST_RULES = 600_000
"""The most rules of a model, about 15 seconds to build."""

RULES_A_SECOND = 40_000
"""Rules that are built and presolved in a second, as measured."""


def worth_building(
    problem: Problem, nodes: Reduction, time_s: float = inf, most: float = MOST_RULES
) -> bool:
    """Return whether the integer program is small enough to be built and solved in this time.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        time_s: the time that is left.
        most: the most rules that it may have, whatever the time.
    """
    count, devices = len(nodes.nodes), len(problem.devices)
    pairs = devices if problem.one_link is None or len(problem.alike_devices()) > 1 else 1
    written = (count + len(problem.values)) * devices * pairs + memory_constraints.rules_a_device(
        problem
    ) * devices
    return written <= min(most, RULES_A_SECOND * time_s)


class PlacementModel(PlacementVariables):
    """A CP-SAT model of one problem, with the arguments of ``PlacementVariables``."""

    def _add_rules(self) -> None:
        cost_constraints.values_need_links(self)
        self.makespan = self.cp.new_int_var(0, self.upper, self.objective)
        if self.objective == "throughput":
            cost_constraints.loads(self, self.load_parts)
        elif self.objective == "latency":
            cost_constraints.latency(self)
        memory_constraints.memory(self)
        self._set_goal()

    @cached_property
    def load_parts(self) -> cost_constraints.LoadParts:
        """The terms of each device's compute, of what it sends, and of what it receives."""
        return cost_constraints.load_parts(self)

    def _set_goal(self) -> None:
        if self.objective != "none":
            self.cp.minimize(self.makespan)

    # Search

    def hint(self, devices: Sequence[int]) -> None:
        """Start from a placement: by layer, its device."""
        chosen = [devices[layers[0]] for layers in self.nodes.nodes]
        for node, x in enumerate(self.x):
            for device, literal in x.items():
                self.cp.add_hint(literal, int(device == chosen[node]))

    def solve(self, limits: Limits) -> Answer:
        """Search within limits."""
        return run(self, limits)

    def read(self, value: Callable[[cp_model.IntVar], int]) -> list[int]:
        """Return, by layer, its device, from the values of a solution."""
        chosen = [next(device for device, literal in x.items() if value(literal)) for x in self.x]
        return self.nodes.spread(chosen)

    def in_unit(self, bound: float) -> float:
        """Return a bound in the objective's own unit."""
        if self.objective in ("throughput", "latency"):
            return max(0.0, bound) / self.steps_per_ms
        if self.relaxed and self.byte_unit > 1:
            bound -= 1  # the limit was rounded down too
        return max(0.0, bound) * self.byte_unit
