from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from model_list import torchvision_models
from small_models import Skips, Tagger
from torch import Tensor, nn

import placer
from placer.capture import LayerGraph, capture_graph
from placer.capture.capture import layer_graph
from placer.capture.export.export import Exported, export
from placer.errors import InputError
from placer.zoo import gpt, resnet50, unet
from placer.zoo.resnet import Bottleneck, ResNet

IMAGE = torch.randn(2, 3, 64, 64)


@functools.cache
def _exported(model: nn.Module, example: Any) -> Exported:
    """Export a model once, because the export does not depend on the granularity."""
    return export(model, (example,), {})


def _names(model: nn.Module, example: Any, granularity: Any) -> list[str]:
    return [
        layer.name for layer in layer_graph(_exported(model, example), model, granularity).layers
    ]


_resnet50 = functools.cache(resnet50)


@functools.cache
def _small_resnet() -> nn.Module:
    return ResNet(Bottleneck, [2, 3, 2, 2], 10)


@functools.cache
def _small_gpt() -> nn.Module:
    return gpt(layers=3, width=16, heads=2, context=8, vocabulary=20)


@functools.cache
def _small_unet() -> nn.Module:
    return unet(width=2)


TOKENS, SMALL_IMAGE = torch.randint(0, 20, (2, 8)), torch.randn(2, 3, 16, 16)


@pytest.mark.exhaustive
def test_auto_cuts_a_gpt_of_48_blocks_into_about_50_layers() -> None:
    model = gpt(layers=48, width=32, heads=2, context=8, vocabulary=50)
    names = _names(model, torch.randint(0, 50, (2, 8)), "auto")
    assert 48 <= len(names) <= 56
    assert [name for name in names if name.startswith("blocks.")] == [
        f"blocks.{index}" for index in range(48)
    ]


def test_blocks_are_whole_however_large_each_is() -> None:
    model = gpt(layers=2, width=32, heads=2, context=8, vocabulary=10)
    assert "blocks.0" not in _names(model, torch.randint(0, 10, (2, 8)), "auto")
    names = _names(model, torch.randint(0, 10, (2, 8)), "blocks")
    assert [name for name in names if name.startswith("blocks.")] == ["blocks.0", "blocks.1"]


def test_blocks_of_a_resnet_are_those_that_its_stages_repeat() -> None:
    names = _names(_small_resnet(), IMAGE, "blocks")
    stages = [name for name in names if name.startswith("layer")]
    assert stages == [
        f"layer{stage}.{block}"
        for stage, many in enumerate([2, 3, 2, 2], 1)
        for block in range(many)
    ]


