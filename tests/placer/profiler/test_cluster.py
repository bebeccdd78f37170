from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from placer import devices as hardware
from placer.errors import InputError
from placer.profiler.links import cluster
from placer.profiler.links.cluster import measure, measure_cluster, resolve_limits
from placer.profiler.links.links import Connections


def test_stand_ins_share_the_memory_of_the_machine() -> None:
    cluster = measure_cluster(["cpu:0", "cpu:1", "cpu:2"], progress=False)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert [device.name for device in cluster.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert {device.memory_bytes for device in cluster.devices} == {machine // 3}
    assert {device.reserve_bytes for device in cluster.devices} == {0}


def test_one_limit_holds_for_every_device() -> None:
    cluster = measure_cluster(["cpu:0", "cpu:1"], memory_bytes=12345, progress=False)
    assert [device.usable_bytes for device in cluster.devices] == [12345, 12345]


def test_a_device_may_have_a_limit_of_its_own() -> None:
    cluster = measure_cluster(["cpu:0", "cpu:1"], memory_bytes={"cpu:1": 12345}, progress=False)
    assert cluster.devices[1].usable_bytes == 12345
    assert cluster.devices[0].usable_bytes > 12345


def test_a_limit_for_a_device_that_is_not_measured_is_refused() -> None:
    with pytest.raises(InputError, match="memory_bytes names cpu:5, which is not in cpu:0, cpu:1"):
        measure_cluster(["cpu:0", "cpu:1"], memory_bytes={"cpu:5": 1}, progress=False)


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_a_limit_must_be_a_positive_whole_number(limit: Any) -> None:
    with pytest.raises(InputError, match=f"is {limit!r}; give a positive whole number"):
        measure_cluster(["cpu:0"], memory_bytes=limit, progress=False)


def test_a_limit_may_be_a_size_with_a_unit() -> None:
    limits = {"cpu:0": "1.5 GiB", "cpu:1": 4096}
    cluster = measure_cluster(["cpu:0", "cpu:1"], memory_bytes=limits, progress=False)
    assert [device.usable_bytes for device in cluster.devices] == [3 * 2**29, 4096]
    (device,) = measure_cluster(["cpu:0"], memory_bytes="2GB", progress=False).devices
    assert device.usable_bytes == 2 * 10**9


def test_a_limit_that_is_not_a_size_is_refused() -> None:
    with pytest.raises(InputError, match="'much' is not a size"):
        measure_cluster(["cpu:0"], memory_bytes="much", progress=False)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of type ``GPU`` with 100 bytes, of which libraries take 5 and the context 10."""
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: (60, 100))
    monkeypatch.setattr(hardware, "library_bytes", lambda device: 5)
    monkeypatch.setattr(hardware, "context_bytes", lambda device: 10)
    monkeypatch.setattr(hardware, "type_name", lambda device: "GPU")
    monkeypatch.setattr(hardware, "keep_random_state", lambda found: nullcontext())
    monkeypatch.setattr(cluster, "measure_links", lambda *_: Connections())
    return torch.device("cuda", 0)


@pytest.mark.parametrize(("limit", "usable"), [(None, 85), (50, 50), (85, 85), (95, 85), (100, 85)])
def test_the_reserve_of_an_accelerator_is_never_given_away(
    accelerator: torch.device, limit: int | None, usable: int
) -> None:
    (described,) = measure(
        [accelerator], resolve_limits([accelerator], limit), lambda _: None
    ).devices
    assert described.usable_bytes == usable
    assert described.memory_bytes == (limit or 100)


@pytest.mark.parametrize(("kind", "usable"), [("GPU", 78), ("another GPU", 85)])
def test_the_reserve_has_what_stands_empty_beside_tensors_on_its_type_of_device(
    accelerator: torch.device, kind: str, usable: int
) -> None:
    (described,) = measure([accelerator], {}, lambda _: None, fragmented_bytes={kind: 7}).devices
    assert described.usable_bytes == usable


def test_an_accelerator_has_no_more_than_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: (60, 100))
    with pytest.raises(InputError, match="memory_bytes of cuda:0 is 101, but the device has 100"):
        resolve_limits([torch.device("cuda", 0)], 101)


def test_links_have_a_bandwidth_and_a_latency() -> None:
    link = measure_cluster(["cpu:0", "cpu:1"], progress=False).link("cpu:0", "cpu:1")
    assert link is not None
    assert link.bandwidth_bytes_per_s > 0
    assert link.latency_s >= 0
