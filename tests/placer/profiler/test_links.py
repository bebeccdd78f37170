from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corruption import corrupt
from hypothesis import given
from hypothesis import strategies as st

from placer import devices as hardware
from placer.devices import routes
from placer.errors import ProfilingError
from placer.profiler.cache.file_cache import Cache
from placer.profiler.links import link_probe, links
from placer.profiler.links.link_probe import fit, through_host
from placer.profiler.links.links import Ports, evened, links_to_measure, measure_links
from placer.schema import Link, Rate

SIZES = (2**16, 2**20, 2**25)
CPUS = [torch.device("cpu", index) for index in range(4)]
GPUS = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture(autouse=True)
def no_detours_left() -> Iterator[None]:
    yield
    routes._detours.clear()


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e13))
def test_a_straight_line_is_fitted_exactly(latency: float, bandwidth: float) -> None:
    sizes = [latency * bandwidth * factor for factor in (0.3, 1, 2, 10)]
    found = fit(sizes, [latency + size / bandwidth for size in sizes])  # type: ignore[arg-type]
    assert found == pytest.approx((latency, bandwidth), rel=2e-3)


def test_a_line_below_zero_gives_no_negative_latency() -> None:
    latency, bandwidth = fit(SIZES, [size / 1e9 - 1e-5 for size in SIZES])
    assert latency == 0
    assert bandwidth > 0


def test_times_that_fall_with_size_give_the_bandwidth_of_the_largest() -> None:
    assert fit(SIZES, [3.0, 2.0, 1.0]) == (0.0, pytest.approx(SIZES[-1], rel=1e-3))


def test_stand_ins_share_one_measurement() -> None:
    begun: list[str] = []
    found = measure_links(CPUS, begun.append).links
    assert len(begun) == links_to_measure(CPUS) == 1
    assert len({(link.latency_s, link.bandwidth_bytes_per_s) for link in found}) == 1
    assert {(link.source, link.target) for link in found} == {
        (str(a), str(b)) for a in CPUS for b in CPUS if a != b
    }


def test_every_directed_pair_of_accelerators_and_every_host_is_measured() -> None:
    assert links_to_measure(GPUS) == 6 + 3
    assert links_to_measure([*GPUS, *CPUS]) == 6 + 3 + 3 + 3 + 1


def test_one_device_has_no_links() -> None:
    assert measure_links(CPUS[:1], lambda _: None).links == []


def test_one_accelerator_has_its_ways_to_the_host(machine: Any) -> None:
    found = measure_links(GPUS[:1], lambda _: None)
    assert (found.links, list(found.ports), links_to_measure(GPUS[:1])) == ([], GPUS[:1], 1)


def test_a_bad_link_goes_by_way_of_the_host_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corrupt(monkeypatch, ("cpu:2", "cpu:1"))
    with caplog.at_level(logging.WARNING):
        found = measure_links(CPUS, lambda _: None).links
    (bad,) = [link for link in found if link.route == "host"]
    assert (bad.source, bad.target) == ("cpu:2", "cpu:1")
    assert bad.fault == "1 of 65536 bytes arrived changed"
    assert (
        "link cpu:2 -> cpu:1: 1 of 65536 bytes arrived changed; copies go by way of the host's"
        in caplog.text
    )
    assert all(link.fault == "" for link in found if link is not bad)
    assert hardware.has_detour(CPUS[2], CPUS[1])
    assert not hardware.has_detour(CPUS[1], CPUS[2])


def test_a_link_that_was_mended_goes_straight_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        corrupt(patched, ("cpu:0", "cpu:1"))
        measure_links(CPUS[:2], lambda _: None)
    assert hardware.has_detour(CPUS[0], CPUS[1])
    assert all(link.route == "direct" for link in measure_links(CPUS[:2], lambda _: None).links)
    assert not hardware.has_detour(CPUS[0], CPUS[1])


def test_the_way_by_the_host_takes_both_legs_one_after_the_other() -> None:
    there, on = (
        Rate(latency_s=1e-5, bandwidth_bytes_per_s=2e10),
        Rate(latency_s=2e-5, bandwidth_bytes_per_s=5e10),
    )
    both = through_host(there, on)
    for size in (0, 10**6, 10**9):
        seconds = sum(leg.latency_s + size / leg.bandwidth_bytes_per_s for leg in (there, on))
        assert both.latency_s + size / both.bandwidth_bytes_per_s == pytest.approx(
            seconds, rel=1e-3
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, bool, bool], Rate]:
    """Three GPUs whose ways have rates of their own under each load; cuda:0 -> cuda:1 changes bytes
    under load."""
    rates: dict[tuple[str, str, bool, bool], Rate] = {}

    def rate(
        source: torch.device,
        target: torch.device,
        *,
        bidirectional: bool = False,
        computing: bool = False,
    ) -> Rate:
        if (str(source), str(target)) == ("cuda:0", "cuda:1") and bidirectional:
            raise link_probe.Changed(3, 100)
        key = (str(source), str(target), bidirectional, computing)
        return rates.setdefault(
            key, Rate(bandwidth_bytes_per_s=1e9 * (1 + len(rates)), latency_s=1e-6 * len(rates))
        )

    monkeypatch.setattr(link_probe, "rate", rate)
    monkeypatch.setattr(link_probe, "check", lambda *_: None)
    monkeypatch.setattr(links, "conditions", lambda device: {"type": "GPU"})
    monkeypatch.setattr(hardware, "place", str)
    return rates


