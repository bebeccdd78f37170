from __future__ import annotations

import pytest

from placer import doctor
from placer.profiler import cluster
from placer.schema import Cluster, Device, Link


def test_a_link_that_changes_bytes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cluster(
        devices=tuple(Device(name=name, type="H", memory_bytes=1) for name in ("cuda:0", "cuda:1")),
        links=(
            Link(
                source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=1e9, route="host", fault="2 of 9 bytes changed"
            ),
            Link(source="cuda:1", target="cuda:0", bandwidth_bytes_per_s=1e9),
        ),
    )
    monkeypatch.setattr(cluster, "measure_cluster", lambda **_: found)
    report = doctor.examine()
    told = [note for note in report.notes if "cuda:" in note]
    assert told == ["link cuda:0 -> cuda:1: 2 of 9 bytes changed; copies go by way of the host's memory"]
    assert report.problems == []  # it is slower, and right
