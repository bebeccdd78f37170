"""What must hold of a model of two layers of any kind of weight when it is placed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from weight_kinds import Kind, batch_of, model_of

from placer import DataFlow, devices
from placer.testing import logical_devices

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def unsplit(kind: Kind) -> Tensor:
    """What the unsplit model returns."""
    with torch.no_grad():
        found: Tensor = model_of(kind)(batch_of(kind))
    return found


@contextmanager
def placed(kind: Kind, **options: Any) -> Iterator[tuple[DataFlow, nn.Sequential]]:
    """The model on two stand-ins, a layer on each."""
    model = model_of(kind)
    with logical_devices(2):
        flow = DataFlow(model, **options)
        flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
        flow.update_flow()
        yield flow, model


def assert_moves_and_comes_back(kind: Kind) -> None:
    """All that layers store follows them from device to device, and is at last what and where it
    was."""
    model, x, expected = model_of(kind), batch_of(kind), unsplit(kind)
    parameters = [*model.parameters()]
    layers: list[Any] = [model[0], model[2]]
    before = [[tensor.detach().clone() for tensor in kind.stored(layer)] for layer in layers]
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        for first in (1, 0):
            memory = [{tensor.data_ptr() for tensor in kind.stored(layer)} for layer in layers]
            flow.layer_gpus.update({"0": first, "1": first, "2": 1 - first})
            flow.update_flow()
            for layer, place, old in zip(layers, (first, 1 - first), memory, strict=True):
                assert old.isdisjoint(tensor.data_ptr() for tensor in kind.stored(layer))
                assert_on(kind.stored(layer), torch.device("cpu", place))
            torch.testing.assert_close(flow(x).cpu(), expected, atol=0, rtol=0)
            assert (flow.not_captured_because == "") == kind.captured, flow.not_captured_because
            for layer, place in zip(layers, (first, 1 - first), strict=True):
                assert_on(kind.stored(layer), torch.device("cpu", place))
        flow.undo()
        for layer in layers:
            assert_on(kind.stored(layer), torch.device("cpu"))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    for layer, values in zip(layers, before, strict=True):
        for tensor, value in zip(kind.stored(layer), values, strict=True):
            assert torch.equal(tensor, value)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def assert_on(tensors: list[Tensor], place: torch.device) -> None:
    """Every tensor is there."""
    assert [devices.location(tensor) for tensor in tensors] == [place] * len(tensors)


def assert_runs_as_unsplit(kind: Kind) -> None:
    """Calls, micro-batches, streams and the applied model give what the unsplit model gives."""
    x, expected = batch_of(kind), unsplit(kind)
    with placed(kind) as (flow, model), torch.no_grad():
        found = [flow(x), flow(x, chunks=3), *flow.stream([x, x]), copy.copy(flow)(x)]
        with flow.applied():
            found += [model(x), model.forward(x)]
        for result in found:
            torch.testing.assert_close(result.cpu(), expected, **CLOSE)


class Adapted(nn.Module):
    """A layer with a frozen weight and a low-rank adapter that is trained."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapted(kind: Kind) -> nn.Sequential:
    """The model in training mode, each layer with an adapter."""
    layers = model_of(kind)
    return nn.Sequential(
        Adapted(layers[0], kind.width), nn.Tanh(), Adapted(layers[2], kind.width)
    ).train()


def assert_adapters_train_as_unsplit(kind: Kind, schedule: Any, chunks: int = 2) -> str:
    """Steps give the losses and gradients of the unsplit model; says why the model was not
    captured."""
    x = batch_of(kind)
    model, reference = adapted(kind), adapted(kind)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
        flow.update_flow()
        train = flow.train_step(nn.functional.mse_loss, schedule=schedule)
        for _ in range(2):
            loss = train(x, x, chunks=chunks)
        why = flow.not_captured_because
    expected = nn.functional.mse_loss(reference(x), x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach().to(loss.dtype), **CLOSE)
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        if its.grad is not None:
            torch.testing.assert_close(mine.grad, its.grad, **CLOSE, msg=name)
    return why
