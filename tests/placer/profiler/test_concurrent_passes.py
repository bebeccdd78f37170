"""Halves by weight two at a time: what is timed, and what of it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from placer import devices
from placer.profiler.backward_split import concurrent_passes
from placer.profiler.backward_split.concurrent_passes import measure_share

CPU = torch.device("cpu")
linear: Callable[..., Tensor] = torch.ops.aten.linear.default


class Rows:
    """Stands in for ``placer.devices``: runs rows where they would be recorded, and tells times of
    its own."""

    def __init__(self, short_ms: float, long_ms: float, cache_bytes: int = 0) -> None:
        self.times = [[short_ms] * 3, [long_ms] * 3]
        self.size = cache_bytes
        self.pauses: list[float] = []
        self.fails: Exception | None = None
        self.NotRecordable = devices.NotRecordable

    def cache_bytes(self, device: torch.device) -> int:
        return self.size

    def pause(self, device: torch.device, lasting_ms: float) -> None:
        self.pauses.append(lasting_ms)

    def side_by_side(self, works: Sequence[Callable[[], None]], device: torch.device) -> None:
        for work in works:
            work()

    def record(self, passes: Any, device: torch.device) -> Any:
        if self.fails is not None:
            raise self.fails
        for run in passes:
            run()
        return passes

    def queued_ms(
        self, passes: Any, device: torch.device, repeats: int, before: Any
    ) -> list[list[float]]:
        return self.times


@pytest.fixture
def left(make_trial: Any) -> Any:
    """A linear layer that ran both ways in halves, the one by weight left for later."""
    trial = make_trial(
        linear, [torch.randn(8, 16, requires_grad=True)], [torch.randn(4, 16, requires_grad=True)]
    )
    trial.set_gradients(present=True)
    trial.forward_in_halves()
    trial.accumulate()
    return trial


def share(trial: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch, alone_ms: float = 2.0) -> float:
    monkeypatch.setattr(concurrent_passes, "devices", rows)
    return measure_share(trial.deferred, alone_ms, CPU, 3, lambda: None)


def test_a_round_of_two_is_held_against_both_one_after_another(
    left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(short_ms=5.0, long_ms=5.0 + 3 * 3.0)
    assert share(left, rows, monkeypatch) == pytest.approx(3.0 / (2 * 2.0))
    assert rows.pauses == [1.0, 1.0]  # each row's other lane is half a time behind


@pytest.mark.parametrize(("round_ms", "expected"), [(9.0, 1.0), (0.1, 0.5), (-1.0, 0.5)])
def test_noise_tells_neither_a_loss_nor_more_than_two_at_a_time(
    left: Any, monkeypatch: pytest.MonkeyPatch, round_ms: float, expected: float
) -> None:
    assert share(left, Rows(5.0, 5.0 + 3 * round_ms), monkeypatch) == expected


def test_rows_add_to_copies_alone(left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (addition,) = left.deferred
    share(left, Rows(1.0, 4.0), monkeypatch)
    assert not left.parameters[0].grad.any()
    left.accumulate_later()
    torch.testing.assert_close(left.parameters[0].grad, addition.gradient.t() @ addition.x)


@pytest.mark.parametrize(("cache_bytes", "expected"), [(0, 2), (600, 4), (10**6, 8)])
def test_there_are_as_many_copies_as_the_cache_forgets(
    left: Any, cache_bytes: int, expected: int
) -> None:
    size = 4 * (8 * 16 + 8 * 4 + 4 * 16)
    assert concurrent_passes._Copy(left.deferred).nbytes == size == 896
    rows = Rows(1.0, 4.0, cache_bytes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(concurrent_passes, "devices", rows)
        assert len(concurrent_passes._copies(left.deferred, CPU)) == expected


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), devices.NotRecordable("waits for the host")]
)
def test_without_memory_or_a_recording_halves_take_their_own_time(
    left: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rows = Rows(1.0, 4.0)
    rows.fails = error
    assert share(left, rows, monkeypatch) == 1.0


def test_what_left_nothing_for_later_takes_its_own_time(
    make_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial(torch.exp, [torch.randn(8, requires_grad=True)])
    assert share(trial, Rows(1.0, 4.0), monkeypatch) == 1.0


@pytest.mark.gpu
@pytest.mark.alone
def test_a_product_that_fills_a_gpu_takes_its_own_time_and_a_small_one_less(
    make_trial: Any,
) -> None:
    """Products of 32 rows and columns leave nearly all of a GPU idle: two at a time take the time
    of one."""
    place = torch.device("cuda", 0)
    shares = []
    for side in (32, 8192):
        made = [torch.randn(side, side, device=place, requires_grad=True) for _ in range(2)]
        trial = make_trial(linear, made[:1], made[1:], device="cuda:0")
        trial.set_gradients(present=True)
        trial.forward_in_halves()
        trial.accumulate()
        (alone,) = devices.queued_ms(devices.record([trial.accumulate_later], place), place, 20)
        shares.append(measure_share(trial.deferred, sorted(alone)[10], place, 10, lambda: None))
        trial.set_gradients(present=False)
    assert shares[0] < 0.85
    assert 0.9 < shares[1] <= 1.0
