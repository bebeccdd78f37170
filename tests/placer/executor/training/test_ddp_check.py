"""DistributedDataParallel around a flow: a training step, whose gradients it would not see, is
refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from placer import DataFlow, InputError
from placer.executor.training import ddp_check

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _placed(model: nn.Module, prefix: str = "") -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.clear()
    flow.layer_gpus.update({f"{prefix}0": 0, f"{prefix}1": 0, f"{prefix}2": 1})
    flow.update_flow()
    return flow


def _loss(output: Tensor, _: Any = None) -> Tensor:
    return output.square().mean()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _around() -> tuple[DataFlow, nn.Module]:
    flow = _placed(_net())
    return flow, DistributedDataParallel(flow)


def _inside() -> tuple[DataFlow, nn.Module]:
    wrapped = DistributedDataParallel(_net())
    return _placed(wrapped, "module."), wrapped


def _beside() -> tuple[DataFlow, nn.Module]:
    model = _net()
    wrapped = DistributedDataParallel(model)
    return _placed(model), wrapped


def _in_part() -> tuple[DataFlow, nn.Module]:
    model = _net()
    model[2] = DistributedDataParallel(model[2])
    return _placed(model), model


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap", [_around, _inside, _beside, _in_part])
def test_a_step_of_what_it_wraps_is_refused_with_the_way_out(
    wrap: Callable[[], tuple[DataFlow, nn.Module]],
) -> None:
    flow, _kept = wrap()
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"its own gradients.*loss_fn\(ddp\(inputs\), target\).backward\(\)"
        ):
            flow.train_step(_loss)


@pytest.mark.usefixtures("alone")
def test_a_step_that_was_made_before_is_refused_too() -> None:
    flow = _placed(_net())
    step = flow.train_step(_loss)
    step(X, chunks=2)
    _kept = DistributedDataParallel(flow)
    before = [
        parameter.grad.clone() for parameter in flow.parameters() if parameter.grad is not None
    ]
    for _ in range(2):
        with pytest.raises(
            InputError, match="DistributedDataParallel holds parameters of this flow"
        ):
            step(X, chunks=2)
    after = [parameter.grad for parameter in flow.parameters() if parameter.grad is not None]
    assert len(before) == len(after) == 4
    assert all(map(torch.equal, before, after))


@pytest.mark.usefixtures("alone")
def test_a_step_runs_where_it_wraps_another_model_or_a_graph_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every, looked = gc.get_objects, []

    def get_objects() -> list[Any]:
        looked.append(None)
        return every()

    monkeypatch.setattr(ddp_check.gc, "get_objects", get_objects)
    _other = DistributedDataParallel(_net())
    flow, whole = _placed(_net()), _net()
    held = flow(X).sum()  # its graph has the accumulators of the parameters
    step = flow.train_step(_loss)
    for _ in range(3):
        loss = step(X, chunks=2)
    torch.testing.assert_close(loss, _loss(whole(X)).detach())
    assert held.requires_grad and len(looked) == 1
    del held
    step(X, chunks=2)
    assert len(looked) == 1
