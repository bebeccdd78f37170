"""Tables of devices and links: capacities, bandwidths and groups."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.report.topology import islands
from placer.schema import Cluster, Device, Link, Rate
from placer.utils.units import bandwidth_text, bytes_text, seconds_text

# links shown in a table; a machine with eight GPUs has 56
_SHOWN_LINKS = 12
_LOADS = {
    "bidirectional": "both ways",
    "computing": "computing",
    "bidirectional_computing": "both, computing",
}
_RIGHT = ("memory", "usable", "to host", "from host", "bandwidth", "latency", *_LOADS.values())


def cluster_table(cluster: Cluster) -> RenderableType:
    """Return tables of devices and links, with faults and groups of devices.

    Args:
        cluster: the measurements; columns without any are left out.
    """
    grid = _grid("Devices", list(_device_row(cluster.devices[0], cluster)))
    for device in cluster.devices:
        grid.add_row(*_device_row(device, cluster).values())
    if not cluster.links:
        return grid
    loads = [
        name for name in _LOADS if any(getattr(link, name) is not None for link in cluster.links)
    ]
    links = _grid(
        "Links", ["from", "to", "bandwidth", "latency", *(_LOADS[name] for name in loads)]
    )
    rows = _link_rows(cluster, loads)
    for row in rows[:_SHOWN_LINKS]:
        links.add_row(*row)
    words = [f"and {len(rows) - _SHOWN_LINKS} more links"] if len(rows) > _SHOWN_LINKS else []
    parts: list[RenderableType] = [grid, links]
    if words := [*words, *island_texts(cluster)]:
        parts.append(Text("\n".join(words)))
    if faults := fault_texts(cluster):
        parts.append(Text("\n".join(faults), style="bold red"))
    return Group(*parts)


def fault_texts(cluster: Cluster) -> list[str]:
    """Return a line about each faulty link."""
    return [
        f"link {link.source} -> {link.target}: {link.fault or 'not to be used'}; copies go by way "
        "of the host's memory"
        for link in cluster.links
        if link.route == "host"
    ]


def island_texts(cluster: Cluster) -> list[str]:
    """Return lines about devices that share a host or a switch; empty if all share the same."""
    found = islands(cluster)
    if len(found) < 2 or len(found) == len(cluster.devices):
        return []
    hosts = [f"{island.host}: " if island.host else "" for island in found]
    return [
        f"joined by faster links: {host}{', '.join(island.devices)}"
        for host, island in zip(hosts, found, strict=True)
    ]


def _grid(title: str, headings: list[str]) -> Table:
    grid = Table(title=title, title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="right" if heading in _RIGHT else "left")
    return grid


def _device_row(device: Device, cluster: Cluster) -> dict[str, str]:
    row = {"device": device.name, "type": device.type}
    if len({other.host for other in cluster.devices}) > 1:
        row["host"] = device.host
    row |= {"memory": bytes_text(device.memory_bytes), "usable": bytes_text(device.usable_bytes)}
    if any(other.to_host or other.from_host for other in cluster.devices):
        row |= {"to host": _bandwidth(device.to_host), "from host": _bandwidth(device.from_host)}
    if any(other.from_disk for other in cluster.devices):
        row["from disk"] = _bandwidth(device.from_disk)
    return row


def _bandwidth(rate: Rate | None) -> str:
    return "-" if rate is None else bandwidth_text(rate.bandwidth_bytes_per_s)


def _figures(link: Link, loads: list[str]) -> tuple[str, ...]:
    alone = bandwidth_text(link.bandwidth_bytes_per_s), seconds_text(link.latency_s)
    return (*alone, *(_bandwidth(getattr(link, name)) for name in loads))


def _link_rows(cluster: Cluster, loads: list[str]) -> list[tuple[str, ...]]:
    """Return one row for each link, or a single row if all links are equal."""
    figures = [_figures(link, loads) for link in cluster.links]
    count = len(cluster.devices)
    # a complete graph of equal links needs one row only
    if len(set(figures)) == 1 and len(figures) == count * (count - 1) > 2:
        return [("each", "each other", *figures[0])]
    return [
        (link.source, link.target, *figure)
        for link, figure in zip(cluster.links, figures, strict=True)
    ]
