r"""Lower bounds of passes of which some parameters rest off their device.

A pass takes no less than its layers compute, and no less than its copies, the last of which a layer
waits for. A mean pass has the mean times of several.

**Only accelerators**. What exceeds the memory of all hosts comes from a disk, and a byte from there
takes a device at least r times as long::

    bytes(s) = the least sum of parameters of layers of at most s bytes, one of them with s,
               that is at least  all state + 2 s - memory of all devices
    disk(s)  = max(0, bytes(s) - host_memory_bytes * number of hosts)
    r        = min over devices of  bandwidth from the host / smaller one of it and the disk's
    q        = min over layers of  part of their parameters that a pass copies: below 1 only if the
               experts of all layers together are enough for copies of chosen experts alone
    bound    = max(bound of the latency without memory limits,
                   min over s of q (bytes(s) + (r - 1) disk(s)) / sum of the devices' bandwidths
                   + shortest layer)

**With the CPU of a host**. A layer l may also be computed there, so that it need not be copied. Of
each layer, the parts stay(l), host(l), disk(l) and cpu(l) add up to 1; g(l) and c(l) are its
shortest times on an accelerator and on a CPU. For each s, a linear program has the least mean of
the times T of the passes::

    time(l)                         = (stay(l) + host(l) + disk(l)) g(l) + cpu(l) c(l)
    end(l)                         >= end(k) + time(l), for each layer k that l reads
    T                              >= end(l)
    sum of (1 - cpu(l)) g(l)       <= accelerators * T
    sum of cpu(l) c(l)             <= CPUs * T
    sum of copies of l             <= copying devices * (T - shortest layer)
    sum of stay(l) b(l) + (1 - cpu(l)) buffers(l) + 2 s
                                   <= memory of all accelerators
    sum of cpu(l) (b(l) + buffers(l)), and of host(l) b(l) if each host has a CPU
                                   <= memory of all CPUs
    sum of host(l) b(l)            <= host_memory_bytes * number of hosts
    sum of disk(l) b(l)            <= disk_bytes * number of hosts

Layers larger than s have host(l) = disk(l) = 0. One more program has no layer that rests. The bound
is the least of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf
from typing import Any

from ortools.linear_solver import pywraplp

from placer.schema.base import Tier, copies_chosen_experts
from placer.solver import pass_times
from placer.solver.bounds.simple_bounds import fastest_ms
from placer.solver.components import sources_and_readers
from placer.solver.latency.resting_layers import RestingRules, least_sum
from placer.solver.problem import Problem
from placer.solver.values import arcs_of

Passes = Sequence[tuple[float, Problem]]
"""Passes by their share of all passes."""

MOST_PROGRAMS = 8
"""Linear programs, each with another size of the largest layer that rests."""

MOST_LAYERS = 1600
"""Layers of all programs together, which take about 0.2 ms each to state."""

SLACK = 1e-6
"""Relative error of a linear program's value, which the bound leaves out."""

STAY, CPU = "stay", "cpu"


def needed_bytes(rules: RestingRules) -> float:
    """Return the least bytes that must rest if nothing fits otherwise; infinite if too many.

    Of ``bytes(s)`` of the module's docstring, at least ``short + 2 s`` must rest, of which the
    largest layer itself is s.
    """
    most = sum(allowed_bytes(rules).values())
    short = short_bytes(rules)
    sizes = sorted(rules.sizes[layer] for layer in rules.layers)
    totals = []
    for largest in sorted(set(sizes)):
        others = [size for size in sizes if size <= largest]
        others.remove(largest)
        totals.append(largest + least_sum(others, short + largest))
    return min((total for total in totals if total <= most), default=inf)


def short_bytes(rules: RestingRules) -> int:
    """Return the bytes of all parameters and buffers beyond the devices' memory, maybe below 0."""
    problem = rules.problem
    state = sum(layer.param_bytes + layer.buffer_bytes for layer in problem.layers)
    return state - sum(device.usable_bytes for device in problem.devices)


def allowed_bytes(rules: RestingRules) -> dict[Tier, int]:
    """Return the bytes that may rest in each tier of all hosts."""
    devices = rules.problem.devices
    return {
        tier: limit * len({devices[number].host for number in rules.readers[tier]})
        for tier, limit in rules.limits.items()
    }


