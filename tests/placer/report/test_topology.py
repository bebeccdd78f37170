from __future__ import annotations

from collections.abc import Callable

from placer.report.topology import islands
from placer.schema import Cluster, Device, Link

NVLINK, BUS = 384e9, 25e9


def cluster(count: int, bandwidth: Callable[[int, int], float], hosts: int = 1) -> Cluster:
    """A link for each pair to which a bandwidth above zero is given."""
    names = [f"cuda:{index}" for index in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and bandwidth(a, b) > 0]
    return Cluster(
        devices=tuple(
            Device(name=name, type="H", memory_bytes=1, host=f"node{index * hosts // count}")
            for index, name in enumerate(names)
        ),
        links=tuple(
            Link(
                source=names[a],
                target=names[b],
                bandwidth_bytes_per_s=bandwidth(a, b) * (1 + 0.01 * a),
            )
            for a, b in pairs
        ),
    )


def groups(found: Cluster) -> list[str]:
    return ["".join(name[-1] for name in island.devices) for island in islands(found)]


def test_pairs_with_a_bridge_are_islands() -> None:
    assert groups(cluster(4, lambda a, b: NVLINK if a // 2 == b // 2 else BUS)) == ["01", "23"]


def test_devices_on_one_switch_are_one_island_for_all_the_noise() -> None:
    assert groups(cluster(8, lambda a, b: NVLINK)) == ["01234567"]


def test_one_bad_link_leaves_an_island_whole() -> None:
    assert groups(cluster(4, lambda a, b: BUS if (a, b) == (0, 1) else NVLINK)) == ["0123"]


def test_a_ring_of_fast_links_is_one_island() -> None:
    assert groups(cluster(6, lambda a, b: NVLINK if (a - b) % 6 in (1, 5) else BUS)) == ["012345"]


def test_a_device_without_a_fast_link_is_an_island_of_its_own() -> None:
    assert groups(cluster(3, lambda a, b: BUS if 2 in (a, b) else NVLINK)) == ["01", "2"]


def test_hosts_are_islands_however_fast_the_network() -> None:
    found = islands(cluster(4, lambda a, b: NVLINK, hosts=2))
    assert [(island.host, island.devices) for island in found] == [
        ("node0", ("cuda:0", "cuda:1")),
        ("node1", ("cuda:2", "cuda:3")),
    ]


def test_devices_without_links_share_nothing() -> None:
    assert groups(cluster(3, lambda a, b: 0)) == ["0", "1", "2"]
