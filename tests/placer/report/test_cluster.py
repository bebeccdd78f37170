from __future__ import annotations

from placer.report import explain
from placer.schema import Cluster, Device, Link, Rate

GIB = 1024**3


def row(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def cluster(*links: Link, **changes: object) -> Cluster:
    names = sorted({name for link in links for name in (link.source, link.target)})
    return Cluster(
        devices=tuple(Device(name=name, type="H", memory_bytes=GIB, **changes) for name in names),  # type: ignore[arg-type]
        links=links,
    )


def test_links_show_what_they_carry_under_load() -> None:
    found = Link(
        source="cuda:0",
        target="cuda:1",
        bandwidth_bytes_per_s=384e9,
        latency_s=18e-6,
        bidirectional=Rate(bandwidth_bytes_per_s=350e9),
        computing=Rate(bandwidth_bytes_per_s=300e9),
    )
    text = explain(cluster(found))
    assert "both ways" in text and "computing" in text
    for shown in ("384.00 GB/s", "18.0 µs", "350.00 GB/s", "300.00 GB/s"):
        assert shown in row(text, "│ cuda:0 │ cuda:1")


def test_what_was_not_measured_has_no_column() -> None:
    text = explain(cluster(Link(source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=1e9)))
    assert "both ways" not in text
    assert "to host" not in text


def test_a_bad_link_is_told_with_its_fault() -> None:
    bad = Link(
        source="cuda:0",
        target="cuda:1",
        bandwidth_bytes_per_s=2e10,
        route="host",
        fault="3 of 9 bytes arrived changed",
    )
    text = explain(cluster(bad))
    assert (
        "link cuda:0 -> cuda:1: 3 of 9 bytes arrived changed; copies go by way of the host's memory"
        in text
    )


def test_the_ways_to_the_host_are_shown() -> None:
    link = Link(source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=1e9)
    text = explain(
        cluster(
            link,
            to_host=Rate(bandwidth_bytes_per_s=55e9),
            from_host=Rate(bandwidth_bytes_per_s=53e9),
        )
    )
    assert "55.00 GB/s" in row(text, "│ cuda:1 │ H") and "53.00 GB/s" in row(text, "│ cuda:1 │ H")


def test_devices_that_share_a_switch_are_told() -> None:
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    links = [
        Link(
            source=f"cuda:{a}",
            target=f"cuda:{b}",
            bandwidth_bytes_per_s=3e11 if a // 2 == b // 2 else 2e10,
        )
        for a, b in pairs
    ]
    text = explain(cluster(*links, host="node7"))
    assert (
        "joined by faster links: node7: cuda:0, cuda:1\n"
        "joined by faster links: node7: cuda:2, cuda:3" in text
    )