class _Marked(nn.Module):
    """A block whose class is named, with a list of parts that repeats another class inside."""

    _no_split_modules = ("_Half",)

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(_Half() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for half in self.halves:
            x = half(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


@pytest.mark.parametrize("hooks", [False, True])
def test_blocks_that_a_model_names_are_layers_on_the_hook_path_too(hooks: bool) -> None:
    model = _Marked().eval()
    if hooks:
        model.register_forward_hook(lambda *_: None)
    graph = capture_graph(model, torch.randn(2, 4), granularity="blocks")
    assert graph.captured != hooks and graph.granularity == "blocks"
    assert [layer.name for layer in graph.layers] == ["halves.0", "halves.1", "halves.2", "head"]


def test_a_model_without_blocks_is_cut_as_auto_cuts_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert _names(model, torch.randn(2, 4), "blocks") == _names(model, torch.randn(2, 4), "auto")


def test_a_remembered_capture_is_of_the_blocks_that_the_model_names_now() -> None:
    x, sizes = torch.randn(2, 4), []
    for named in (("_Half",), ()):
        model = _Marked().eval()
        model._no_split_modules = named
        found = placer.profile(
            model, x, devices=["cpu:0"], training=False, granularity="blocks", progress=False
        )
        sizes.append([layer.name for layer in found.layers])
    assert sizes[0] == ["halves.0", "halves.1", "halves.2", "head"]
    assert sizes[1] == sizes[0]  # those that the list repeats
    model._no_split_modules = ("Linear",)
    found = placer.profile(
        model, x, devices=["cpu:0"], training=False, granularity="blocks", progress=False
    )
    assert "halves.0" not in [layer.name for layer in found.layers]


@pytest.mark.exhaustive
def test_auto_cuts_resnet50_into_about_20_layers() -> None:
    names = _names(_resnet50(), IMAGE, "auto")
    assert 16 <= len(names) <= 24


@pytest.mark.exhaustive
def test_auto_cuts_inception_v3_into_about_20_layers() -> None:
    model = torchvision_models().inception_v3(weights=None, init_weights=False).eval()
    names = _names(model, torch.randn(2, 3, 96, 96), "auto")
    assert 16 <= len(names) <= 26


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("layers", [3, 6])
def test_auto_opens_repeated_blocks_alike(layers: int) -> None:
    model = (
        _small_gpt()
        if layers == 3
        else gpt(layers=layers, width=16, heads=2, context=8, vocabulary=20)
    )
    names = _names(model, TOKENS, "auto")
    blocks = [f"blocks.{index}" for index in range(layers)]
    inside = [
        {name.removeprefix(block) for name in names if name.startswith(block)} for block in blocks
    ]
    assert all(names == inside[0] for names in inside)


def test_submodule_gives_the_named_children() -> None:
    names = _names(_small_resnet(), IMAGE, "submodule")
    assert {name.partition("@")[0] for name in names} <= {
        name for name, _ in _small_resnet().named_children()
    }


def test_fine_gives_every_leaf_that_runs() -> None:
    model = _small_unet()
    leaves = {name for name, module in model.named_modules() if not list(module.children())}
    assert {name.partition("@")[0] for name in _names(model, SMALL_IMAGE, "fine")} <= leaves


def test_a_depth_cuts_every_name_at_so_many_steps() -> None:
    model = _small_gpt()
    for depth, longest in ((1, 1), (2, 2), (3, 3), (9, 4)):
        names = _names(model, TOKENS, depth)
        assert max(name.count(".") + 1 for name in names) == longest


def test_a_callable_says_what_is_a_layer() -> None:
    names = _names(_small_gpt(), TOKENS, lambda path, module: type(module).__name__ == "Block")
    assert [name for name in names if name.startswith("blocks")] == [
        f"blocks.{index}" for index in range(3)
    ]


@pytest.mark.parametrize("granularity", ["coarse", 0, -1, True, 1.5, None])
def test_an_unknown_granularity_is_named(granularity: Any) -> None:
    with pytest.raises(InputError, match=str(granularity)):
        capture_graph(nn.Linear(2, 2), torch.randn(2, 2), granularity=granularity)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.b(self.relu(self.a(self.a(x)))))


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (_small_gpt, TOKENS),
    "unet": (_small_unet, SMALL_IMAGE),
    "skips": (functools.cache(Skips), torch.randn(2, 5)),
    "tagger": (functools.cache(Tagger), torch.randint(0, 20, (2, 4))),
    "twice": (functools.cache(_Twice), torch.randn(2, 4)),
}


@pytest.mark.covering
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("granularity", ["auto", "fine", "submodule", 2])
def test_the_names_of_a_placement_give_the_same_layers_again(name: str, granularity: Any) -> None:
    make, example = MODELS[name]
    model = make()
    names = _names(model, example, granularity)
    assert _names(model, example, tuple(names)) == names


def test_a_module_called_twice_is_a_layer_for_each_call_and_they_are_colocated() -> None:
    graph = capture_graph(_Twice(), torch.randn(2, 4), granularity="fine")
    assert [layer.name for layer in graph.layers] == ["a", "a@1", "relu", "b", "relu@1"]
    assert graph.colocated == (("a", "a@1"),)


def test_tied_parameters_are_a_colocation_group() -> None:
    model = gpt(layers=2, width=16, heads=2, context=8, vocabulary=20, tied=True)
    graph = capture_graph(model, TOKENS)
    assert [set(group) for group in graph.colocated] == [{"token_embedding", "head"}]


@functools.cache
def _graph(**changes: Any) -> LayerGraph:
    sizes = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocabulary": 20} | changes
    return capture_graph(
        gpt(**sizes), TOKENS, granularity=lambda path, module: type(module).__name__ == "Block"
    )


def test_identical_blocks_have_equal_signatures_and_others_have_not() -> None:
    graph = _graph()
    blocks = {graph[f"blocks.{index}"].signature for index in range(1, 3)}
    assert len(blocks) == 1
    assert len({layer.signature for layer in graph.layers}) > 1


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("changes", [{"width": 32}, {"heads": 4}, {"dropout": 0.1}])
def test_another_size_or_operation_is_another_signature(changes: dict[str, Any]) -> None:
    assert _graph()["blocks.2"].signature != _graph(**changes)["blocks.2"].signature


def test_another_dtype_or_a_frozen_parameter_is_another_signature() -> None:
    linear = nn.Sequential(nn.Linear(4, 4))
    signatures = {capture_graph(linear, torch.randn(2, 4))["0"].signature}
    signatures.add(capture_graph(linear.requires_grad_(False), torch.randn(2, 4))["0"].signature)
    signatures.add(capture_graph(linear.double(), torch.randn(2, 4).double())["0"].signature)
    assert len(signatures) == 3
