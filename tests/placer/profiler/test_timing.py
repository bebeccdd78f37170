from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from placer.profiler.timing import measure_time, significant


def test_both_passes_take_time(make_trial: Any) -> None:
    trial = make_trial(torch.matmul, [torch.randn(32, 32, requires_grad=True)], [torch.randn(32, 32)])
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


def test_times_keep_four_significant_digits() -> None:
    assert [significant(value) for value in (0.0, 0.123456, 123456.0, 1.00004)] == [0.0, 0.1235, 123500.0, 1.0]
