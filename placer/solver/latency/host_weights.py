r"""Parameters that rest on the host, where no placement fits the devices' memory otherwise.

They rest in the host's memory or on its disk. ``costs.py`` defines the time of a pass and the
memory of a device. A layer may rest if its parameters belong to no other layer, nor to another call
of its modules. The search runs where ``host_memory_bytes`` or ``disk_bytes`` is given and all
parameters together fit no placement::

    one device copies,     ──┬──▶ assignments ──▶ layers that rest, ──▶ shorter passes, by moves
    others are full          │                    spread evenly         of layers
    usual search, with more  │
    memory on devices      ──┘

All bytes copied from the host's memory cost alike, except experts of which a pass copies a part. So
the fewest bytes rest that leave room for two buffers, of all layers or of layers with experts
alone, and they are spread evenly over a device's layers: then copies run while the layers between
them compute. Of these layers, those that do not fit ``host_memory_bytes`` are on the disk, spread
evenly in turn. Small requests are enumerated instead.

A host's CPU may be a device, too. Then a layer whose parameters fit no accelerator is computed on
the CPU or copied, whichever makes the passes shorter, and the usual search alone does not decide:
its placement is one of those that are compared.

``resting_bounds.py`` has the lower bounds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from time import monotonic
from types import MappingProxyType

from placer.schema import Device, Infeasibility, Placement, PlacementRequest
from placer.schema.base import LARGEST_BYTES, Tier
from placer.solver import answer, costs, pass_times
from placer.solver.bounds import simple_bounds
from placer.solver.latency import resting_bounds
from placer.solver.latency.resting_layers import (
    RestingRules,
    evenly,
    filled,
    parts,
    shifted,
    units_of,
)
from placer.solver.pass_times import Resting
from placer.solver.problem import SAME, Problem
from placer.solver.reduce import reduced
from placer.utils.units import bytes_text

Solve = Callable[[PlacementRequest], Placement]
WeightedPass = tuple[float, PlacementRequest]
"""A request for a pass, and its share of all passes."""

NOTHING_RESTS = {"host_memory_bytes": None, "disk_bytes": None}
"""Fields of a request in which nothing may rest."""

NOTHING: Resting = MappingProxyType({})
"""The resting parameters of the answer of the search without any."""

FEW = 5_000
"""Assignments with sets of resting layers up to which all are tried."""

FACTORS = (1.1, 1.5, 3.0)
"""Memory that devices get in addition, as multiples of the bytes that must rest."""

MOST_ALONE = 8
"""Devices that get additional memory alone."""

BOUND_SHARE = 0.1
"""Share of the remaining time for the linear programs of the bound."""

SHARE = 0.6
"""Share of the remaining time for the search with additional memory."""

CPU_PARTS = 16
"""Numbers of bytes that are tried on a host's CPU."""

MOST_SIZES = 16
"""Sizes of the largest resting layer that are tried for a device."""

DISTANCES = (1, 2, 3, 4, 8, 16)
"""Numbers of layers that a resting layer, or a border between devices, moves at once."""


def solved(
    request: PlacementRequest,
    solve: Solve,
    stop: threading.Event | None,
    passes: Sequence[WeightedPass] = (),
) -> Placement:
    """Return the best placement, with resting parameters if none fits otherwise.

    Args:
        request: with objective ``latency``, and ``host_memory_bytes`` or ``disk_bytes``.
        solve: answers a request without these.
        stop: set to end the search; None for none.
        passes: of which the request asks for the mean; empty for a single pass.
    """
    began = monotonic()
    header = {"id": request.content_hash()}
    # The other half is for resting parameters, should the usual search find nothing.
    limit_s = {"time_limit_s": 0.5 * request.time_limit_s}
    plain = _without_resting(request)
    found = solve(plain.model_copy(update=limit_s)).model_copy(update=header)
    search = _Search(request, solve, began, stop, passes or [(1.0, request)])
    # On the CPU of a host, layers take long: copies to a device may make the pass shorter.
    if found.layer_devices and not search.uses_cpus(found):
        return found
    if not search.copying:
        return _without(found, _unmeasured(request))
    if found.layer_devices:
        search.start(found)
    search.run(is_needed=found.status == "infeasible")
    if search.best is not None:
        return search.placement(found)
    # Nothing was found, but nothing proves that no placement with resting parameters exists.
    if not search.is_impossible:
        return found.model_copy(update={"status": "unknown", "infeasible": None, "bound": 0.0})
    limits = {"host memory": request.host_memory_bytes, "disk space": request.disk_bytes}
    given = [f"{bytes_text(size)} of {name}" for name, size in limits.items() if size is not None]
    return _without(found, f"{' and '.join(given)} for parameters do not suffice either")


