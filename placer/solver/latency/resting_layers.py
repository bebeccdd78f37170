"""Layers whose parameters may rest, choices of them, and where they rest."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import gcd

from placer.schema import Device, PlacementRequest
from placer.schema.base import LARGEST_BYTES, WHOLE, Tier, module_paths
from placer.solver.pass_times import Resting
from placer.solver.problem import Problem

MOST_SUMS = 20_000_000
"""Possible sums of parameters up to which the least one is computed exactly."""


def may_rest(problem: Problem) -> tuple[int, ...]:
    """Return the layers whose parameters are theirs alone, in execution order."""
    tied = {name for tie in problem.request.profile.tied for name in tie.layers}
    users: Counter[str] = Counter(
        path for layer in problem.layers for path in set(module_paths(layer.name))
    )
    return tuple(
        number
        for number, layer in enumerate(problem.layers)
        if layer.param_bytes
        and layer.name != WHOLE
        and layer.name not in tied
        and all(users[path] == 1 for path in module_paths(layer.name))
    )


def evenly(layers: Sequence[int], sizes: Sequence[int], need: int) -> frozenset[int] | None:
    """Return layers of so many bytes, evenly spread, and no layer that is not needed.

    The result is None if all layers have fewer bytes.

    Args:
        layers: in execution order.
        sizes: by layer, in bytes.
        need: in bytes.
    """
    total = sum(sizes[layer] for layer in layers)
    if total < need:
        return None
    chosen: list[int] = []
    # Take a layer when the bytes taken are behind the even share of the bytes passed by at least
    # half of the layer.
    passed = taken = 0
    for layer in layers:
        passed += sizes[layer]
        if taken + sizes[layer] / 2 <= passed * need / total:
            chosen.append(layer)
            taken += sizes[layer]
    # Rounding to whole layers may take too few bytes, or more than needed.
    for layer in sorted(set(layers) - set(chosen), key=lambda one: sizes[one]):
        if taken < need:
            chosen.append(layer)
            taken += sizes[layer]
    for layer in sorted(chosen, key=lambda one: -sizes[one]):
        if taken - sizes[layer] >= need:
            chosen.remove(layer)
            taken -= sizes[layer]
    return frozenset(chosen)


def parts(sizes: Sequence[int], count: int, is_run: bool) -> Iterator[frozenset[int]]:
    """Yield layers with one part of all bytes, two parts, and so on, to all.

    They are evenly spread, the first ones, and the last ones.

    Args:
        sizes: by layer, in bytes.
        count: of parts.
        is_run: whether the layers must be neighbours.
    """
    layers, total = range(len(sizes)), sum(sizes)
    for number in range(1, count + 1):
        need = total * number // count
        spread = None if is_run else evenly(layers, sizes, need)
        if spread is not None:
            yield spread
        for order in (layers, layers[::-1]):
            passed = list(itertools.accumulate(sizes[layer] for layer in order))
            yield frozenset(order[: 1 + bisect_left(passed, need)])


def units_of(problem: Problem) -> list[tuple[int, ...]]:
    """Return the layers that move together, in execution order."""
    grouped = {layer: tuple(sorted(group)) for group in problem.groups for layer in group}
    return [*dict.fromkeys(grouped.get(one, (one,)) for one in range(len(problem.layers)))]


def shifted(where: tuple[int, ...], place: int, distance: int) -> Iterator[tuple[int, ...]]:
    """Yield assignments whose border before a layer lies so many layers earlier and later."""
    moved = list(where)
    first = max(0, place - distance)
    moved[first:place] = [where[place]] * (place - first)
    yield tuple(moved)
    moved = list(where)
    end = min(len(where), place + distance)
    moved[place:end] = [where[place - 1]] * (end - place)
    yield tuple(moved)


def least_sum(sizes: Sequence[int], need: int) -> int:
    """Return the least sum of some of these sizes that is at least ``need``, or a lower bound.

    The result is larger than any sum of the sizes if no sum suffices.
    """
    if need <= 0:
        return 0
    if sum(sizes) < need:
        return LARGEST_BYTES
    unit = gcd(*sizes)
    if sum(sizes) // unit > MOST_SUMS:
        return need
    # Bit n says whether some of the sizes sum to n units. The result is the lowest such sum from
    # ``first`` on.
    reached = 1
    for size in sizes:
        reached |= reached << size // unit
    first = -(-need // unit)
    above = reached >> first
    return (first + (above & -above).bit_length() - 1) * unit


def readers_of(devices: Sequence[Device], tier: Tier) -> frozenset[int]:
    """Return the devices with measured rates from a tier."""
    return frozenset(
        number
        for number, one in enumerate(devices)
        if one.from_host is not None and (tier == "host" or one.from_disk is not None)
    )


class RestingRules:
    """Where parameters may rest, and the memory that they take there.

    A host's CPU may be a device, too. The layers that it computes and the parameters that rest in
    the host's memory share the CPU's memory.

    Args:
        request: with ``host_memory_bytes`` or ``disk_bytes``.
        problem: of the request.

    Attributes:
        problem: of the request.
        limits: the bytes that may rest in each tier of a host.
        layers: the layers whose parameters may rest, in execution order.
        sizes: by layer, the bytes of its parameters.
        readers: by tier, the devices that copy parameters from it.
        copying: the devices that copy parameters, in ascending order.
        cpus: the devices that are CPUs of hosts from which others copy.
        others: all other devices.
    """

    def __init__(self, request: PlacementRequest, problem: Problem) -> None:
        self.problem = problem
        limits: dict[Tier, int | None] = {
            "host": request.host_memory_bytes,
            "disk": request.disk_bytes,
        }
        self.limits = {tier: limit for tier, limit in limits.items() if limit is not None}
        self.layers = may_rest(problem)
        self.sizes = [layer.param_bytes for layer in problem.layers]
        self.readers = {tier: readers_of(problem.devices, tier) for tier in self.limits}
        self.copying = sorted(frozenset[int]().union(*self.readers.values()))
        hosts = {problem.devices[device].host for device in self.copying}
        self.cpus = [
            number
            for number, device in enumerate(problem.devices)
            if device.is_host and device.host in hosts
        ]
        self.others = sorted(set(range(len(problem.devices))) - set(self.cpus))

    @property
    def on_disk(self) -> frozenset[int]:
        """Return the devices that can copy parameters from a disk."""
        return self.readers.get("disk", frozenset())

    def bandwidth(self, device: int, tier: Tier) -> float:
        """Return the bytes per second that a device copies from a tier; 0 if it copies nothing."""
        one = self.problem.devices[device]
        rates = [one.from_host] if tier == "host" else [one.from_host, one.from_disk]
        return min(0.0 if rate is None else rate.bandwidth_bytes_per_s for rate in rates)

    def buffer_bytes(self, resting: Sequence[int]) -> int:
        """Return the bytes of a device's two buffers for these layers."""
        return 2 * max((self.sizes[layer] for layer in resting), default=0)

    def fit(self, assignment: Sequence[int], needs: Sequence[int], resting: Resting) -> bool:
        """Return whether devices and hosts have memory for layers and resting parameters.

        Args:
            assignment: by layer, its device.
            needs: by device, the bytes beyond its memory if all parameters stay; negative if less.
            resting: where parameters rest.
        """
        own: defaultdict[int, list[int]] = defaultdict(list)
        rested: Counter[tuple[str, Tier]] = Counter()
        for layer, tier in resting.items():
            device = assignment[layer]
            own[device].append(layer)
            rested[self.problem.devices[device].host, tier] += self.sizes[layer]
            if device not in self.readers[tier]:
                return False
        for (host, tier), size in rested.items():
            if size > self._limit(host, tier, needs):
                return False
        # The need counts all parameters as on the device. Resting ones leave it, and two buffers of
        # the largest one come.
        for device, need in enumerate(needs):
            freed = sum(self.sizes[layer] for layer in own[device])
            if need - freed + self.buffer_bytes(own[device]) > 0:
                return False
        return True

    def _limit(self, host: str, tier: Tier, needs: Sequence[int]) -> int:
        """Return the bytes that may rest in a tier of a host."""
        limit = self.limits[tier]
        free = [-needs[cpu] for cpu in self.cpus if self.problem.devices[cpu].host == host]
        return min(limit, sum(free)) if free and tier == "host" else limit

    def tiers(
        self, assignment: Sequence[int], needs: Sequence[int], resting: frozenset[int]
    ) -> Resting | None:
        """Return where layers rest: on the host as far as it has memory; None if too many must.

        Args:
            assignment: by layer, its device.
            needs: as for ``fit``.
            resting: the layers.
        """
        by_host: defaultdict[str, list[int]] = defaultdict(list)
        for layer in sorted(resting):
            by_host[self.problem.devices[assignment[layer]].host].append(layer)
        tiers: dict[int, Tier] = dict.fromkeys(resting, "host")
        for host, own in by_host.items():
            limit = self._limit(host, "host", needs) if "host" in self.limits else 0
            excess = sum(self.sizes[layer] for layer in own) - max(0, limit)
            may_move = [layer for layer in own if assignment[layer] in self.on_disk]
            moved = evenly(may_move, self.sizes, excess) if excess > 0 else frozenset[int]()
            if moved is None:
                return None
            tiers.update(dict.fromkeys(moved, "disk"))
        return tiers


def filled(rules: RestingRules, rows: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield assignments with one device that copies, and others full of what stays there.

    Devices before it take the first layers, and devices behind it the last ones.

    Args:
        rules: where parameters may rest.
        rows: the devices that have layers.
    """
    layers, devices = rules.problem.layers, rules.problem.devices
    state = [layer.param_bytes + layer.buffer_bytes for layer in layers]
    work = max(layer.forward_workspace_bytes for layer in layers)
    work += max((value.held_bytes for value in rules.problem.values), default=0)
    by_rate = sorted(rows, key=lambda device: rules.bandwidth(device, "host"))
    for order in dict.fromkeys([tuple(rows), tuple(by_rate), tuple(reversed(by_rate))]):
        for copying in range(len(order)):
            where = [order[copying]] * len(layers)
            left = [*range(len(layers))]
            for place in (*range(copying), *range(len(order) - 1, copying, -1)):
                is_before = place < copying
                free = devices[order[place]].usable_bytes - work
                while left and state[left[0 if is_before else -1]] <= free:
                    layer = left.pop(0 if is_before else -1)
                    free -= state[layer]
                    where[layer] = order[place]
            yield tuple(where)