def test_each_way_is_measured_alone_both_ways_and_beside_computations(machine: Any) -> None:
    found = measure_links(GPUS, lambda _: None)
    link = next(link for link in found.links if (link.source, link.target) == ("cuda:1", "cuda:2"))
    assert (
        link.bandwidth_bytes_per_s
        == machine["cuda:1", "cuda:2", False, False].bandwidth_bytes_per_s
    )
    assert link.bidirectional == machine["cuda:1", "cuda:2", True, False]
    assert link.computing == machine["cuda:1", "cuda:2", False, True]
    assert link.bidirectional_computing == machine["cuda:1", "cuda:2", True, True]
    assert found.ports[GPUS[2]] == Ports(
        machine["cuda:2", "cpu", False, False], machine["cpu", "cuda:2", False, False]
    )


def test_a_link_that_changes_bytes_only_under_load_has_the_rate_of_the_way_by_the_host(
    machine: Any,
) -> None:
    found = measure_links(GPUS, lambda _: None)
    link = next(link for link in found.links if (link.source, link.target) == ("cuda:0", "cuda:1"))
    legs = (machine["cuda:0", "cpu", False, False], machine["cpu", "cuda:1", False, False])
    expected = through_host(*legs)
    assert link.route == "host"
    assert link.bidirectional is None
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (
        expected.latency_s,
        expected.bandwidth_bytes_per_s,
    )


def test_links_are_taken_from_the_cache_but_not_those_with_a_fault(
    machine: Any, tmp_path: Path
) -> None:
    cache = Cache(tmp_path)
    first, begun = measure_links(GPUS, lambda _: None, cache), list[str]()
    assert links_to_measure(GPUS, cache) == 1
    again = measure_links(GPUS, begun.append, cache)
    assert (again.links, again.ports) == (first.links, first.ports)
    assert begun == ["cuda:0 -> cuda:1"]


def test_a_cached_link_is_still_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    measure_links(CPUS[:2], lambda _: None, cache)
    assert links_to_measure(CPUS[:2], cache) == 0
    corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    found = measure_links(CPUS[:2], lambda _: None, cache).links
    assert [link.route for link in found] == ["host", "direct"]


def test_another_start_of_the_machine_measures_its_links_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = Cache(tmp_path)
    measure_links(CPUS[:2], lambda _: None, cache)
    monkeypatch.setattr(hardware, "boot_id", lambda: "another")
    assert links_to_measure(CPUS[:2], cache) == 1


def test_a_device_whose_way_to_the_host_changes_bytes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rate(*_: object, **__: object) -> Rate:
        raise link_probe.Changed(1, 2)

    monkeypatch.setattr(link_probe, "rate", rate)
    with pytest.raises(
        ProfilingError,
        match=r"between cuda:0 and the host's memory, 1 of 2 bytes .* leave the device",
    ):
        measure_links(GPUS[:2], lambda _: None)


def test_links_written_before_there_were_loads_are_read() -> None:
    assert (
        Link.model_validate({"source": "a", "target": "b", "bandwidth_bytes_per_s": 1.0}).route
        == "direct"
    )


def test_links_that_differ_by_noise_are_one_and_those_of_another_way_stay_apart() -> None:
    def link(
        source: int, target: int, bandwidth: float, latency_s: float, both: float | None = None
    ) -> Link:
        rate = None if both is None else Rate(bandwidth_bytes_per_s=both, latency_s=latency_s)
        return Link(
            source=f"cuda:{source}",
            target=f"cuda:{target}",
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency_s,
            bidirectional=rate,
        )

    fast = [
        link(0, 1, 404.6e9, 1.02e-5, 350e9),
        link(1, 0, 414.0e9, 1.07e-5, 370e9),
        link(2, 3, 410e9, 1.1e-5, 360e9),
    ]
    slow = [link(0, 2, 25e9, 2e-5), link(2, 0, 26e9, 2e-5), link(3, 2, 410e9, 9e-5)]
    types = dict.fromkeys(("cuda:0", "cuda:1", "cuda:2", "cuda:3"), "card")
    found = evened([*fast, *slow], types)
    assert [(one.source, one.target) for one in found] == [
        (one.source, one.target) for one in [*fast, *slow]
    ]
    rates = [(one.bandwidth_bytes_per_s, one.latency_s, one.bidirectional) for one in found]
    wanted = (410e9, 1.07e-5, Rate(bandwidth_bytes_per_s=360e9, latency_s=1.07e-5))
    assert rates[:3] == [wanted] * 3
    assert rates[3:5] == [(25.5e9, 2e-5, None)] * 2
    assert found[5] == slow[2]


def test_links_between_other_types_or_by_another_route_are_not_mixed() -> None:
    ends = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:0", "cuda:2")]
    links = [
        Link(
            source=a,
            target=b,
            bandwidth_bytes_per_s=1e9 + 1e6 * i,
            route="host" if i == 1 else "direct",
        )
        for i, (a, b) in enumerate(ends)
    ]
    assert evened(links, {"cuda:0": "one", "cuda:1": "one", "cuda:2": "other"}) == links
