"""Groups of well-connected devices, inferred from measured links and hosts.

Sorted bandwidths of device pairs are split at the widest gap, if it is a factor of two or more.
Pairs on the fast side join, like devices on one switch:

    bandwidths:   25  26  ║  380  384
    groups:       {cuda:0, cuda:1}  {cuda:2, cuda:3}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from placer.schema import Cluster

# Smallest ratio of bandwidths that indicates different kinds of links: two lanes or one, a switch
# or the host's bus.
_GAP = 2.0


@dataclass(frozen=True)
class Island:
    """Devices that are joined by faster links than to the rest.

    Attributes:
        host: where they are.
        devices: their names, in the order of the cluster.
    """

    host: str
    devices: tuple[str, ...]


def islands(cluster: Cluster) -> list[Island]:
    """Return groups of devices by host, and within a host by fast links.

    Args:
        cluster: the measured links; devices without links between them are not joined.
    """
    found = []
    for host in dict.fromkeys(device.host for device in cluster.devices):
        names = [device.name for device in cluster.devices if device.host == host]
        found += [Island(host, group) for group in _groups(names, _strengths(cluster, names))]
    return found


def _strengths(cluster: Cluster, names: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the bandwidth of each pair of devices, in its slower direction."""
    bandwidths = {(link.source, link.target): link.bandwidth_bytes_per_s for link in cluster.links}
    return {
        (a, b): min(bandwidths.get((a, b), 0.0), bandwidths.get((b, a), 0.0))
        for a, b in combinations(names, 2)
    }


def _groups(
    names: Sequence[str], strengths: Mapping[tuple[str, str], float]
) -> list[tuple[str, ...]]:
    least = _threshold([strength for strength in strengths.values() if strength > 0])
    group_of = {name: {name} for name in names}
    for (a, b), strength in strengths.items():
        # union-find with shared sets: joined devices refer to one set object
        if strength >= least and group_of[a] is not group_of[b]:
            joined = group_of[a] | group_of[b]
            group_of.update(dict.fromkeys(joined, joined))
    groups: list[tuple[str, ...]] = []
    for name in names:
        if not any(name in group for group in groups):
            groups.append(tuple(other for other in names if other in group_of[name]))
    return groups


def _threshold(strengths: Sequence[float]) -> float:
    """Return the least bandwidth of the fast side.

    Without a gap it is the least of all, and without links infinity.
    """
    if not strengths:
        return float("inf")
    steps = list(pairwise(sorted(set(strengths))))
    low, high = max(
        steps, key=lambda step: step[1] / step[0], default=(min(strengths), min(strengths))
    )
    return high if high / low >= _GAP else min(strengths)
