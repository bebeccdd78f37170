from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import ProfilingError
from placer.profiler.links import arrived, fit, links_to_measure, measure_links

SIZES = (2**16, 2**20, 2**25)
CPUS = [torch.device("cpu", index) for index in range(4)]


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
    links = measure_links(CPUS, begun.append)
    assert len(begun) == links_to_measure(CPUS) == 1
    assert len({(link.latency_s, link.bandwidth_bytes_per_s) for link in links}) == 1
    assert {(link.source, link.target) for link in links} == {(str(a), str(b)) for a in CPUS for b in CPUS if a != b}


def test_every_directed_pair_of_accelerators_is_measured() -> None:
    devices = [torch.device("cuda", index) for index in range(3)]
    assert links_to_measure(devices) == 6
    assert links_to_measure([*devices, *CPUS]) == 6 + 3 + 3 + 1


def test_one_device_has_no_links() -> None:
    assert measure_links(CPUS[:1], lambda _: None) == []


def test_bytes_that_arrive_changed_are_reported() -> None:
    sent = torch.arange(100, dtype=torch.int8)
    received = sent.clone()
    arrived(sent, received, CPUS[0], CPUS[1])
    received[7] += 1
    with pytest.raises(ProfilingError, match="cpu:0 -> cpu:1 is not to be trusted: 1 of 100 bytes"):
        arrived(sent, received, CPUS[0], CPUS[1])
