"""Joining the devices of several nodes into one cluster."""

from __future__ import annotations

from collections.abc import Mapping

from placer.schema import Cluster, Device, Link


def join(clusters: Mapping[str, Cluster], network_bytes_per_s: float, latency_s: float) -> Cluster:
    """Join the devices of several nodes into one cluster.

    A transfer between nodes passes both hosts' memories and the network, one after the other.

    Args:
        clusters: Clusters by the name of the node.
        network_bytes_per_s: Bandwidth between any two nodes, in each direction.
        latency_s: Latency of a transfer over the network in seconds.
    """
    devices: list[Device] = []
    links: list[Link] = []
    for node, cluster in clusters.items():
        devices += [
            one.model_copy(update={"name": f"{node}/{one.name}", "host": node})
            for one in cluster.devices
        ]
        ends = [(f"{node}/{link.source}", f"{node}/{link.target}", link) for link in cluster.links]
        links += [
            link.model_copy(update={"source": source, "target": target})
            for source, target, link in ends
        ]
    for source in devices:
        for target in devices:
            if source.host != target.host:
                links.append(_over_network(source, target, network_bytes_per_s, latency_s))
    return Cluster(devices=tuple(devices), links=tuple(links))


def _over_network(source: Device, target: Device, bytes_per_s: float, latency_s: float) -> Link:
    # Host to host over the network, plus device to host and host to device where measured.
    seconds_per_byte = 1 / bytes_per_s
    for rate in (source.to_host, target.from_host):
        if rate is not None:
            seconds_per_byte += 1 / rate.bandwidth_bytes_per_s
            latency_s += rate.latency_s
    return Link(
        source=source.name,
        target=target.name,
        bandwidth_bytes_per_s=1 / seconds_per_byte,
        latency_s=latency_s,
        route="host",
    )
