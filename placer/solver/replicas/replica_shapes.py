"""The shapes that a placement with replicas may have: R equal pipelines on alike devices.

Devices of each type and memory are divided evenly among R pipelines, in one of two ways. On two
hosts a and b of two devices each, two pipelines are::

    pipelines inside a host      0: a0 a1    1: b0 b1      gradients cross the hosts
    replicas inside a host       0: a0 b0    1: a1 b1      values cross the hosts

A division counts if all pipelines are alike: at each position devices of one type, limit and
recomputation rule, and between two positions equal links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from placer.schema import (
    Cluster,
    Constraints,
    Device,
    PlacementRequest,
    Profile,
    Replica,
    Schedule,
)
from placer.schema.request import OBJECTIVES_OF_REPLICAS
from placer.solver.replicas.replication import (
    Links,
    Replication,
    can_interpolate,
    profile_of_share,
    replication,
    shared_profile,
)


@dataclass(frozen=True)
class Shape:
    """R equal pipelines.

    Attributes:
        pipelines: the devices of each, by position.
        replication: what they cost each other.
    """

    pipelines: tuple[tuple[Device, ...], ...]
    replication: Replication

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return len(self.pipelines)


def may_replicate(request: PlacementRequest) -> bool:
    """Return whether a request allows replicas.

    Layers that are pinned to a device, or forbidden on one, have one device, so they have none.
    """
    rules = request.constraints
    return (
        request.replicas != "never"
        and request.is_training
        and request.objective in OBJECTIVES_OF_REPLICAS
        and not (rules.pinned or rules.forbidden)
    )


def shapes(request: PlacementRequest) -> Iterator[tuple[Shape, PlacementRequest]]:
    """Yield every shape with the question that one of its pipelines answers, most replicas first.

    Args:
        request: the question; one that ``may_replicate``.
    """
    links = {(link.source, link.target): link for link in request.placed_on.links}
    for count in range(len(request.devices), 1, -1):
        seen: list[tuple[object, Replication]] = []
        for pipelines in _divisions(request, count, links):
            costs = replication(list(zip(*pipelines, strict=True)), links)
            asked = question_of_pipeline(request, pipelines[0], count)
            alike = (_links_within(pipelines[0], links), costs)
            if costs is None or asked is None or alike in seen:
                continue
            seen.append((alike[0], costs))
            yield Shape(pipelines, costs), asked


def _divisions(
    request: PlacementRequest, count: int, links: Links
) -> Iterator[tuple[tuple[Device, ...], ...]]:
    """Yield the divisions of the devices into so many alike pipelines."""
    classes: dict[Any, list[Device]] = defaultdict(list)
    for device in sorted(request.devices, key=lambda device: device.host):  # stable
        classes[device.type, device.usable_bytes].append(device)
    if any(len(members) % count for members in classes.values()):
        return
    place = {device.name: index for index, device in enumerate(request.devices)}
    # Consecutive devices form a pipeline on few hosts. With a stride, the replicas of a stage are
    # on few hosts instead, which makes their exchange quicker.
    for is_strided in (False, True):
        pipelines: list[list[Device]] = [[] for _ in range(count)]
        for members in classes.values():
            size = len(members) // count
            for number, own in enumerate(pipelines):
                own += members[number::count] if is_strided else members[number * size :][:size]
        # positions follow the cluster's order in the first pipeline
        first = pipelines[0]
        order = sorted(range(len(first)), key=lambda position: place[first[position].name])
        found = tuple(tuple(own[position] for position in order) for own in pipelines)
        if all(_are_alike(request, found[0], other, links) for other in found[1:]):
            yield found


def _are_alike(
    request: PlacementRequest, one: tuple[Device, ...], other: tuple[Device, ...], links: Links
) -> bool:
    rule = request.constraints.recompute_on
    return all(
        rule(a.name) == rule(b.name) for a, b in zip(one, other, strict=True)
    ) and _links_within(one, links) == _links_within(other, links)


def _links_within(devices: tuple[Device, ...], links: Links) -> list[tuple[float, float] | None]:
    """Return bandwidth and latency of each link between devices, in order; None for no link."""
    found = [links.get((one.name, other.name)) for one in devices for other in devices]
    return [
        None if link is None else (link.bandwidth_bytes_per_s, link.latency_s) for link in found
    ]


def question_of_pipeline(
    request: PlacementRequest, devices: tuple[Device, ...], replicas: int
) -> PlacementRequest | None:
    """Return the question that one of several equal pipelines answers, or None without an answer.

    Its batch is the pipeline's part of the batch, so a micro-batch is a share of a measured size.

    Args:
        request: the whole question.
        devices: the devices of the pipeline.
        replicas: the number of pipelines.
    """
    rules = _rules(request.constraints, replicas)
    if rules.max_devices == 0 or (rules.min_devices or 1) > len(devices):
        return None
    cluster = _cluster_of(request, devices)
    changed: dict[str, Any] = {"cluster": cluster, "constraints": rules, "explain": False}
    if request.objective == "step":
        whole, rest = divmod(request.whole_batch_size, replicas)
        profiles = _fitting(request, whole) if not rest else []
        if not profiles:
            return None
        changed |= {"batch_size": whole}
    else:
        profiles = [request.profile]
        chunks, rest = divmod(request.chunks, replicas)
        if rest:
            return None
        changed |= {"chunks": chunks}
    own, *others = (shared_profile(profile, replicas) for profile in profiles)
    return request.model_copy(update=changed | {"profile": own, "profiles": tuple(others)})


def _cluster_of(request: PlacementRequest, devices: tuple[Device, ...]) -> Cluster:
    """Return the cluster of some devices and the links between them."""
    names = {device.name for device in devices}
    links = tuple(
        link for link in request.placed_on.links if link.source in names and link.target in names
    )
    return request.placed_on.model_copy(update={"devices": devices, "links": links})


def pipelines_of(
    request: PlacementRequest, replicas: Mapping[str, Sequence[Replica]]
) -> list[tuple[Replica, ...]]:
    """Return the replicas of each pipeline, in the cluster's order of the first pipeline's devices.

    Args:
        request: the whole question.
        replicas: as ``Placement.replicas``, equally many of every stage.
    """
    by_position = [replicas[one.name] for one in request.devices if one.name in replicas]
    return list(zip(*by_position, strict=True))


def question_of_replicas(
    request: PlacementRequest,
    pipeline: Sequence[Replica],
    count: int,
    chunks: int,
    order: Schedule,
    contiguous: bool | None,
) -> PlacementRequest | None:
    """Return the question that one of several pipelines answers, with all chosen but the map.

    It is None if the cluster lacks a device, or if the share is not between measured sizes.

    Args:
        request: the whole question.
        pipeline: its devices and their shares.
        count: the number of pipelines.
        chunks: micro-batches in a batch.
        order: of the micro-batches.
        contiguous: whether stages are contiguous.
    """
    device_of = {device.name: device for device in request.devices}
    names = [one.device for one in pipeline]
    every = sorted((request.profile, *request.profiles), key=lambda profile: profile.batch_size)
    share = pipeline[0].samples
    is_measured = any(profile.batch_size == share for profile in every)
    is_between = every[0].batch_size <= share <= every[-1].batch_size and can_interpolate(every)
    if not device_of.keys() >= set(names) or not (is_measured or is_between):
        return None
    devices = tuple(device_of[name] for name in names)
    # Rules that name or count devices are about all pipelines.
    rules = request.constraints.model_copy(
        update={
            "max_devices": None,
            "min_devices": None,
            "pinned": {},
            "forbidden": {},
            "contiguous": contiguous,
        }
    )
    return request.model_copy(
        update={
            "profile": shared_profile(profile_of_share(every, share), count),
            "profiles": (),
            "batch_size": None,
            "cluster": _cluster_of(request, devices),
            "chunks": chunks,
            "schedule": order,
            "constraints": rules,
            "explain": False,
        }
    )


def replication_of(
    request: PlacementRequest, replicas: Mapping[str, Sequence[Replica]]
) -> Replication | None:
    """Return what replicas cost, or None if two of a stage are not linked.

    Args:
        request: the whole question.
        replicas: as ``Placement.replicas``, equally many of every stage.
    """
    links = {(link.source, link.target): link for link in request.placed_on.links}
    device_of = {device.name: device for device in request.devices}
    positions = zip(*pipelines_of(request, replicas), strict=True)
    return replication([[device_of[one.device] for one in own] for own in positions], links)


def _fitting(request: PlacementRequest, samples: int) -> list[Profile]:
    """Return the profiles whose micro-batches fill so many samples."""
    return [
        profile
        for profile in (request.profile, *request.profiles)
        if samples % profile.batch_size == 0
    ]


def _rules(rules: Constraints, replicas: int) -> Constraints:
    """Return the constraints of one pipeline; those that count devices count all replicas."""
    most, least = rules.max_devices, rules.min_devices
    changed = {
        "max_devices": None if most is None else most // replicas,
        "min_devices": None if least is None else ceil(least / replicas),
    }
    return rules.model_copy(update=changed)
