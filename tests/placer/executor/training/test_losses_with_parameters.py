"""Losses that read parameters by themselves: a penalty of their size, a weight as a class's centre,
a second call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.errors import InputError
from placer.testing import logical_devices

X, Y = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
Run: TypeAlias = Callable[[Tensor], Tensor]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _placed(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
    flow.update_flow()
    return flow


def _decay(model: nn.Module, run: Run) -> Callable[[Any, Any], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        sizes = [parameter.pow(2).sum().to(output.device) for parameter in model.parameters()]
        return functional.cross_entropy(output, target) + 0.1 * torch.stack(sizes).sum()

    return loss


def _consistency(model: nn.Module, run: Run) -> Callable[[Any, Any], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + run(2 * X[:3]).pow(2).mean().to(
            output.device
        )

    return loss


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", [[], ["cpu:1"]])
@pytest.mark.parametrize("make", [_decay, _consistency])
def test_what_a_loss_reads_of_the_model_is_trained(
    make: Any, recompute: list[str], schedule: Any
) -> None:
    model = _net()
    unsplit = copy.deepcopy(model)
    with logical_devices(2):
        flow = _placed(model)
        flow.recompute = list(recompute)
        step = flow.train_step(
            make(model, flow), torch.optim.SGD(model.parameters(), 0.1), schedule=schedule
        )
        optimizer, loss_fn = torch.optim.SGD(unsplit.parameters(), 0.1), make(unsplit, unsplit)
        for _ in range(3):
            optimizer.zero_grad()
            losses = [
                loss_fn(unsplit(x), y) / 4 for x, y in zip(X.chunk(4), Y.chunk(4), strict=True)
            ]
            torch.stack(losses).sum().backward()
            optimizer.step()
            with pytest.warns(
                UserWarning, match="loss_fn reads parameters in addition to its arguments"
            ):
                torch.testing.assert_close(step(X, Y, chunks=4).cpu(), sum(losses))
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_such_a_step_is_not_measured() -> None:
    model = _net()
    with logical_devices(2):
        flow = _placed(model)
        step = flow.train_step(_decay(model, flow))
        with pytest.raises(InputError, match="loss_fn reads parameters"):
            flow.measure(X, Y, step=step, chunks=2)
        with pytest.warns(UserWarning, match="loss_fn reads parameters"):
            step(X, Y, chunks=2)
        with pytest.raises(InputError, match="the step has warned of another reason"):
            flow.measure(X, Y, step=step, chunks=2)


def test_a_loss_that_makes_leaves_of_its_own_runs_through_the_pipeline() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.pow(2).sum(), leaf, create_graph=True)
        return functional.cross_entropy(output, target) + 0.1 * (slope - output).pow(2).mean()

    model = _net()
    with logical_devices(2):
        step = _placed(model).train_step(loss)
        step(X, Y, chunks=2)
        assert step.pipelines[0].is_prepared
