"""Merging of profiles of one model: from different devices, and from several hosts.

    node7: H200 x 8 ──▶ profile ─┐
                                 ├─▶ one profile: times by device type, all devices and links
    node9: A100 x 4 ──▶ profile ─┘

Sizes that differ count as the larger, times as the slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from placer.errors import ProfileError, kind_of
from placer.schema import Cluster, Device, Edge, Layer, Link, Profile, Rate

__all__ = ["merge_profiles", "on_hosts", "through_network"]

_TIMES = ("forward_ms", "backward_ms", "weight_grad_ms", "optimizer_ms", "host_ms", "spread")
_OWN = ("param_bytes", "grad_bytes", "optimizer_bytes", "buffer_bytes")
_NEEDED = (
    "saved_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "deferred_bytes",
    "weight_grad_workspace_bytes",
)
_TOLD_APART = ("recorded_workspace_bytes", "input_grad_workspace_bytes")


def merge_profiles(
    *profiles: Profile, network: Rate | Mapping[tuple[str, str], Rate] | None = None
) -> Profile:
    """Merge profiles of the same model, measured on different devices.

    If two profiles measured the same device type, the slower time and the larger memory count: a
    pipeline waits for its slowest stage. Devices of several hosts are named ``HOST/cuda:0``.

    Args:
        profiles: two or more, with equal layers, micro-batch, optimizer and mode.
        network: the rate between the memories of two hosts, one for all pairs or by (source host,
            target host). Without it, devices of different hosts have no link, so no value can
            cross.

    Returns:
        One profile with the devices of all.

    Raises:
        ProfileError: if an argument is not a profile, the profiles are of different models, or one
            device is described in two ways.
    """
    _refuse_arguments(profiles, network)
    first, *others = profiles
    for number, other in enumerate(others, start=2):
        _refuse_another_model(first, other, number)
    layers = zip(*(profile.layers for profile in profiles), strict=True)
    edges = zip(*(profile.edges for profile in profiles), strict=True)
    clusters = [profile.cluster for profile in profiles if profile.cluster is not None]
    return first.model_copy(
        update={
            "layers": tuple(_layer(same) for same in layers),
            "edges": tuple(_edge(same) for same in edges),
            "optimizer_workspace_ratio": max(
                profile.optimizer_workspace_ratio for profile in profiles
            ),
            "cluster": _cluster(clusters, network) if clusters else None,
            "versions": _versions([profile.versions for profile in profiles]),
        }
    )


def _refuse_arguments(profiles: Sequence[Any], network: Any) -> None:
    if not profiles:
        raise ProfileError("there is no profile to merge")
    if len(profiles) == 1 and isinstance(profiles[0], list | tuple):
        raise ProfileError(
            f"merge_profiles was given {kind_of(profiles[0])}; give each profile as an argument of "
            "its own: merge_profiles(*profiles)"
        )
    for number, profile in enumerate(profiles, start=1):
        if not isinstance(profile, Profile):
            raise ProfileError(
                f"profile {number} is {kind_of(profile)}; give each as an argument of its own, a "
                "Profile, which Profile.model_validate_json(text) makes of JSON"
            )
    if not isinstance(network, Rate | Mapping | None):
        raise ProfileError(
            f"network is {kind_of(network)}; give a placer.schema.Rate, or a dictionary of them by "
            "(source host, target host)"
        )


def _refuse_another_model(first: Profile, other: Profile, number: int) -> None:
    for field in ("training", "optimizer", "with_loss", "batch_size"):
        mine, its = getattr(first, field), getattr(other, field)
        if mine != its:
            raise ProfileError(
                f"profile {number} has {field} {its!r}, the first {mine!r}: measure both alike"
            )
    _refuse_other_layers(
        [layer.name for layer in first.layers], [layer.name for layer in other.layers], number
    )
    # other torch versions may express the same graph with other operators
    same_torch = first.versions.get("torch") == other.versions.get("torch")
    if (
        first.graph_hash
        and other.graph_hash
        and first.graph_hash != other.graph_hash
        and same_torch
    ):
        raise ProfileError(
            f"profile {number} is of another graph than the first: its operations or shapes differ"
        )
    for mine, its in zip(first.layers, other.layers, strict=True):
        for field in _OWN:
            if getattr(mine, field) != getattr(its, field):
                raise ProfileError(
                    f"layer {mine.name!r} has {field} {getattr(its, field)} in profile {number}, "
                    f"{getattr(mine, field)} in the first"
                )
    crossing, its_crossing = (
        [_crossing(edge) for edge in profile.edges] for profile in (first, other)
    )
    if crossing != its_crossing:
        raise ProfileError(f"profile {number} has other values between its layers than the first")


def _crossing(edge: Edge) -> tuple[str, tuple[str, ...], int]:
    return edge.source, edge.targets, edge.bytes


def _layer(same: Sequence[Layer]) -> Layer:
    times = {field: _largest(getattr(layer, field) for layer in same) for field in _TIMES}
    # memory must suffice on any of the device types
    needed = {field: max(getattr(layer, field) for layer in same) for field in _NEEDED}
    needed |= {
        field: _told_apart([getattr(layer, field) for layer in same], same) for field in _TOLD_APART
    }
    return same[0].model_copy(update=times | needed)


def _told_apart(sizes: Sequence[int], same: Sequence[Layer]) -> int:
    """Return the larger workspace; 0 stands for the eager backward workspace."""
    whole = [layer.backward_workspace_bytes for layer in same]
    return max(own or other for own, other in zip(sizes, whole, strict=True)) if any(sizes) else 0


def _largest(named: Iterable[Mapping[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for values in named:
        for name, value in values.items():
            largest[name] = max(value, largest.get(name, value))
    return dict(sorted(largest.items()))


def _edge(same: Sequence[Edge]) -> Edge:
    ends = (same[0].source, *same[0].targets)
    kept = {name for edge in same for name in edge.saved_by}
    # ``retained_until`` belongs to ``retained_bytes``: take both from the same profile
    rest = max(same, key=lambda edge: edge.retained_bytes)
    return same[0].model_copy(
        update={
            "gradient_bytes": max(edge.gradient_bytes for edge in same),
            "saved_by": tuple(name for name in ends if name in kept),
            "retained_bytes": rest.retained_bytes,
            "retained_until": rest.retained_until,
            "deferred": all(edge.deferred for edge in same),
        }
    )


def _cluster(
    clusters: Sequence[Cluster], network: Rate | Mapping[tuple[str, str], Rate] | None
) -> Cluster:
    # "cuda:0" exists on every host: qualify names as soon as there are several hosts
    several = len({device.host for cluster in clusters for device in cluster.devices}) > 1
    if several:
        clusters = [on_hosts(cluster) for cluster in clusters]
    devices: dict[str, Device] = {}
    links: dict[tuple[str, str], Link] = {}
    for cluster in clusters:
        for device in cluster.devices:
            known = devices.setdefault(device.name, device)
            if known.type != device.type:
                raise ProfileError(
                    f"device {device.name!r} is a {known.type!r} in one profile, a {device.type!r} "
                    "in another; measure each on its own host, or give the devices different names"
                )
        links.update({(link.source, link.target): link for link in cluster.links})
    found = list(devices.values())
    if network is not None:
        links |= {key: link for key, link in _between_hosts(found, network) if key not in links}
    return Cluster(devices=tuple(found), links=tuple(links.values()))


def on_hosts(cluster: Cluster) -> Cluster:
    """Return the cluster with devices named ``HOST/device``, as multi-host placements use."""
    names = {device.name: _on_host(device) for device in cluster.devices}
    return Cluster(
        devices=tuple(
            device.model_copy(update={"name": names[device.name]}) for device in cluster.devices
        ),
        links=tuple(
            link.model_copy(update={"source": names[link.source], "target": names[link.target]})
            for link in cluster.links
        ),
    )


def _on_host(device: Device) -> str:
    prefix = f"{device.host}/"
    return (
        device.name if not device.host or device.name.startswith(prefix) else prefix + device.name
    )


def _between_hosts(
    devices: Sequence[Device], network: Rate | Mapping[tuple[str, str], Rate]
) -> Iterator[tuple[tuple[str, str], Link]]:
    for source in devices:
        for target in devices:
            if source.host == target.host:
                continue
            way = network if isinstance(network, Rate) else network.get((source.host, target.host))
            if way is not None:
                rate = through_network(source, way, target)
                yield (
                    (source.name, target.name),
                    Link(source=source.name, target=target.name, **rate.model_dump()),
                )


def through_network(source: Device, network: Rate, target: Device) -> Rate:
    """Return the rate of three copies in sequence: device to host, network, host to device.

    Args:
        source: the device that sends.
        network: the rate between the hosts' memories.
        target: the device that receives.
    """
    legs = [leg for leg in (source.to_host, network, target.from_host) if leg is not None]
    return Rate(
        latency_s=_significant(sum(leg.latency_s for leg in legs)),
        bandwidth_bytes_per_s=_significant(1 / sum(1 / leg.bandwidth_bytes_per_s for leg in legs)),
    )


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def _versions(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return one version where all agree, else all of them, comma-separated."""
    named: Any = sorted((name, value) for versions in each for name, value in versions.items())
    return {
        name: ", ".join(dict.fromkeys(value for _, value in group))
        for name, group in groupby(named, key=lambda item: item[0])
    }


def _refuse_other_layers(names: Sequence[str], its_names: Sequence[str], number: int) -> None:
    if names == its_names:
        return
    strange = next(
        (name for name in [*its_names, *names] if (name in names) != (name in its_names)),
        its_names[0],
    )
    raise ProfileError(
        f"profile {number} has other layers than the first, {strange!r} among them: "
        "merge profiles of one model, cut into layers alike"
    )
