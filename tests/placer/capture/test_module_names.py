"""Modules with two names, which torch.export traces through stand-ins with other identities."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import placer
from placer import devices
from placer.capture import capture_graph
from placer.capture.export.export import export

DEVICES = ["cpu:0", "cpu:1"]
WAYS: dict[str, Callable[[nn.ModuleList], Iterable[nn.Module]]] = {
    "prefix": lambda layers: layers[:4],
    "step": lambda layers: layers[::2],
    "suffix": lambda layers: layers[-2:],
    "reversed by a slice": lambda layers: layers[::-1],
    "reversed": lambda layers: reversed(layers),
    "nested": lambda layers: layers[1:][:2],
    "slice of a copy": lambda layers: nn.ModuleList(layers)[1:3],
    "list": lambda layers: list(layers)[:2],
    "zip": lambda layers: (layer for layer, _ in zip(layers, range(3), strict=False)),
    "index": lambda layers: [layers[-1], layers[0]],
}


class Decoder(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in WAYS[self.way](self.layers):
            x = layer(x)
        return x


class Wrapper(nn.Module):
    """A wrapper like PEFT's prompt tuning: the inner model's embedding has a second name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.decoder = Decoder(way)
        self.words = self.decoder.embed

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids)


@pytest.mark.parametrize("way", WAYS)
def test_layers_taken_from_a_list_have_their_own_names_beside_a_module_with_two(way: str) -> None:
    model = Wrapper(way)
    used = [
        f"decoder.layers.{list(model.decoder.layers).index(layer)}"
        for layer in WAYS[way](model.decoder.layers)
    ]
    layers = capture_graph(model, (torch.randint(10, (2, 3)),), granularity=3, hooks=False).layers
    assert [layer.name for layer in layers if "layers" in layer.name] == used


@pytest.mark.parametrize("way", ["prefix", "step", "reversed by a slice", "nested"])
def test_a_map_holds_for_sliced_layers_beside_a_module_with_two_names(way: str) -> None:
    model, ids = Wrapper(way).eval(), torch.randint(10, (2, 3))
    want = model(ids)
    names = {"decoder.embed": 0, **{f"decoder.layers.{index}": index // 2 for index in range(4)}}
    with placer.testing.logical_devices(2):
        flow = placer.DataFlow(model, device_ids=DEVICES)
        flow.layer_gpus.clear()
        flow.layer_gpus.update(names)
        flow.update_flow()
        got = flow(ids)
        assert flow.not_captured_because == ""
        assert str(devices.location(model.decoder.layers[3][0].weight)) == "cpu:1"
        assert str(devices.location(model.decoder.layers[0][0].weight)) == "cpu:0"
        torch.testing.assert_close(got.to("cpu"), want)


def test_a_placement_of_such_a_model_is_accepted_by_its_flow() -> None:
    model, ids = Wrapper("prefix").eval(), torch.randint(10, (2, 3))
    placement = placer.suggest(
        model,
        ids,
        devices=DEVICES,
        training=False,
        progress=False,
        constraints=placer.Constraints(min_devices=2),
    )
    want = model(ids)
    with placer.testing.logical_devices(2):
        flow = placer.DataFlow(model, device_ids=DEVICES)
        flow.update_flow(placement)
        torch.testing.assert_close(flow(ids).to("cpu"), want)


class _Sliced(nn.Module):
    """A model that calls a slice of a Sequential, which is a new module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.alias = self.body[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.body[1:](self.alias(x))


def test_the_layers_of_a_sliced_sequential_keep_their_names() -> None:
    layers = capture_graph(_Sliced(), (torch.randn(2, 4),), granularity="fine", hooks=False).layers
    assert [layer.name for layer in layers] == ["body.0", "body.1", "body.2"]


class _Settings:
    def __init__(self) -> None:
        self.scale = 1.0


class _Scaled(nn.Module):
    """A model that reads attributes of a module with two names, of its child, and of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(_Factor(), nn.Identity())
        self.alias = self.inner
        self.settings = _Settings()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.first(x)) * self.scale * self.settings.scale


class _Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("what", ["scale", "settings.scale", "inner.0.factor"])
def test_an_attribute_that_changes_is_followed_beside_a_module_with_two_names(what: str) -> None:
    model, x = _Scaled(), torch.randn(3, 4)
    path, _, name = f".{what}".rpartition(".")
    holder = model.settings if path == ".settings" else model.get_submodule(path.lstrip("."))
    with placer.testing.logical_devices(2):
        flow = placer.DataFlow(model, device_ids=DEVICES)
        flow.layer_gpus.update(first=0, inner=1)
        flow.update_flow()
        step = flow.train_step(lambda y, _: y.abs().mean())
        before, trained = flow(x), step(x, chunks=1)
        setattr(holder, name, 3.0)
        torch.testing.assert_close(flow(x), 3 * before)
        torch.testing.assert_close(step(x, chunks=1), 3 * trained)
        assert flow.not_captured_because == ""


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.alias = self.block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_a_checkpoint_of_a_module_with_two_names_is_seen() -> None:
    assert export(_Checkpointed(), (torch.randn(2, 4),), {}).checkpoints == ("block",)
