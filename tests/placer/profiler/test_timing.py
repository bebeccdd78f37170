from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from placer import devices
from placer.profiler import timing
from placer.profiler.measure import measure_trial
from placer.profiler.timing import measure_time, significant, spread


def test_both_passes_take_time(make_trial: Any) -> None:
    trial = make_trial(
        torch.matmul, [torch.randn(32, 32, requires_grad=True)], [torch.randn(32, 32)]
    )
    times = measure_time(trial, training=True, repeats=3)
    assert times.forward_ms > 0
    assert times.backward_ms > 0
    assert times.host_ms > 0


def test_no_gradient_takes_no_backward_time(make_trial: Any) -> None:
    times = measure_time(make_trial(torch.exp, [torch.randn(8)]), training=True, repeats=3)
    assert times.forward_ms > 0
    assert times.backward_ms == 0


def test_inference_runs_without_gradients(make_trial: Any) -> None:
    modes = []

    def layer(x: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return x.exp()

    trial = make_trial(layer, [torch.randn(8, requires_grad=True)], training=False)
    assert measure_time(trial, training=False, repeats=3).backward_ms == 0
    assert not any(modes)


@pytest.mark.parametrize("repeats", [1, 3, 6])
def test_a_fast_layer_runs_as_often_as_asked(make_trial: Any, repeats: int) -> None:
    calls = []

    def layer(x: Tensor) -> Tensor:
        calls.append(None)
        return x.exp()

    trial = make_trial(layer, [torch.randn(8)])
    calls.clear()
    measure_time(trial, training=True, repeats=repeats)
    assert len(calls) == repeats


def test_timing_leaves_no_gradients_behind(make_trial: Any) -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    trial = make_trial(torch.matmul, [x], [weight])
    measure_time(trial, training=True, repeats=2)
    assert all(tensor.grad is None for tensor in (*trial.state, *trial.reads))


def test_gradients_of_weights_that_can_wait_are_timed_apart_and_added_as_training_does(
    make_trial: Any,
) -> None:
    linear: Any = torch.ops.aten.linear.default
    state = [torch.randn(4, 5, requires_grad=True), torch.randn(4, requires_grad=True)]
    trial = make_trial(linear, [torch.randn(2, 5, requires_grad=True)], state)
    trial.forward()
    times = measure_time(trial, training=True, repeats=2)
    assert 0 < times.weight_grad_ms < times.backward_ms
    trial.set_gradients(present=True)
    for _ in range(2):
        trial.forward_in_halves()
        trial.accumulate()
        before = [parameter.grad.clone() for parameter in trial.parameters]
        trial.accumulate_later()
        for gradient, parameter in zip(before, trial.parameters, strict=True):
            assert not torch.equal(gradient, parameter.grad)
    wanted = torch.autograd.grad(
        linear(trial.reads[0], *trial.state), trial.state, trial.write_gradients
    )
    for parameter, gradient in zip(trial.parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_a_layer_without_gradients_that_can_wait_has_none_apart(make_trial: Any) -> None:
    gain = [torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)]
    trial = make_trial(
        lambda x, a, b: functional.layer_norm(x, [4], a, b),
        [torch.randn(2, 4, requires_grad=True)],
        gain,
    )
    times = measure_trial(trial, training=True, repeats=2).time
    assert times.weight_grad_ms == 0 < times.backward_ms


class FakeDevice:
    """Stands in for ``placer.devices`` as timing on a GPU uses it: tells in which order things
    happen."""

    is_at_limit = staticmethod(devices.is_at_limit)

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower
        self.times = {"forward": 3.0, "accumulate": 4.0, "accumulate_later": 6.0}

    def cache_bytes(self, device: torch.device) -> int:
        return 64

    def replay_ms(self, device: torch.device) -> float:
        return 1.0

    def synchronise(self, device: torch.device) -> None:
        return

    def record(self, passes: Any, device: torch.device) -> Any:
        return passes

    def lasting_ms(self, passes: Any, device: torch.device, seconds: float) -> list[list[float]]:
        return [
            [self.times[run.__name__] * slower for slower in (*[1.0] * 9, *[self.slower] * 9)]
            for run in passes
        ]

    def lasting_share(self, device: torch.device) -> float:
        return 1.5

    def queued_ms(
        self, passes: Any, device: torch.device, repeats: int, before: Any
    ) -> list[list[float]]:
        for prepare, run in zip(before, passes, strict=True):
            prepare()
            run()
        return [[self.times[run.__name__]] * repeats for run in passes]


def test_on_a_gpu_each_pass_is_timed_behind_what_a_neighbour_would_have_written(
    make_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial(
        torch.matmul,
        [torch.randn(4, 4, requires_grad=True)],
        [torch.randn(4, 4, requires_grad=True)],
    )
    monkeypatch.setattr(timing, "devices", FakeDevice())
    written = [trial.reads[0]._version, trial.write_gradients[0]._version]
    reads, gradients = trial.reads[0].clone(), trial.write_gradients[0].clone()
    columns, host_ms = timing._cuda_times(
        trial, [trial.forward, trial.accumulate, trial.accumulate_later], repeats=2
    )
    # less what the replay adds
    assert columns == [[2.0, 2.0], [3.0, 3.0], [5.0, 5.0]]
    assert host_ms > 0
    assert torch.equal(trial.reads[0], reads)
    assert torch.equal(trial.write_gradients[0], gradients)
    # autograd does not notice
    assert [trial.reads[0]._version, trial.write_gradients[0]._version] == written
    summary = timing._summary(columns, host_ms=host_ms)
    assert (summary.forward_ms, summary.backward_ms, summary.weight_grad_ms) == (2.0, 8.0, 5.0)


@pytest.mark.parametrize(("slower", "longer"), [(1.1, 1.5), (1.01, 1.0)])
def test_what_works_at_the_power_limit_is_told_as_under_a_load_that_lasts(
    make_trial: Any, monkeypatch: pytest.MonkeyPatch, slower: float, longer: float
) -> None:
    trial = make_trial(
        torch.matmul,
        [torch.randn(4, 4, requires_grad=True)],
        [torch.randn(4, 4, requires_grad=True)],
    )
    monkeypatch.setattr(timing, "devices", FakeDevice(slower))
    columns, _ = timing._cuda_times(trial, [trial.forward, trial.accumulate], repeats=1)
    assert columns == [[2.0 * longer], [3.0 * longer]]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.long, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
)
def test_reads_of_every_kind_can_be_written_again(
    make_trial: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    read = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    trial = make_trial(
        lambda x, y: x.view(torch.uint8).sum() + y, [read, torch.randn(2)], training=False
    )
    monkeypatch.setattr(timing, "devices", FakeDevice())
    timing._cuda_times(trial, [trial.forward], repeats=1)
    assert torch.equal(trial.reads[0].view(torch.uint8), read.view(torch.uint8))


def test_the_spread_is_half_of_the_middle_half_over_the_median() -> None:
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(1.0 / 10.0)
    assert spread([5.0]) == spread([0.0, 0.0]) == 0.0


def test_times_keep_four_significant_digits() -> None:
    assert [significant(value) for value in (0.0, 0.123456, 123456.0, 1.00004)] == [
        0.0,
        0.1235,
        123500.0,
        1.0,
    ]


@pytest.mark.parametrize("size", [16, 4096])
def test_what_a_neighbour_made_is_written_again_as_it_was(size: int) -> None:
    cache = torch.zeros(1024)  # the larger values do not fit into it
    values = [
        torch.randn(2, 2, 2, size // 8).to(memory_format=torch.channels_last),
        torch.randn(size, dtype=torch.bfloat16),
        torch.randn(size + 3)[3:],
        torch.randn(size, dtype=torch.complex64),
        torch.arange(size),
        torch.ones(size, dtype=torch.bool),
        torch.tensor([torch.nan, torch.inf]),
        torch.empty(0),
    ]
    before = [value.clone() for value in values]
    timing._rewriting(cache, [*values, 3, None])()
    for value, was in zip(values, before, strict=True):
        torch.testing.assert_close(value, was, rtol=0, atol=0, equal_nan=True)
    assert not cache.any()


def test_beside_what_a_neighbour_made_as_much_is_read() -> None:
    cache = torch.zeros(1024)
    value = torch.randn(4, 8).t()
    beside = timing._zeros_in(cache, value)
    assert beside is not None
    assert (beside.shape, beside.stride(), beside.dtype) == (
        value.shape,
        value.stride(),
        value.dtype,
    )
    assert beside.data_ptr() == cache.data_ptr()
    assert timing._zeros_in(cache, torch.randn(4096)) is None
    # as the lengths of packed sequences are
    assert timing._zeros_in(cache, torch.empty(4, device="meta")) is None