def copying_ms(rules: RestingRules, resting: float) -> float:
    """Return a bound on a pass that copies so many bytes, with ``r`` of the docstring.

    Args:
        rules: where parameters may rest.
        resting: the bytes to copy.
    """
    on_hosts = allowed_bytes(rules).get("host", 0)
    shortest = min(
        rules.problem.forward_ms[layer][device]
        for layer in rules.layers
        for device in rules.copying
    )
    slower = min(
        (rules.bandwidth(one, "host") / rules.bandwidth(one, "disk") for one in rules.on_disk),
        default=1.0,
    )
    copied = _copied_share(rules) * (resting + (slower - 1) * max(0, resting - on_hosts))
    rate = sum(rules.bandwidth(device, "host") for device in rules.copying)
    return 1e3 * copied / rate + shortest


def _copied_share(rules: RestingRules) -> float:
    """Return the least part of a layer that a pass copies, ``q`` of the module's docstring."""
    layers = [rules.problem.layers[layer] for layer in rules.layers]
    if not copies_chosen_experts(sum(layer.expert_bytes for layer in layers)):
        return 1.0
    return min(
        1 - (1 - layer.expert_share) * layer.expert_bytes / layer.param_bytes for layer in layers
    )


def cpu_bound_ms(rules: RestingRules, passes: Passes, limit_s: float) -> float:
    """Return a bound where CPUs of hosts may compute layers, by linear programs; 0 if unknown.

    Args:
        rules: where parameters may rest, of the mean pass.
        passes: of which the placement has the least mean time.
        limit_s: seconds for each program, which takes milliseconds mostly.
    """
    sizes = sorted({rules.sizes[layer] for layer in rules.layers})
    steps = min(len(sizes), MOST_PROGRAMS, max(1, MOST_LAYERS // len(rules.sizes)))
    # each program covers the sizes above the last one's largest layer
    ends = [len(sizes) * step // steps for step in range(steps + 1)] if steps else [0]
    # Without layers that rest, the objective is the latency of the mean pass.
    programs = [_Program(rules, [(1.0, rules.problem)], None)]
    programs += [
        _Program(rules, passes, (sizes[first], sizes[end - 1]))
        for first, end in itertools.pairwise(ends)
    ]
    least = min(program.least_ms(limit_s) for program in programs)
    return 0.0 if least == inf else least * (1 - SLACK)


class _Program:
    """A linear program of the module's docstring.

    Args:
        rules: where parameters may rest.
        passes: of which the mean is least.
        largest: the least and the most bytes of the largest layer that rests; None if none does.
    """

    def __init__(
        self, rules: RestingRules, passes: Passes, largest: tuple[int, int] | None
    ) -> None:
        self._rules, self._problem = rules, rules.problem
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._parts = [self._parts_of(layer, largest) for layer in range(len(rules.sizes))]
        self._limit_memory(2 * largest[0] if largest is not None else 0)
        self._solver.Minimize(sum(share * self._time_of(one) for share, one in passes))

    def least_ms(self, limit_s: float) -> float:
        """Return the least mean time: infinite if nothing fits, 0 if the time runs out."""
        self._solver.SetTimeLimit(max(1, int(1e3 * limit_s)))
        status = self._solver.Solve()
        if status == self._solver.INFEASIBLE:
            return inf
        return float(self._solver.Objective().Value()) if status == self._solver.OPTIMAL else 0.0

    def _parts_of(self, layer: int, largest: tuple[int, int] | None) -> dict[str, Any]:
        """Return the parts of a layer by where its parameters are."""
        rules, allowed = self._rules, self._problem.allowed[layer]
        places = [STAY] if not allowed.isdisjoint(rules.others) else []
        if largest is not None and layer in rules.layers and rules.sizes[layer] <= largest[1]:
            places += [tier for tier, own in rules.readers.items() if not allowed.isdisjoint(own)]
        places += [CPU] if not allowed.isdisjoint(rules.cpus) else []
        parts = {place: self._solver.NumVar(0, 1, "") for place in places}
        self._solver.Add(self._solver.Sum([*parts.values()]) == 1)
        return parts

    def _part(self, layer: int, *places: str) -> Any:
        """Return the part of a layer that is in some of these places."""
        own = self._parts[layer]
        return self._solver.Sum([own[place] for place in own if place in places])

    def _limit_memory(self, buffer_bytes: int) -> None:
        """Add the limits of memory.

        Args:
            buffer_bytes: of the two buffers of a device.
        """
        rules, devices, total = self._rules, self._problem.devices, self._solver.Sum
        stay, computed = [], []
        rest: dict[Tier, Any] = {}
        for number, layer in enumerate(self._problem.layers):
            stay.append(layer.param_bytes * self._part(number, STAY))
            stay.append(layer.buffer_bytes * self._part(number, STAY, *rules.limits))
            computed.append((layer.param_bytes + layer.buffer_bytes) * self._part(number, CPU))
        for tier, limit in allowed_bytes(rules).items():
            rest[tier] = total(
                [size * self._part(number, tier) for number, size in enumerate(rules.sizes)]
            )
            self._at_most(rest[tier], limit)
        usable = sum(devices[device].usable_bytes for device in rules.others)
        self._at_most(total(stay), usable - buffer_bytes)
        on_cpus = sum(devices[device].usable_bytes for device in rules.cpus)
        hosts = {devices[device].host for device in rules.copying}
        if "host" in rest and hosts == {devices[device].host for device in rules.cpus}:
            computed.append(rest["host"])
        self._at_most(total(computed), on_cpus)

    def _at_most(self, total: Any, limit: int) -> None:
        """Add a limit of bytes, as parts of all parameters, which GLOP's tolerance suits."""
        unit = 1 / max(1, sum(self._rules.sizes))
        self._solver.Add(unit * total <= unit * limit)

    def _time_of(self, problem: Problem) -> Any:
        """Return the time of a pass."""
        rules, solver = self._rules, self._solver
        whole = solver.NumVar(0, solver.infinity(), "")
        there = self._times(_fastest(problem, rules.others), STAY, *rules.limits)
        on_cpus_ms = self._times(_fastest(problem, rules.cpus), CPU)
        both = [one + other for one, other in zip(there, on_cpus_ms, strict=True)]
        arcs = sorted(set(arcs_of(problem.values)))
        row_of = _rows(len(both), arcs)
        ends = [solver.NumVar(0, solver.infinity(), "") for _ in range(1 + max(row_of))]
        time_ms = [
            solver.Sum([both[layer] for layer, own in enumerate(row_of) if own == row])
            for row in range(len(ends))
        ]
        for end, own_ms in zip(ends, time_ms, strict=True):
            solver.Add(end >= own_ms)
            solver.Add(whole >= end)
        for source, reader in ((row_of[one], row_of[other]) for one, other in arcs):
            if source != reader:
                solver.Add(ends[reader] >= ends[source] + time_ms[reader])
        solver.Add(solver.Sum(there) <= len(rules.others) * whole)
        solver.Add(solver.Sum(on_cpus_ms) <= len(rules.cpus) * whole)
        copies = [
            self._copy_ms(problem, layer, tier) * self._parts[layer][tier]
            for layer in rules.layers
            for tier in rules.limits
            if tier in self._parts[layer]
        ]
        # the last copy of a device comes before a layer, and each pass computes some layer
        shortest = min(fastest_ms(problem, problem.forward_ms))
        solver.Add(solver.Sum(copies) <= len(rules.copying) * (whole - shortest))
        return whole

    def _times(self, fastest: Sequence[float], *places: str) -> list[Any]:
        """Return, by layer, its time in the part that is in some of these places."""
        return [
            (0.0 if time_ms == inf else time_ms) * self._part(layer, *places)
            for layer, time_ms in enumerate(fastest)
        ]

    def _copy_ms(self, problem: Problem, layer: int, tier: Tier) -> float:
        """Return the least time of a layer's copies on a device that may have it."""
        rules = self._rules
        # Experts are chosen only if enough of them rest, of all layers at most.
        choices: list[pass_times.Resting] = [{layer: tier}, dict.fromkeys(rules.layers, tier)]
        return min(
            pass_times.copying_ms(problem, [layer], device, resting)
            for device in rules.readers[tier]
            if device in problem.allowed[layer]
            for resting in choices
        )


def _rows(count: int, arcs: Sequence[tuple[int, int]]) -> list[int]:
    """Return, by layer, its row: layers that follow one another without a branch.

    Args:
        count: of the layers.
        arcs: pairs of a layer and a later one that reads its value, each once.
    """
    sources, readers = sources_and_readers(count, arcs)
    rows: list[int] = []
    number = 0
    for own in sources:
        if len(own) == 1 and len(readers[own[0]]) == 1:
            rows.append(rows[own[0]])
        else:
            rows.append(number)
            number += 1
    return rows


def _fastest(problem: Problem, among: Sequence[int]) -> list[float]:
    """Return, by layer, its time on the fastest of some devices; infinite if it may be on none."""
    return [
        min((row[device] for device in among if device in problem.allowed[layer]), default=inf)
        for layer, row in enumerate(problem.forward_ms)
    ]
