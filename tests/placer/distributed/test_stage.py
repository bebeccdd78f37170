from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from placer.capture.capture import capture_graph
from placer.distributed.output_reach import Flows
from placer.distributed.stage import StageModule, weight_pass
from placer.distributed.stage_line import line
from placer.distributed.state.partial_modules import Names, plant, slot

CPU = torch.device("cpu")


def stages(
    model: nn.Module,
    example: torch.Tensor,
    places: list[str],
    split: bool = False,
    recomputes: bool = False,
) -> list[StageModule]:
    graph = capture_graph(model, example, granularity="submodule")
    cut = line(graph, places)
    names = Names.from_model(model)
    flows = Flows(
        {name: frozenset() for name, value in graph.values.items() if value.requires_grad}
    )
    return [
        StageModule(
            graph,
            cut,
            index,
            graph.state.__getitem__,
            names,
            CPU,
            flows=flows,
            split=split,
            recomputes=recomputes,
        )
        for index in range(len(cut.stages))
    ]


def test_stages_one_after_another_are_the_model() -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        torch.randn(3, 4),
    )
    value: tuple[torch.Tensor, ...] = (x,)
    for stage in stages(model, x, ["a", "b", "c", "d"])[:-1]:
        value = tuple(tensor.detach().requires_grad_() for tensor in stage(*value))
    torch.testing.assert_close(stages(model, x, ["a", "b", "c", "d"])[-1](*value), model(x))


def test_a_stage_has_its_parameters_under_the_models_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    first, second = stages(model, torch.randn(3, 4), ["a", "b", "b"])
    assert list(first.state_dict()) == ["0.weight", "0.bias"]
    assert set(first.state_dict()) | set(second.state_dict()) == set(model.state_dict())
    assert dict(second.named_parameters())["2.weight"] is model[2].weight


def test_weight_gradients_wait_for_their_own_pass() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    (stage,) = stages(model, x, ["a", "a", "a"], split=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stage(x).sum().backward()
    late = weight_pass(stage)()
    assert not any(
        parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None
    )
    late()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Oddly(nn.Module):
    """Tied tensors, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.other = nn.ModuleDict({"part": nn.Linear(2, 2, bias=False)})
        self.other["part"].weight = self.body.weight
        self.body.register_buffer("passing", torch.zeros(1), persistent=False)
        self.register_buffer("kept", torch.ones(1))


def test_planted_tensors_have_the_models_keys() -> None:
    model, root = Oddly(), nn.Module()
    names = Names.from_model(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plant(root, tensors, names)
    assert set(root.state_dict()) == set(model.state_dict())
    assert root.state_dict()["other.part.weight"].data_ptr() == model.body.weight.data_ptr()
    assert dict(root.named_buffers()).keys() == dict(model.named_buffers()).keys()
    table, key = slot(root, "body.weight")
    assert table[key] is model.body.weight


class Crossed(nn.Module):
    """Two pairs of tied weights, whose second names come in another order than their first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.ModuleDict({"p": nn.Linear(2, 2), "q": nn.Linear(2, 2)}) for _ in range(3)
        )
        self.c["p"].weight = self.a["p"].weight
        self.c["q"].weight = self.b["q"].weight


def test_planted_parameters_go_by_the_first_names_that_the_model_has_for_them() -> None:
    model, root = Crossed(), nn.Module()
    plant(root, dict(reversed(list(model.named_parameters()))), Names.from_model(model))
    assert [name for name, _ in root.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]


class Noisy(nn.Module):
    """Writes to its input in place, draws random numbers, and changes a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.dropout(self.norm(torch.sin(self.linear(x.mul_(1.5)))), 0.5, True)
        self.mean.lerp_(hidden.detach().mean(0), 0.5)
        return torch.sin(hidden * (1 + self.mean))


def test_a_stage_that_recomputes_gives_the_same_gradients_numbers_and_buffers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Noisy(), nn.Linear(4, 2)), torch.randn(3, 4)
    found = []
    for recomputes in (False, True):
        here = copy.deepcopy(model)
        _, stage = stages(here, x, ["a", "b", "b"], recomputes=recomputes)
        leaf = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(2)
        output = stage(leaf)
        kept = output.grad_fn is not None and leaf.grad is None
        output.square().sum().backward()
        gradients = [
            parameter.grad
            for name, parameter in here.named_parameters()
            if not name.startswith("0")
        ]
        found.append([output.detach(), leaf.grad, *gradients, *here.buffers()])
        assert kept
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


@pytest.mark.parametrize(("recomputes", "kept"), [(False, 3), (True, 0)])
def test_a_stage_that_recomputes_keeps_no_activations(recomputes: bool, kept: int) -> None:
    wide = (nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)) for _ in range(3))
    model, x = nn.Sequential(nn.Linear(4, 4), *wide), torch.randn(3, 4)
    _, stage = stages(model, x, ["a", "b", "b", "b"], recomputes=recomputes)
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(x.clone().requires_grad_())
    assert shapes.count((3, 64)) == kept