def _without_resting(request: PlacementRequest) -> PlacementRequest:
    """Return the request in which nothing rests, for placements of the same kind otherwise."""
    changed: dict[str, object] = {**NOTHING_RESTS}
    rules = request.constraints
    if rules.contiguous is None and request.computes_on_host:
        changed["constraints"] = rules.model_copy(update={"contiguous": False})
    return request.model_copy(update=changed)


def _unmeasured(request: PlacementRequest) -> str:
    """Return which rate no device has, so that nothing can rest."""
    if request.host_memory_bytes is None and any(one.from_host for one in request.devices):
        return "no device has a measured rate from the host's disk (from_disk)"
    return "no device has a measured rate from the host's memory (from_host)"


def _without(found: Placement, more: str) -> Placement:
    """Return an answer without a placement, with a further reason."""
    if found.infeasible is None:
        return found
    reason = f"{found.infeasible.reason}; {more}"
    changed: Infeasibility = found.infeasible.model_copy(update={"reason": reason})
    return found.model_copy(update={"infeasible": changed})


@dataclass(frozen=True)
class _Found:
    """An assignment with resting layers.

    Attributes:
        assignment: by layer, its device.
        resting: where parameters rest, by layer.
        value_ms: the mean latency of the passes.
    """

    assignment: tuple[int, ...]
    resting: Resting
    value_ms: float


