"""The rate of a disk: from a file of the folder or a written one, and from the cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import placer
from placer.errors import ProfilingError
from placer.profiler.cache.file_cache import Cache
from placer.profiler.links import disk_rate
from placer.profiler.links.cluster import measure_cluster

SIZES = (2**12, 2**14, 2**16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_rate, "SIZES", SIZES)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The files that are read, with their sizes; each byte then takes a nanosecond."""
    found: list[tuple[str, int]] = []

    def read_s(file: Path, size_bytes: int, reader: object) -> float:
        found.append((file.name, file.stat().st_size))
        return 1e-3 + 1e-9 * size_bytes

    monkeypatch.setattr(disk_rate, "_read_s", read_s)
    return found


def test_a_file_is_written_where_none_is_large_enough(
    tmp_path: Path, read: list[tuple[str, int]]
) -> None:
    (tmp_path / "small").write_bytes(bytes(SIZES[-1] - 1))
    rate = disk_rate.disk_rate(tmp_path, lambda _: None)
    assert (rate.latency_s, rate.bandwidth_bytes_per_s) == pytest.approx((1e-3, 1e9))
    assert {(name.startswith("placer-disk-"), size) for name, size in read} == {(True, SIZES[-1])}
    assert [file.name for file in tmp_path.iterdir()] == ["small"]


def test_the_largest_file_is_read_and_nothing_is_written(
    tmp_path: Path, read: list[tuple[str, int]]
) -> None:
    for name, size in (("a", SIZES[-1]), ("b", 2 * SIZES[-1]), ("c", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    disk_rate.disk_rate(tmp_path, lambda _: None)
    assert set(read) == {("b", 2 * SIZES[-1])}


def test_a_disk_is_measured_once_since_the_machine_started(
    tmp_path: Path, read: list[tuple[str, int]]
) -> None:
    cache, steps = Cache(tmp_path / "cache"), list[str]()
    (tmp_path / "other").mkdir()
    one = disk_rate.disk_rate(tmp_path, steps.append, cache)
    count = len(read)
    assert disk_rate.disk_rate(tmp_path / "other", steps.append, cache) == one
    assert len(read) == count and steps == [f"disk of {tmp_path}"]


def test_files_are_really_read(tmp_path: Path) -> None:
    rate = disk_rate.disk_rate(tmp_path, lambda _: None)
    assert 1e6 < rate.bandwidth_bytes_per_s < 1e13


def test_every_device_has_the_rate_only_if_a_folder_is_given(
    tmp_path: Path, read: list[tuple[str, int]]
) -> None:
    with placer.testing.logical_devices(2):
        assert [one.from_disk for one in measure_cluster(progress=False).devices] == [None, None]
        found = measure_cluster(progress=False, disk_folder=tmp_path)
    for device in found.devices:
        assert device.from_disk is not None
        assert device.from_disk.bandwidth_bytes_per_s == pytest.approx(1e9)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ProfilingError, match=f"the disk of {tmp_path} cannot be measured"):
        disk_rate.disk_rate(tmp_path, lambda _: None)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfilingError, match=r"gone cannot be measured: No such file"):
        disk_rate.disk_rate(tmp_path / "gone", lambda _: None)
