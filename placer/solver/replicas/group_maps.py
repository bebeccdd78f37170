"""Given maps whose stages each have a number of replicas of their own, as groups with costs.

device of each layer, replicas ──▶ stages in pipeline order ──▶ groups
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import NamedTuple

from placer.schema import PlacementRequest, Profile, Replica, Schedule
from placer.solver.components import topological_order
from placer.solver.problem import Problem
from placer.solver.replicas.group_costs import Group, GroupModel
from placer.solver.step.choices import question

Map = Mapping[str, str]
"""The device of each layer."""

Replicas = Mapping[str, Sequence[Replica]]
"""As ``Placement.replicas``: by device of a map, all devices that hold its layers."""


class GroupMap(NamedTuple):
    """A given map as groups.

    Attributes:
        model: of their costs.
        groups: in pipeline order.
    """

    model: GroupModel
    groups: tuple[Group, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        """The first device of each stage, in pipeline order."""
        devices = self.model.problem.devices
        return tuple(devices[group.devices[0]].name for group in self.groups)


def members_of(where: Map, replicas: Replicas) -> dict[str, tuple[str, ...]]:
    """Return, by device of a map, all devices that hold its layers: itself alone by default."""
    return {
        device: tuple(one.device for one in replicas.get(device, ())) or (device,)
        for device in dict.fromkeys(where.values())
    }


def is_by_stage(where: Map, replicas: Replicas) -> bool:
    """Return whether the stages of a map have different numbers of replicas."""
    return len(set(map(len, members_of(where, replicas).values()))) > 1


def units_of_map(where: Map, replicas: Replicas) -> int:
    """Return the units of a micro-batch: the least common multiple of the numbers of replicas."""
    return lcm(*map(len, members_of(where, replicas).values()))


def maps_of_pipelines(where: Map, replicas: Replicas) -> list[dict[str, str]]:
    """Return the map of each pipeline; consecutive pipelines share a replica of a stage.

    With equally many replicas of every stage, each pipeline has devices of its own.
    """
    members, units = members_of(where, replicas), units_of_map(where, replicas)
    return [
        {
            layer: members[device][unit * len(members[device]) // units]
            for layer, device in where.items()
        }
        for unit in range(units)
    ]


def unit_profile(request: PlacementRequest, samples: int) -> Profile | None:
    """Return the measurements of a unit, or None without a profile of its size."""
    profiles = (request.profile, *request.profiles)
    return next((one for one in profiles if one.batch_size == samples), None)


def group_map(
    request: PlacementRequest,
    where: Map,
    replicas: Replicas,
    profile: Profile,
    chunks: int,
    order: Schedule,
) -> GroupMap | None:
    """Return a map as groups, or None if values run in a cycle between its stages.

    Args:
        request: the whole question, whose cluster has all devices.
        where: the device of each layer.
        replicas: of some of these devices. The replicas of a stage are on alike devices.
        profile: of a unit, one of the request's.
        chunks: micro-batches in a batch, each of all units.
        order: of the passes.
    """
    stages = _stages_in_order(request, where)
    if stages is None:
        return None
    asked = question(request, profile, chunks, order, contiguous=True)
    links = {(link.source, link.target): link for link in request.placed_on.links}
    model = GroupModel(Problem.from_request(asked), units_of_map(where, replicas), links)
    number = {device.name: index for index, device in enumerate(request.devices)}
    members = members_of(where, replicas)
    layers = {
        stage: tuple(
            index for index, layer in enumerate(profile.layers) if where[layer.name] == stage
        )
        for stage in stages
    }
    groups = tuple(
        Group(layers[stage], tuple(number[name] for name in members[stage])) for stage in stages
    )
    return GroupMap(model, groups)


def _stages_in_order(request: PlacementRequest, where: Map) -> tuple[str, ...] | None:
    """Return the devices of a map so that all values run forwards, or None if they run in a cycle.

    Where several orders are possible, the stage with the earliest layer is first.
    """
    used = list(dict.fromkeys(where[layer.name] for layer in request.profile.layers))
    number = {device: index for index, device in enumerate(used)}
    arcs = {
        (number[where[edge.source]], number[where[target]])
        for edge in request.profile.edges
        for target in edge.targets
        if where[edge.source] != where[target]
    }
    found = topological_order(len(used), arcs)
    return tuple(used[index] for index in found) if len(found) == len(used) else None
