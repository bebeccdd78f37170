"""The variables of the integer program: which node runs on which device.

    x[n, d]   node n is on device d
    at[p, d]  stage p is device d            contiguous placements only
    y[n, p]   node n is at stage p or before contiguous placements only

Where all devices are alike, stage p simply is device p. Times are whole numbers, rounded down, so
what is proven about them holds for the true ones; bytes are exact (rounded down where they pass
2**50, with the same consequence).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from math import floor, gcd

from ortools.sat.python import cp_model

from placer.solver.bounds.memory_bounds import state_bytes
from placer.solver.cpsat.stage_windows import stage_windows
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, joined_nets
from placer.solver.values import arcs_of

Term = cp_model.LinearExpr | int

TIME_STEPS = 2**31
"""Integer steps of the largest time: nine digits, and sums stay far below 2**63."""

BYTE_STEPS = 2**50
"""Integer steps of the largest memory use: bytes are exact up to a petabyte."""


class PlacementVariables:
    """The variables of a CP-SAT model of one problem, and the rules of a placement's shape.

    Args:
        problem: the placement problem.
        nodes: its layers, joined where they must be together.
        upper: the objective of a placement that is known; only placements at least as good are
            searched.
        limited: whether memory limits hold.
        relaxed: with it, limits may be passed, and the objective is the largest excess in bytes.
        any_will_do: with it, there is no objective.

    Attributes:
        makespan: the objective, in the model's units; the rules of costs and memory make it.
    """

    makespan: cp_model.IntVar

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        *,
        upper: float | None = None,
        limited: bool = True,
        relaxed: bool = False,
        any_will_do: bool = False,
    ) -> None:
        self.problem, self.nodes = problem, nodes
        self.limited, self.relaxed = limited, relaxed
        self.objective = (
            "excess" if relaxed else "none" if any_will_do else problem.request.objective
        )
        self.cp = cp_model.CpModel()
        self.devices = range(len(problem.devices))
        self.stages = range(problem.most_devices)
        self._any: dict[tuple[frozenset[int], int], cp_model.IntVar] = {}
        self._pairs: dict[tuple[int, int, int, int], cp_model.IntVar] = {}
        self._set_units(upper)
        self.windows = [(0, self.stages[-1])] * len(nodes.nodes)
        if problem.contiguous and self.objective == "throughput" and upper is not None:
            self.windows = stage_windows(problem, nodes, upper)
        self._choose_devices()
        if problem.contiguous:
            self._choose_stages()
            self._values_run_forwards()
        else:
            self._use_so_many_devices()
            self._open_alike_devices_in_order()
        self._hold_few_layers()
        self._add_rules()

    def _add_rules(self) -> None:
        """Add the rules of costs and memory, and the objective: a subclass has them."""

    # Units

    def _set_units(self, upper: float | None) -> None:
        timed = self.objective in ("throughput", "latency")
        largest = upper if timed and upper is not None else longest_ms(self.problem)
        self.steps_per_ms = TIME_STEPS / largest if largest > 0 else 1.0
        sizes = _byte_sizes(self.problem, self.problem.request.chunks)
        single = _byte_sizes(self.problem, 1)
        # an excess need not be a multiple of it
        common = gcd(*single) if single and not self.relaxed else 1
        self.byte_unit = max(common, -(-sum(sizes) // BYTE_STEPS), 1)
        if not timed:
            self.upper = (
                floor(upper / self.byte_unit)
                if upper is not None
                else sum(sizes) // self.byte_unit + 1
            )
        else:
            self.upper = floor(largest * self.steps_per_ms) + 1

    def steps(self, time_ms: float) -> int:
        """Return a time in the model's unit, rounded down, and capped just above the possible."""
        return (
            min(floor(time_ms * self.steps_per_ms), self.upper + 1)
            if self.objective != "memory"
            else 0
        )

    def units(self, size_bytes: int) -> int:
        """Return bytes in the model's unit, rounded down."""
        return size_bytes // self.byte_unit

    # Variables

    def _choose_devices(self) -> None:
        """Put every node on exactly one of its allowed devices."""
        self.x: list[dict[int, cp_model.IntVar]] = []
        for node, devices in enumerate(self.nodes.allowed):
            first, last = self.windows[node]
            within = range(first, last + 1) if self.stage_is_device else self.devices
            open_devices = [device for device in sorted(devices) if device in within]
            self.x.append(
                {device: self.cp.new_bool_var(f"x{node},{device}") for device in open_devices}
            )
            self.cp.add_exactly_one(self.x[node].values())

    def _choose_stages(self) -> None:
        """Require stages in pipeline order, each on one device, with the first ones used first."""
        count = len(self.nodes.nodes)
        # y[node][p] says whether the node is at stage p or before. With such prefixes, the order of
        # stages takes one implication per arc and stage.
        self.y = [[self._reached_by(node, p) for p in self.stages] for node in range(count)]
        self.used = [self.cp.new_bool_var(f"used{p}") for p in self.stages]
        self.cp.add(self.used[0] == 1)
        for earlier, later in pairwise(self.used):
            self.cp.add_implication(later, earlier)
        for node in range(count):
            for p in self.stages[1:]:
                self.cp.add_implication(self.y[node][p - 1], self.y[node][p])
                self.cp.add_bool_or(self.y[node][p - 1], self.used[p])
        # stages that must be used hold a node
        for p in range(1, self.problem.least_devices):
            self.cp.add(self.used[p] == 1)
        for p in range(self.problem.least_devices if self.problem.least_devices > 1 else 0):
            self.cp.add(sum(row[p] - (row[p - 1] if p else 0) for row in self.y) >= 1)
        if self.stage_is_device:
            self._stages_are_devices()
        else:
            self._map_stages_to_devices()

    def _reached_by(self, node: int, stage: int) -> cp_model.IntVar:
        """Return whether the node is at the stage or before: known outside its window."""
        first, last = self.windows[node]
        if first <= stage < last:
            return self.cp.new_bool_var(f"y{node},{stage}")
        return self.cp.new_constant(int(stage >= last))

    def _stages_are_devices(self) -> None:
        """Require node n to be on device p exactly where it is at stage p."""
        for node, x in enumerate(self.x):
            for p, here in x.items():
                before = self.y[node][p - 1] if p else 0
                self.cp.add(here == self.y[node][p] - before)

    def _map_stages_to_devices(self) -> None:
        """Give every used stage one device, and every device at most one stage."""
        self.at = [[self.cp.new_bool_var(f"at{p},{d}") for d in self.devices] for p in self.stages]
        for p in self.stages:
            self.cp.add(sum(self.at[p]) == self.used[p])
        for device in self.devices:
            self.cp.add_at_most_one(self.at[p][device] for p in self.stages)
        self._nodes_follow_their_stages()
        self._use_alike_devices_in_order()

    def _nodes_follow_their_stages(self) -> None:
        """Require x[n, d] exactly where node n is at the stage that is device d."""
        for node, x in enumerate(self.x):
            for p in self.stages:
                here = [self.y[node][p]] + ([~self.y[node][p - 1]] if p else [])
                for device in self.devices:
                    if device not in x:
                        self.cp.add_bool_or(*(~literal for literal in here), ~self.at[p][device])
                        continue
                    self.cp.add_bool_or(
                        *(~literal for literal in here), ~self.at[p][device], x[device]
                    )
                    for literal in here:
                        self.cp.add_bool_or(~x[device], ~self.at[p][device], literal)
            for device, literal in x.items():
                self.cp.add_bool_or(~literal, *(self.at[p][device] for p in self.stages))

    def _use_alike_devices_in_order(self) -> None:
        """Break symmetry: of alike devices, the second takes a later stage than the first."""
        for members in self.alike_devices:
            for first, second in pairwise(members):
                for p in self.stages:
                    self.cp.add_bool_or(~self.at[p][second], *(self.at[q][first] for q in range(p)))

    @cached_property
    def alike_devices(self) -> list[list[int]]:
        """The devices in classes whose members may be swapped."""
        return self.problem.alike_devices()

    @cached_property
    def stage_is_device(self) -> bool:
        """True if stage p can be device p: the placement has stages, and all devices are alike."""
        return self.problem.contiguous and len(self.alike_devices) == 1

    @property
    def placed(self) -> Sequence[int]:
        """The devices that nodes may be on."""
        return self.stages if self.stage_is_device else self.devices

    # Shape of the placement

    def _values_run_forwards(self) -> None:
        """Require every reader to be at its source's stage or later, in contiguous placements."""
        for source, reader in sorted(self.nodes.arcs(arcs_of(self.problem.values))):
            for p in self.stages[:-1]:
                self.cp.add_implication(self.y[reader][p], self.y[source][p])

    def _use_so_many_devices(self) -> None:
        """Limit the number of devices that hold nodes, in free placements."""
        least, most = self.problem.least_devices, self.problem.most_devices
        if most == len(self.devices) and least == 1:
            return
        used = [self.cp.new_bool_var(f"used{device}") for device in self.devices]
        for x in self.x:
            for device, literal in x.items():
                self.cp.add_implication(literal, used[device])
        for device in self.devices:
            self.cp.add_bool_or(~used[device], *(x[device] for x in self.x if device in x))
        self.cp.add_linear_constraint(cp_model.LinearExpr.sum(used), least, most)

    def _hold_few_layers(self) -> None:
        """Limit the number of layers on each device."""
        most = self.problem.most_layers
        if most is None:
            return
        for device in self.placed:
            layers = [
                len(layers) * self.on(node, device) for node, layers in enumerate(self.nodes.nodes)
            ]
            self.cp.add(sum(layers) <= most)

    def _open_alike_devices_in_order(self) -> None:
        """Break symmetry of free placements: open the second of alike devices only after the first.

        The second takes a node only if the first has a node that weighs more.
        """
        order = sorted(
            range(len(self.x)), key=_weights(self.problem, self.nodes).__getitem__, reverse=True
        )
        for members in self.alike_devices:
            for first, second in pairwise(members):
                opened: list[cp_model.IntVar] = []
                for x in (self.x[node] for node in order):
                    if second in x:
                        self.cp.add_bool_or(~x[second], *opened)
                    if first in x:
                        opened.append(x[first])

    # Building blocks for the rules

    def on(self, node: int, device: int) -> Term:
        """x[node, device], or 0 where the node must not be there."""
        return self.x[node].get(device, 0)

    def any_on(self, nodes: Iterable[int], device: int) -> cp_model.IntVar | None:
        """Return a literal that holds if some of the nodes are on the device.

        The result is None if none can be.
        """
        able = frozenset(node for node in nodes if device in self.x[node])
        if not able:
            return None
        if len(able) == 1:
            return self.x[next(iter(able))][device]
        if (able, device) not in self._any:
            literal = self.cp.new_bool_var(f"any{len(self._any)}")
            for node in able:
                self.cp.add_implication(self.x[node][device], literal)
            self._any[able, device] = literal
        return self._any[able, device]

    def both(self, node: int, device: int, other_node: int, other: int) -> cp_model.IntVar:
        """Return a literal that holds if one node is on one device and another node on another."""
        key = (node, device, other_node, other)
        if key not in self._pairs:
            self._pairs[key] = self.cp.new_bool_var(f"both{len(self._pairs)}")
            self.cp.add_bool_or(~self.x[node][device], ~self.x[other_node][other], self._pairs[key])
        return self._pairs[key]

    def most_busy(self, device: int) -> cp_model.IntVar | int:
        """Return the most that a device's load may be: the objective."""
        return self.makespan


