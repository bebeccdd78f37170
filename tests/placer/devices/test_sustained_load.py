"""What a GPU's power limit does to work that lasts, from times as one showed them."""

from __future__ import annotations

import itertools

import pytest
import torch

from placer import devices
from placer.devices.timing.sustained_load import is_at_limit, lasting_over_lowered, lasting_share


def times(*stretches: tuple[float, float]) -> list[float]:
    """By stretch, until when, in seconds, and how long each pass took, in ms."""
    found: list[float] = []
    for until, ms in stretches:
        found += itertools.repeat(ms, round((1e3 * until - sum(found)) / ms))
    return found


AT_ITS_LIMIT = times(
    (0.07, 0.242), (0.75, 0.269), (1.0, 0.302), (1.5, 0.271), (2.0, 0.283), (2.2, 0.277)
)
"""A product of matrices on an H200, whose control swings once a second."""


def test_what_lasts_takes_as_long_as_it_does_over_the_swings_of_the_control() -> None:
    since = [
        ms
        for ms, end in zip(AT_ITS_LIMIT, itertools.accumulate(AT_ITS_LIMIT), strict=True)
        if end > 200
    ]
    assert lasting_over_lowered(AT_ITS_LIMIT) == pytest.approx(sum(since) / len(since) / 0.269)
    assert 1.02 < lasting_over_lowered(AT_ITS_LIMIT) < 1.04


def test_what_does_not_swing_takes_no_longer_and_never_less() -> None:
    assert lasting_over_lowered(times((2.2, 0.25))) == pytest.approx(1)
    assert lasting_over_lowered(times((1.0, 0.3), (2.2, 0.25))) == 1
    # none of them tells of clocks that do not swing yet
    assert lasting_over_lowered([700.0, 700.0, 700.0]) == 1


@pytest.mark.parametrize(
    ("stretches", "is_limited"),
    [
        ([(0.06, 0.242), (0.1, 0.266)], True),
        ([(0.06, 0.2), (0.1, 0.203)], False),
        # a device that was idle, whose clocks came up
        ([(0.03, 0.3), (0.1, 0.25)], False),
        # passes that are longer than clocks are full
        ([(0.05, 50.0), (0.11, 60.0)], True),
        ([(0.05, 50.0), (0.1, 50.0)], False),
    ],
)
def test_work_that_becomes_slower_is_at_the_power_limit(
    stretches: list[tuple[float, float]], is_limited: bool
) -> None:
    assert is_at_limit(times(*stretches)) is is_limited


def test_a_cpu_has_no_such_limit() -> None:
    assert lasting_share(torch.device(devices.CPU)) == 1


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_is_asked_once_and_keeps_its_memory_free() -> None:
    device = torch.device("cuda", 0)
    # they keep a workspace for each stream and thread
    devices.warm_libraries(device)
    before = torch.cuda.memory_reserved(device)
    assert 1 <= lasting_share(device) < 1.5
    # one more for these products
    assert torch.cuda.memory_reserved(device) <= before + 2**25
    assert lasting_share(device) == lasting_share(device)


@pytest.mark.gpu
def test_passes_under_a_lasting_load_are_each_timed_in_order() -> None:
    device = torch.device("cuda", 0)
    square = torch.randn(512, 512, device=device)
    square @ square  # loads the kernel
    torch.cuda.synchronize(device)
    done: list[str] = []
    passes = [lambda: done.append("one"), lambda: (done.append("two"), square @ square)]
    first, second = devices.lasting_ms(passes, device, 0.05)
    assert len(first) == len(second) == len(done) / 2 and done[:4] == ["one", "two", "one", "two"]
    assert all(time >= 0 for time in (*first, *second)) and sum(second) > 0
