"""Weight gradients in two concurrent parts: any order gives the same sums, each added once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.weight_grads.deferred import (
    DeferredGradient,
    DeferWeightGradients,
    GradientQueue,
)

linear: Callable[..., Tensor] = torch.ops.aten.linear.default
conv1d: Callable[..., Tensor] = torch.ops.aten.conv1d.default


class Line(nn.Linear):
    """A linear layer as in a captured graph."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Map(nn.Conv1d):
    """A convolution as in a captured graph."""

    def forward(self, x: Tensor) -> Tensor:
        return conv1d(x, self.weight, self.bias, [1], [1])


class Reused(nn.Module):
    """Linear layers and convolutions: one of each is used twice, and two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(Line(8, 8) for _ in range(4))
        self.tied = Line(8, 8, bias=False)
        self.tied.weight = self.lines[0].weight
        self.maps = nn.ModuleList(Map(2, 2, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for line in [*self.lines, self.lines[1], self.tied]:
            x = line(x).tanh()
        x = x.reshape(-1, 2, 4)
        for layer in [*self.maps, self.maps[0]]:
            x = layer(x).tanh()
        return x


def left_by(model: nn.Module, x: Tensor) -> GradientQueue:
    """Return what a model's backward pass defers, with gradients allocated."""
    queue = GradientQueue()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with DeferWeightGradients(queue):
        result = model(x)
    result.square().sum().backward()
    return queue


def test_parts_have_all_and_share_no_gradient() -> None:
    torch.manual_seed(0)
    queue = left_by(Reused(), torch.randn(6, 8))
    parts = queue.branches()
    assert len(parts) == 2
    assert sorted(map(id, (one for part in parts for one in part))) == sorted(map(id, queue))
    one, other = (
        {weight.grad.data_ptr() for each in part for weight in each.weights} for part in parts
    )
    assert not one & other


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_the_unsplit_models_in_whichever_order_parts_run(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Reused().double(), torch.randn(6, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    queue = left_by(model, x)
    random, parts = Random(seed), [list(part) for part in queue.branches()]
    while any(parts):
        random.choice([part for part in parts if part]).pop(0).run(queue)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_parts_have_about_as_much_to_do() -> None:
    widths = [4, 64, 4, 64, 4, 4, 64, 64]
    model = nn.Sequential(*(nn.Sequential(Line(8, width), Line(width, 8)) for width in widths))
    one, other = (
        sum(each.products for each in part) for part in left_by(model, torch.randn(3, 8)).branches()
    )
    assert one + other == 2 * 3 * 8 * sum(widths)
    assert abs(one - other) <= 3 * 8 * 64


def test_a_weight_and_a_bias_that_others_have_keep_all_in_one_part() -> None:
    first, second, both = Line(4, 4), Line(4, 4), Line(4, 4)
    both.weight, both.bias = first.weight, second.bias
    queue = left_by(nn.Sequential(both, second, first), torch.randn(2, 4))
    assert [len(part) for part in queue.branches()] == [3]


def test_side_by_side_runs_all_in_order_where_nothing_is_recorded() -> None:
    ran: list[int] = []
    devices.side_by_side([partial(ran.append, number) for number in range(2)], torch.device("cpu"))
    devices.side_by_side([], torch.device("cpu"))
    assert ran == [0, 1]


@pytest.mark.gpu
def test_recorded_branches_add_the_gradients_of_the_unsplit_model() -> None:
    torch.manual_seed(0)
    place = torch.device("cuda", 0)
    model = nn.Sequential(*(Line(512, 512) for _ in range(8))).to(place, torch.float64)
    x = torch.randn(256, 512, device=place, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    queue = left_by(model, x)

    def add(part: list[DeferredGradient]) -> None:
        for addition in part:
            addition.run(queue)

    works = [partial(add, part) for part in queue.branches()]
    (replay,) = devices.record([partial(devices.side_by_side, works, place)], place)
    torch._foreach_zero_([parameter.grad for parameter in model.parameters()])
    for _ in range(3):
        replay()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * gradient, rtol=1e-9, atol=1e-9)
