from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer.capture.layers import Layer
from placer.profiler.trial import bring_input, bring_state

CPU = torch.device("cpu", 0)


def _layer(*state: str) -> Layer:
    return Layer("layer", (), "", state, (), (), (), lambda device, state, reads: (), "")


def test_state_is_copied_and_needs_gradients_as_in_the_model() -> None:
    own = {
        "weight": nn.Parameter(torch.randn(3)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
    }
    brought = bring_state(_layer("frozen", "weight"), own, CPU)
    assert [tensor.requires_grad for tensor in brought] == [False, True]
    for tensor, original in zip(brought, (own["frozen"], own["weight"]), strict=True):
        assert torch.equal(tensor, original)
        assert tensor.data_ptr() != original.data_ptr()


def test_state_on_meta_becomes_small_numbers_that_may_be_variances() -> None:
    own: dict[str, Tensor] = {
        "weight": nn.Parameter(torch.empty(1000, device="meta", dtype=torch.bfloat16)),
        "running_var": torch.empty(1000, device="meta"),
        "num_batches": torch.empty((), device="meta", dtype=torch.long),
    }
    weight, variance, count = bring_state(_layer(*own), own, CPU)
    assert weight.dtype == torch.bfloat16
    assert weight.requires_grad
    assert 0 < float(weight.detach().abs().max()) < 0.1
    assert float(variance.min()) > 0
    assert (count.dtype, int(count)) == (torch.long, 0)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.long, torch.zeros(4).long()), (torch.bool, torch.ones(4).bool())]
)
def test_whole_numbers_on_meta_become_zeros_and_masks_become_true(
    dtype: torch.dtype, expected: Tensor
) -> None:
    assert torch.equal(bring_input(torch.empty(4, dtype=dtype, device="meta"), CPU), expected)


def test_an_input_is_copied_and_a_number_passed_on() -> None:
    x = torch.randn(3)
    assert torch.equal(bring_input(x, CPU), x)
    assert bring_input(x, CPU).data_ptr() != x.data_ptr()
    assert bring_input(5, CPU) == 5


def test_gradients_are_right_for_a_layer_that_writes_on_what_it_reads(make_trial: Any) -> None:
    x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    trial = make_trial(torch.relu_, [x], mutated_reads=[0])
    trial.forward()
    trial.backward()
    (gradient,) = trial.gradients
    assert torch.equal(gradient, trial.write_gradients[0] * torch.tensor([0.0, 1.0, 1.0]))


def test_passes_may_be_repeated_and_leave_no_gradients_behind(make_trial: Any) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    trial = make_trial(torch.matmul, [torch.randn(2, 4, requires_grad=True)], [weight])
    first = trial.gradients
    for _ in range(3):
        trial.forward()
        trial.backward()
    assert all(torch.equal(a, b) for a, b in zip(first, trial.gradients, strict=True))
    assert weight.grad is None


def test_accumulating_adds_to_the_gradients_that_parameters_have(make_trial: Any) -> None:
    trial = make_trial(torch.matmul, [torch.randn(2, 4)], [torch.randn(4, 4, requires_grad=True)])
    trial.set_gradients(present=True)
    for _ in range(2):
        trial.forward()
        trial.accumulate()
    trial.forward()
    trial.backward()
    assert torch.allclose(trial.parameters[0].grad, 2 * trial.gradients[0])
    trial.set_gradients(present=False)
    assert trial.parameters[0].grad is None
