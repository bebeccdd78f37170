"""Models that were split by hand, whose code names devices: the map's take their place, and they
are pipelined."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.testing import logical_devices

Forward = Callable[["SplitByHand", Tensor], Tensor]


class SplitByHand(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self._forward = forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self._forward(self, inputs)


def by_name(model: SplitByHand, x: Tensor) -> Tensor:
    return model.second(model.first(x.to("cuda:0")).to("cuda:1"))


def by_keyword(model: SplitByHand, x: Tensor) -> Tensor:
    hidden = model.first(x.to(device="cuda:0", dtype=torch.float32))
    return model.second(hidden.to(device=torch.device("cuda", 1), non_blocking=True)) + torch.ones(
        4, device="cuda:1"
    )


def by_method(model: SplitByHand, x: Tensor) -> Tensor:
    hidden = model.first(x.cuda(0)).cuda(1)
    return model.second(hidden) + hidden.new_ones(4, device="cuda")


def by_stand_in(model: SplitByHand, x: Tensor) -> Tensor:
    return model.second(model.first(x.to("cpu:0")).to("cpu:1"))


def by_the_parameters(model: SplitByHand, x: Tensor) -> Tensor:
    hidden = model.first(x.to(model.first.weight.device))
    return model.second(hidden.to(model.second.weight.device, torch.float32))


def check(forward: Forward, kind: str) -> None:
    """A call and two steps on a map that swaps the two devices, against the layers without any
    device."""
    torch.manual_seed(0)
    model = SplitByHand(forward)
    whole = copy.deepcopy(model)
    shift = 1.0 if forward in (by_keyword, by_method) else 0.0

    def expected(x: Tensor) -> Tensor:
        return whole.second(whole.first(x)) + shift

    flow = DataFlow(model, device_ids=[f"{kind}:0", f"{kind}:1"])
    flow.layer_gpus.update(first=1, second=0)
    flow.update_flow()
    inputs, target = torch.randn(8, 8), torch.randint(4, (8,))
    torch.testing.assert_close(flow(inputs).cpu(), expected(inputs))
    assert not flow.not_captured_because
    step = flow.train_step(functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    plain = torch.optim.SGD(whole.parameters(), 0.1)
    for _ in range(2):
        step(inputs, target, chunks=4)
        plain.zero_grad()
        functional.cross_entropy(expected(inputs), target).backward()
        plain.step()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    "forward", [by_name, by_keyword, by_method, by_stand_in, by_the_parameters]
)
def test_the_maps_devices_take_the_place_of_those_in_the_code(forward: Forward) -> None:
    with logical_devices(2):
        check(forward, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("forward", [by_name, by_keyword, by_method, by_the_parameters])
def test_the_maps_devices_take_the_place_of_those_in_the_code_on_gpus(forward: Forward) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    check(forward, "cuda")
