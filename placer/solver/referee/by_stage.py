"""The referee's own check of stages that each have a number of replicas of their own.

It implements the formulas in the docstring of ``solver/replicas/group_costs.py`` a second
time: units, shares, messages, passes, memory and loads.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from placer.schema import Placement, PlacementRequest
from placer.solver.referee import replicas
from placer.solver.referee.claims import equal, require
from placer.solver.referee.loads import Times, crossings, links_of, unit_ends
from placer.solver.referee.map_rules import check_used
from placer.solver.referee.memory import Memory
from placer.solver.referee.step import StepReading


class Claim(NamedTuple):
    """A placement by stage, as a placement of one unit.

    Attributes:
        request: the question of a unit, with the micro-batches of all units as chunks.
        placement: what is claimed, with the batch size of a unit.
        members: by first device of a stage, all devices of the stage.
        units: of a micro-batch.
    """

    request: PlacementRequest
    placement: Placement
    members: Mapping[str, tuple[str, ...]]
    units: int

    def share(self, first: str) -> int:
        """Return the units of a micro-batch on each device of a stage."""
        return self.units // len(self.members[first])


def is_by_stage(placement: Placement) -> bool:
    """Return whether the stages of a placement have unlike numbers of replicas."""
    return len({len(names) for names in _members(placement).values()}) > 1


def _members(placement: Placement) -> dict[str, tuple[str, ...]]:
    return {
        first: tuple(one.device for one in placement.replicas.get(first, ())) or (first,)
        for first in placement.stages
    }


def claim(request: PlacementRequest, placement: Placement) -> Claim:
    """Return what is claimed of a unit.

    Raises:
        PlacementError: devices, shares or micro-batches contradict the request.
    """
    rules, members = request.constraints, _members(placement)
    require(request.replicas == "by-stage", "stages have unlike numbers of replicas, unasked")
    require(
        request.is_training and not (rules.pinned or rules.forbidden),
        "replicas are given, but the request allows none",
    )
    require(
        set(placement.replicas) <= set(members), "replicas are given of a device without layers"
    )
    used = [name for names in members.values() for name in names]
    require(len(set(used)) == len(used), "a device holds several replicas")
    known = {device.name: device for device in request.devices}
    require(set(used) <= set(known), "a replica is on a device that the cluster does not have")
    kinds = {(known[name].type, known[name].usable_bytes) for name in used}
    require(len(kinds) == 1, "replicas by stage are on unlike devices")
    check_used(rules, len(used))
    units = math.lcm(*map(len, members.values()))
    size, rest = divmod(placement.batch_size, units)
    sizes = {profile.batch_size: profile for profile in (request.profile, *request.profiles)}
    require(not rest and size in sizes, f"{placement.batch_size} samples are not {units} units")
    _check_shares(placement, members)
    if request.objective == "throughput":
        equal("units of all micro-batches", placement.chunks * units, request.chunks)
    else:
        allowed = ["1f1b", "zero-bubble", "fill-drain"]
        require(
            placement.schedule in (allowed if request.schedule == "auto" else [request.schedule]),
            f"schedule {placement.schedule!r} cannot be chosen",
        )
    asked = request.model_copy(
        update={
            "profile": sizes[size],
            "profiles": (),
            "batch_size": None,
            "chunks": placement.chunks,
            "schedule": placement.schedule,
            "cluster": request.placed_on,
            "constraints": rules.model_copy(
                update={"contiguous": True, "max_devices": None, "min_devices": None}
            ),
        }
    )
    return Claim(asked, placement.model_copy(update={"batch_size": size}), members, units)


def _check_shares(placement: Placement, members: Mapping[str, tuple[str, ...]]) -> None:
    """Raise PlacementError unless the replicas of a stage share micro-batches equally."""
    for first, names in members.items():
        claimed = [one.samples for one in placement.replicas.get(first, ())]
        require(
            not claimed or claimed == [placement.batch_size // len(names)] * len(names),
            f"the replicas of {first} share a micro-batch unevenly: {claimed}",
        )


def rates(
    request: PlacementRequest, found: Claim
) -> dict[str, tuple[replicas.Rate, replicas.Rate]]:
    """Return the rates of reducing and of gathering, by device."""
    # one replica exchanges nothing
    alone = dict.fromkeys(found.members, ((0.0, 0.0), (0.0, 0.0)))
    return alone | replicas.rates(request, found.placement)


class UnitReading(StepReading):
    """The step of stages whose replicas compute units one after another.

    Args:
        found: the claim.
        request: its question, with repeated forward passes.
    """

    def __init__(self, found: Claim, request: PlacementRequest) -> None:
        self._found = found
        own = found.placement
        super().__init__(request, own.layer_devices, own.stages, own.in_flight or None)

    def _sums(self, kind: str) -> list[float]:
        totals = super()._sums(kind)
        found = []
        for device, total in zip(self._devices, totals, strict=True):
            count = len(self._found.members[device])
            found.append(total / count * (1 if kind == "optimizer" else self._found.units))
        return found

    def _crossings(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        values: dict[tuple[int, int], float] = defaultdict(float)
        gradients: dict[tuple[int, int], float] = defaultdict(float)
        for edge, source, target in crossings(self._request, self._found.placement.layer_devices):
            pair = (
                self._found.placement.stages.index(source),
                self._found.placement.stages.index(target),
            )
            values[pair] += _busiest_end(self._request, self._found, (source, target), edge.bytes)
            if edge.gradient_bytes:
                gradients[pair] += _busiest_end(
                    self._request, self._found, (target, source), edge.gradient_bytes
                )
        return values, gradients


def _busiest_end(
    request: PlacementRequest, found: Claim, ends: tuple[str, str], size: int
) -> float:
    """Return the time of the device that sends, or receives, messages of so many bytes longest."""
    links = links_of(request)
    times: Counter[tuple[str, str]] = Counter()
    for sender, receiver in unit_ends(ends, found.members, found.units):
        require((sender, receiver) in links, f"there is no link from {sender!r} to {receiver!r}")
        time_ms = links[sender, receiver].transfer_ms(size)
        times["sends", sender] += time_ms  # type: ignore[assignment]
        times["receives", receiver] += time_ms  # type: ignore[assignment]
    return max(times.values())


def with_exchange(
    request: PlacementRequest,
    found: Claim,
    times: Mapping[str, Times],
    rate_of: Mapping[str, tuple[replicas.Rate, replicas.Rate]],
) -> None:
    """Add to each device its part of the step's exchange for a micro-batch."""
    for layer in request.profile.layers:
        first = found.placement.layer_devices[layer.name]
        reduce, gather = rate_of[first]
        for name in found.members[first]:
            times[name].compute_ms += layer.grad_bytes * (reduce[1] + gather[1]) / request.chunks


def memory_of(found: Claim, first: str) -> Memory:
    """Return the memory of the devices of a stage, each with its part of the optimizer."""
    count = len(found.members[first])
    request = found.request.model_copy(
        update={"profile": replicas.with_part_of_optimizer(found.request.profile, count)}
    )
    return Memory(request, found.placement.layer_devices, True, replicas=count)


def firsts(found: Claim) -> dict[str, str]:
    """Return, by device that holds layers, the first device of its stage."""
    return {name: first for first, names in found.members.items() for name in names}


def in_order(found: Claim, names: Sequence[str]) -> bool:
    """Return whether all devices of a stage recompute, or none does."""
    return all(len({name in names for name in members}) == 1 for members in found.members.values())
