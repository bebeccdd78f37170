from __future__ import annotations

import pytest

from placer.errors import InputError
from placer.estimator.device_sizes import cluster_of, with_more
from placer.schema import Cluster, Device
from placer.utils.units import devices_text, needed_text

GIB = 2**30


def usable(cluster: Cluster) -> list[int]:
    return [device.usable_bytes for device in cluster.devices]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("4x24GiB", [24 * GIB] * 4),
        ("24GiB,12GiB", [24 * GIB, 12 * GIB]),
        ("2x80GB, 1x24GiB", [80 * 10**9, 80 * 10**9, 24 * GIB]),
        ("1.5 GiB", [3 * GIB // 2]),
        ([GIB, "2GiB"], [GIB, 2 * GIB]),
    ],
)
def test_sizes_become_devices_less_their_reserve(given: object, sizes: list[int]) -> None:
    assert usable(cluster_of(given, 1000)) == [size - 1000 for size in sizes]


def test_every_device_is_linked_with_every_other() -> None:
    cluster = cluster_of("3x1GiB", 0)
    ends = {(link.source, link.target) for link in cluster.links}
    assert len(ends) == len(cluster.links) == 6


def test_a_cluster_keeps_its_own_reserves() -> None:
    cluster = Cluster(devices=(Device(name="a", type="t", memory_bytes=9, reserve_bytes=2),))
    assert cluster_of(cluster, 1000) is cluster


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("2", "without its unit"),
        ("axb", "is not a size"),
        ("0x24GiB", "COUNTxSIZE"),
        ("2x24GiB,", "COUNTxSIZE"),
        ("2x24furlongs", "is not a size"),
        ("100MiB", "not larger than the reserve"),
        ("2*24", "a device of 24 B .* with its unit as in 24GiB"),
        ("2000x24GiB", "COUNTxSIZE"),
        ("1000x24GiB,1000x24GiB", "the limit is 1024"),
        (2, "devices is an int"),
        ([], "devices is empty"),
        ([True], "between 1 byte and 1 PiB"),
    ],
)
def test_a_description_without_sizes_is_refused(given: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        cluster_of(given, 512 * 2**20)


def test_more_devices_are_like_the_largest_and_have_new_names() -> None:
    cluster = with_more(cluster_of("24GiB,12GiB", 0), 2)
    assert usable(cluster) == [24 * GIB, 12 * GIB, 24 * GIB, 24 * GIB]
    assert len({device.name for device in cluster.devices}) == 4
    assert len(cluster.links) == 12


def test_devices_are_named_by_number_and_size() -> None:
    assert devices_text([24 * GIB] * 2) == "two 24 GiB devices"
    assert devices_text([80 * 10**9], "card") == "one 80 GB card"
    assert devices_text([24 * GIB] * 12) == "12 24 GiB devices"
    assert (
        devices_text([24 * GIB, 12 * GIB, 24 * GIB]) == "two 24 GiB devices and one 12 GiB device"
    )


@pytest.mark.parametrize("size", [1, 1023, 1025, 10 * GIB + 1, 24 * GIB, 2**40 + 12345])
def test_a_device_of_a_needed_size_is_large_enough(size: int) -> None:
    (device,) = cluster_of(needed_text(size), 0).devices
    assert size <= device.memory_bytes <= size * 1.1
