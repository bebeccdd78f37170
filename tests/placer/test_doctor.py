from __future__ import annotations

import sys
from importlib import metadata

import pytest

from placer import doctor
from placer.profiler.links import cluster
from placer.schema import Cluster, Device, Link


def test_a_link_that_changes_bytes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cluster(
        devices=tuple(Device(name=name, type="H", memory_bytes=1) for name in ("cuda:0", "cuda:1")),
        links=(
            Link(
                source="cuda:0",
                target="cuda:1",
                bandwidth_bytes_per_s=1e9,
                route="host",
                fault="2 of 9 bytes changed",
            ),
            Link(source="cuda:1", target="cuda:0", bandwidth_bytes_per_s=1e9),
        ),
    )
    monkeypatch.setattr(cluster, "measure_cluster", lambda **_: found)
    report = doctor.examine()
    told = [note for note in report.notes if "cuda:" in note]
    assert told == [
        "link cuda:0 -> cuda:1: 2 of 9 bytes changed; copies go by way of the host's memory"
    ]
    assert report.problems == []  # it is slower, and right


def test_a_device_without_free_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Cluster(devices=(Device(name="cuda:0", type="H", memory_bytes=8, reserve_bytes=8),))
    monkeypatch.setattr(cluster, "measure_cluster", lambda **_: full)
    assert doctor.examine().problems == ["cuda:0 has no free memory; other programs hold it"]


def test_devices_that_cannot_be_measured_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> Cluster:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(cluster, "measure_cluster", fail)
    assert doctor.examine().problems == [
        "the devices cannot be measured: CUDA error: device-side assert triggered"
    ]


def test_a_missing_package_is_told_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torch", "uvicorn"):
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(doctor, "version", version)
    report = doctor.examine()
    assert report.cluster is None
    assert report.problems == [
        "cannot profile models and apply placements: torch is not installed: "
        "pip install 'torch-placer[torch]'"
    ]
    assert report.notes == [
        "to serve placements: uvicorn is not installed: pip install 'torch-placer[server]'"
    ]


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (problem,) = doctor.examine().problems
    assert "torch is installed and cannot be imported" in problem


def test_a_solver_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "placer.solver.solve", None)
    (problem,) = doctor.examine().problems
    assert problem.startswith("cannot solve here:")