class _Search:
    """The search for an assignment and its resting layers.

    Args:
        request: with objective ``latency``, and ``host_memory_bytes`` or ``disk_bytes``.
        solve: answers a request without these.
        began: when the solve began, by the monotonic clock.
        stop: set to end the search; None for none.
        passes: whose mean latency is the objective.

    Attributes:
        copying: the devices that can copy resting parameters.
        best: the best so far.
        bound_ms: a proven lower bound.
        is_impossible: whether it is proven that nothing fits.
    """

    def __init__(
        self,
        request: PlacementRequest,
        solve: Solve,
        began: float,
        stop: threading.Event | None,
        passes: Sequence[WeightedPass],
    ) -> None:
        self._passes = [(share, Problem.from_request(asked)) for share, asked in passes]
        self._request, self._solve, self._stop, self._began = request, solve, stop, began
        self._limit_s = request.time_limit_s
        self._problem = Problem.from_request(request)
        ample = [_with_memory(device, LARGEST_BYTES) for device in self._problem.devices]
        self._ample = replace(self._problem, devices=tuple(ample))
        self._rules = RestingRules(request, self._problem)
        self._sizes, self._may_rest = self._rules.sizes, self._rules.layers
        self._known: dict[tuple[int, ...], list[int] | None] = {}
        self.copying = self._rules.copying
        self.best: _Found | None = None
        self.bound_ms = 0.0
        self.is_impossible = False
        self._method = "resting parameters"

    def run(self, is_needed: bool) -> None:
        """Search until nothing improves, or the time is over.

        Args:
            is_needed: whether it is proven that nothing fits without resting parameters.
        """
        self.bound_ms = self._bound_ms(is_needed)
        if self.is_impossible:
            return
        if prod(len(self._places(layer)) for layer in range(len(self._sizes))) <= FEW:
            self._enumerate()
            self.is_impossible = self.best is None
            return
        copied = self._without_cpus() if self._rules.cpus else None
        for assignment in itertools.chain(
            self._partly_on_cpus(),
            filled(self._rules, range(len(self._problem.devices))),
            self._assignments(),
        ):
            self._offer(assignment)
            for moved in self._with_moved_borders(assignment) if self.best is None else ():
                self._offer(moved)
        self._improve()
        if copied is not None and (self.best is None or copied.value_ms < self.best.value_ms):
            self.best = copied

    def _without_cpus(self) -> _Found | None:
        """Return the best that moves find from assignments without layers on CPUs.

        It may be another local optimum than the best that they find from other assignments.
        """
        before, self.best = self.best, None
        self._limit_s -= 0.5 * self._left_s()
        for base in filled(self._rules, self._rules.others):
            self._offer(base)
        self._improve()
        self._limit_s = self._request.time_limit_s
        found, self.best = self.best, before
        return found

    def uses_cpus(self, found: Placement) -> bool:
        """Return whether a placement has layers on the CPUs of hosts that others copy from."""
        names = {self._problem.devices[cpu].name for cpu in self._rules.cpus}
        return not names.isdisjoint(found.layer_devices.values())

    def start(self, found: Placement) -> None:
        """Take a placement without resting parameters as the best so far."""
        assignment = tuple(self._problem.assignment_of(found.layer_devices))
        self.best = _Found(assignment, NOTHING, self._value_ms(assignment, NOTHING))

    def placement(self, plain: Placement) -> Placement:
        """Return the best placement.

        Args:
            plain: the answer of the search without resting parameters.
        """
        best = self.best
        assert best is not None
        if best.resting is NOTHING:
            assert plain.objective_value is not None
            proof = answer.proof(plain.objective_value, self.bound_ms)
            time_s = monotonic() - self._began
            return plain.model_copy(update={**proof, "solve_time_s": time_s})
        problem, layers = self._problem, self._problem.layers
        result = costs.costs_of(problem, best.assignment)
        valued = replace(result, objective_value=best.value_ms)
        time_s = monotonic() - self._began
        found = answer.placed(problem, best.assignment, valued, self.bound_ms, self._method, time_s)
        devices = []
        for number, load in enumerate(found.devices):
            own = [layer for layer in best.resting if best.assignment[layer] == number]
            total = sum(self._sizes[layer] for layer in own)
            kept = load.memory.param_bytes - total + self._rules.buffer_bytes(own)
            devices.append(
                load.model_copy(
                    update={
                        "memory": load.memory.model_copy(update={"param_bytes": kept}),
                        "resting_bytes": total,
                        "disk_bytes": sum(
                            self._sizes[layer] for layer in own if best.resting[layer] == "disk"
                        ),
                        "streaming_ms": pass_times.copying_ms(problem, own, number, best.resting),
                    }
                )
            )
        resting = {layers[layer].name: best.resting[layer] for layer in sorted(best.resting)}
        return found.model_copy(update={"resting": resting, "devices": tuple(devices)})

    # Bound

    def _bound_ms(self, is_needed: bool) -> float:
        """Return a lower bound; note if nothing can fit."""
        computing = simple_bounds.lower_bound(self._ample, reduced(self._ample))
        least = resting_bounds.needed_bytes(self._rules)
        self.is_impossible = is_needed and least == inf
        bound = computing
        if self._rules.cpus and not self.is_impossible:
            limit_s = BOUND_SHARE * self._left_s()
            found = resting_bounds.cpu_bound_ms(self._rules, self._passes, limit_s)
            bound = max(bound, found)
        # Unless it is proven that something must rest, a placement without copies may exist.
        if least < inf and is_needed:
            bound = max(bound, resting_bounds.copying_ms(self._rules, least))
        return bound

    # Assignments

    def _enumerate(self) -> None:
        """Try every assignment with every choice of resting layers."""
        self._method = "enumeration"
        places = [self._places(layer) for layer in range(len(self._sizes))]
        for assignment in itertools.product(*(dict.fromkeys(d for d, _ in one) for one in places)):
            if self._needs(assignment) is None:
                continue
            tiers = [
                [tier for device, tier in one if device == own]
                for one, own in zip(places, assignment, strict=True)
            ]
            # Of equally short passes the first one stays: with little on the disk, and few layers
            # that rest.
            for choice in sorted(
                itertools.product(*tiers), key=lambda one: (one.count("disk"), one.count("host"))
            ):
                rests = enumerate(choice)
                self._take(assignment, {layer: tier for layer, tier in rests if tier is not None})
        if self.best is not None and not self._is_over():
            self.bound_ms = self.best.value_ms

    def _places(self, layer: int) -> list[tuple[int, Tier | None]]:
        """Return the devices of a layer, each with every tier in which its parameters may rest."""
        tiers = self._rules.readers.items() if layer in self._may_rest else ()
        devices = range(len(self._problem.devices))
        return [(device, None) for device in devices] + [
            (device, tier) for tier, readers in tiers for device in readers
        ]

    def _partly_on_cpus(self) -> Iterator[tuple[int, ...]]:
        """Yield assignments with few or many bytes on a host's CPU, and other layers as filled."""
        units = units_of(self._problem)
        sizes = [sum(self._sizes[layer] for layer in unit) for unit in units]
        for base in (
            dict.fromkeys(filled(self._rules, self._rules.others)) if self._rules.cpus else ()
        ):
            for cpu, chosen in itertools.product(
                self._rules.cpus, parts(sizes, CPU_PARTS, self._problem.contiguous)
            ):
                if self._is_over():
                    return
                where = [*base]
                for layer in itertools.chain(*(units[number] for number in chosen)):
                    where[layer] = cpu
                yield tuple(where)

    def _assignments(self) -> Iterator[tuple[int, ...]]:
        """Yield assignments for devices with more memory than they have."""
        devices = self._problem.devices
        names = [device.name for device in devices]
        attempts = self._added_bytes()
        for number, added in enumerate(attempts):
            roomy = [
                _with_memory(device, min(LARGEST_BYTES, device.usable_bytes + more))
                for device, more in zip(devices, added, strict=True)
            ]
            changed = {
                "cluster": self._request.placed_on.model_copy(update={"devices": tuple(roomy)}),
                "explain": False,
                "time_limit_s": max(0.01, SHARE * self._left_s() / (len(attempts) - number)),
            }
            found = self._solve(_without_resting(self._request).model_copy(update=changed))
            if found.layer_devices:
                yield tuple(map(names.index, found.layer_devices.values()))

    def _added_bytes(self) -> list[list[int]]:
        """Return by attempt what to add to each device's memory: to all, and to each one alone."""
        devices = range(len(self._problem.devices))
        state = sum(layer.param_bytes + layer.buffer_bytes for layer in self._problem.layers)
        # The two buffers for copies take memory too, in the worst case of the largest layer's size.
        short = max(0, resting_bounds.short_bytes(self._rules)) + 2 * max(self._sizes)
        rates = [self._rules.bandwidth(device, "host") for device in devices]
        attempts = [
            [int(factor * short * rate / sum(rates)) for rate in rates] for factor in FACTORS
        ]
        for alone in self.copying[:MOST_ALONE] if len(devices) > 1 else ():
            attempts.append([state * (device == alone) for device in devices])
        return attempts

    def _needs(self, assignment: tuple[int, ...]) -> list[int] | None:
        """Return the missing bytes of each device; None if a requirement is broken."""
        if assignment not in self._known:
            judged = costs.judged(self._ample, assignment)
            self._known[assignment] = (
                None
                if judged is None
                else [
                    use.total_bytes - device.usable_bytes
                    for use, device in zip(judged.memory, self._problem.devices, strict=True)
                ]
            )
        return self._known[assignment]

    # Resting layers

    def _take(self, assignment: tuple[int, ...], resting: Resting) -> bool:
        """Keep an assignment with its resting layers if it fits and is better."""
        needs = self._needs(assignment)
        if needs is None:
            return False
        if not self._rules.fit(assignment, needs, resting):
            return False
        value = self._value_ms(assignment, resting)
        if self.best is not None and value >= self.best.value_ms * (1 - SAME):
            return False
        self.best = _Found(assignment, resting, value)
        return True

    def _value_ms(self, assignment: tuple[int, ...], resting: Resting) -> float:
        """Return the mean latency of the passes, or the mean pass's latency if nothing rests."""
        if not resting:
            return pass_times.latency_ms(self._problem, assignment)
        return sum(
            share * pass_times.latency_ms(one, assignment, resting=resting)
            for share, one in self._passes
        )

    def _offer(self, assignment: tuple[int, ...]) -> bool:
        """Try an assignment with good sets of resting layers; return whether it is better."""
        needs = self._needs(assignment)
        if needs is None:
            return False
        choices = []
        for device, need in enumerate(needs):
            own = [layer for layer in self._may_rest if assignment[layer] == device]
            if need <= 0:
                choices.append([frozenset[int]()])
            elif device in self.copying:
                choices.append([*self._spread(own, need)])
            else:
                return False
        # each device's first choice has the fewest bytes
        if not all(choices):
            return False
        before = self.best
        # All combinations would be too many: one device's choice varies at a time.
        for device, options in enumerate(choices):
            others = [one[0] for number, one in enumerate(choices) if number != device]
            for option in options:
                resting = self._rules.tiers(assignment, needs, option.union(*others))
                if resting is not None:
                    self._take(assignment, resting)
        return self.best is not before

    def _spread(self, own: Sequence[int], need: int) -> Iterator[frozenset[int]]:
        """Yield sets of a device's layers that free enough bytes, evenly spread, fewest first."""
        # Of experts a pass may copy a part only, so layers without any may better stay.
        mixed = [layer for layer in own if self._problem.layers[layer].expert_bytes]
        found = []
        for among in [mixed, own] if 0 < len(mixed) < len(own) else [own]:
            sizes = sorted({self._sizes[layer] for layer in among})
            for largest in sizes[-MOST_SIZES:]:
                fitting = [layer for layer in among if self._sizes[layer] <= largest]
                chosen = evenly(fitting, self._sizes, need + 2 * largest)
                if chosen is not None:
                    found.append((sum(self._sizes[layer] for layer in chosen), chosen))
        for _, chosen in sorted(found, key=lambda pair: pair[0]):
            yield chosen

    # Local search

    def _improve(self) -> None:
        """Move resting layers and borders while this makes the pass shorter."""
        while self.best is not None and not self._is_over():
            if self.best.value_ms <= self.bound_ms * (1 + SAME):
                return
            if not (self._move_resting() or self._move_to_cpus() or self._move_borders()):
                return

    def _move_resting(self) -> bool:
        """Let another layer rest in place of one, or elsewhere; return whether that was better."""
        assert self.best is not None
        order = {layer: place for place, layer in enumerate(self._may_rest)}
        before = self.best
        for layer in sorted(before.resting):
            self._exchange(layer, None)
            for distance in DISTANCES:
                for place in (order[layer] - distance, order[layer] + distance):
                    if 0 <= place < len(order):
                        self._exchange(layer, self._may_rest[place])
                if self._is_over():
                    return False
        return self.best is not before

    def _exchange(self, layer: int, other: int | None) -> None:
        """Try to let two layers exchange where they rest; of one alone, to let it stay."""
        assert self.best is not None
        resting = dict(self.best.resting)
        here, there = resting.pop(layer, None), None
        if other is not None:
            there = resting.pop(other, None)
        if here == there:
            return
        if there is not None:
            resting[layer] = there
        if other is not None and here is not None:
            resting[other] = here
        self._take(self.best.assignment, resting)

    def _move_to_cpus(self) -> bool:
        """Move layers to a host's CPU or from it, or exchange two; return whether it was better."""
        before, units = self.best, units_of(self._problem)
        for number, cpu in itertools.product(range(len(units)), self._rules.cpus):
            for changed in self._moves_to_cpu(cpu, number, units):
                if self._is_over():
                    return False
                self._move(changed)
        return self.best is not before

    def _moves_to_cpu(
        self, cpu: int, number: int, units: Sequence[Sequence[int]]
    ) -> Iterator[dict[int, int]]:
        """Yield devices of layers that move to a CPU or from it, some in exchange for others.

        Args:
            cpu: of a host.
            number: of the layers among ``units``.
            units: layers that move together.
        """
        assert self.best is not None
        where = self.best.assignment
        own = units[number]
        if where[own[0]] == cpu:
            yield from (dict.fromkeys(own, device) for device in self.copying)
            return
        yield dict.fromkeys(own, cpu)
        for distance in DISTANCES:
            for place in (number - distance, number + distance):
                if 0 <= place < len(units) and where[units[place][0]] == cpu:
                    yield dict.fromkeys(own, cpu) | dict.fromkeys(units[place], where[own[0]])

    def _move(self, changed: Mapping[int, int]) -> None:
        """Try other devices of some layers, resting or not, and with other resting layers."""
        assert self.best is not None
        where, resting = [*self.best.assignment], self.best.resting
        for layer, device in changed.items():
            where[layer] = device
        kept = {layer: tier for layer, tier in resting.items() if layer not in changed}
        copied = [one for one in changed if one in self._may_rest and where[one] in self.copying]
        self._take(tuple(where), kept)
        for tier in self._rules.limits if copied else ():
            self._take(tuple(where), {**kept, **dict.fromkeys(copied, tier)})
        self._offer(tuple(where))

    def _move_borders(self) -> bool:
        """Move layers at a border between devices to the other side."""
        assert self.best is not None
        before = self.best
        for moved in self._with_moved_borders(before.assignment):
            self._offer(moved)
        return self.best is not before

    def _with_moved_borders(self, where: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield assignments in which layers at a border are on the other side, while time lasts."""
        for place in range(1, len(where)):
            if where[place - 1] == where[place]:
                continue
            for distance in DISTANCES:
                for moved in shifted(where, place, distance):
                    if self._is_over():
                        return
                    yield moved

    def _left_s(self) -> float:
        return self._limit_s - (monotonic() - self._began)

    def _is_over(self) -> bool:
        return self._left_s() <= 0 or (self._stop is not None and self._stop.is_set())


def _with_memory(device: Device, usable_bytes: int) -> Device:
    """Return a device of which all of so much memory is usable."""
    return device.model_copy(update={"memory_bytes": usable_bytes, "reserve_bytes": 0})