def _byte_sizes(problem: Problem, chunks: int) -> list[int]:
    """Return every size that the model adds up, times the largest number of its uses."""
    often = chunks if problem.training else 1
    sizes = [value.held_bytes * often for value in problem.values]
    sizes += [size * often for size in (*problem.deferred_bytes, *problem.back_workspace_bytes)]
    sizes += [*problem.weight_grad_workspace_bytes, *problem.step_bytes]
    sizes += [shared.total_bytes for shared in problem.shared]
    for layer in problem.layers:
        sizes += [
            state_bytes(problem, layer),
            layer.forward_workspace_bytes * (often if problem.recorded else 1),
        ]
        if problem.training:
            sizes += [layer.backward_workspace_bytes, layer.saved_bytes * often]
    if problem.training:
        sizes += [
            value.gradient_bytes * (often if problem.recorded else 1) for value in problem.values
        ]
        sizes += [value.retained_bytes for value in problem.values]
    return [size for size in sizes if size]


def _weights(problem: Problem, nodes: Reduction) -> list[float]:
    """Return, by node, its work, and its transfers where links are alike.

    What weighs most is apart from most others.
    """
    devices = range(len(problem.devices))
    weights = [min(problem.work_ms(layers, d) for d in devices) for layers in nodes.nodes]
    for net in joined_nets(problem, nodes) if problem.one_link is not None else ():
        for node in (net.source, *net.readers):
            weights[node] += net.there_ms + net.back_ms
    return weights


def longest_ms(problem: Problem) -> float:
    """Return an upper bound of every placement's throughput and latency objective, in ms."""
    time_ms = sum(
        max(problem.compute_ms(layer, device) for device in range(len(problem.devices)))
        for layer in range(len(problem.layers))
    )
    for value in problem.values:
        for size in (value.bytes, value.gradient_bytes):
            time_ms += (
                value.repeats
                * problem.slowest_ms(size)
                * min(len(value.readers), problem.most_devices)
            )
    return time_ms
