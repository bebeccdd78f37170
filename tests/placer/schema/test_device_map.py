"""``Placement.device_map``: the answer in the form that accelerate and transformers take."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from model_list import CASES, transformers
from torch import Tensor, nn

import placer
from placer import Constraints, Placement, capture_graph
from placer.capture import LayerGraph
from placer.errors import MixedDevicesError, PlacementError
from placer.testing import logical_devices


def _placed(**layers: str) -> Placement:
    return Placement(status="feasible", objective="throughput", layer_devices=layers)


def test_gpus_are_indices_and_the_host_is_cpu() -> None:
    placement = _placed(embed="cuda:1", body="cuda:0", head="cpu:3")
    assert placement.device_map() == {"embed": 1, "body": 0, "head": "cpu"}
    assert _placed(embed="cuda", head="cuda:left").device_map() == {"embed": 0, "head": "cuda:left"}


def test_merged_layers_are_their_modules_and_a_later_call_follows_the_first() -> None:
    placement = _placed(**{"a+b.c": "cuda:1", "relu": "cuda:1", "relu@1": "cuda:0"})
    assert placement.device_map() == {"a": 1, "b.c": 1, "relu": 1}


def test_a_model_that_calls_no_module_is_one() -> None:
    assert _placed(**{"(model)": "cuda:2"}).device_map() == {"": 2}


def test_devices_of_one_host_go_by_their_own_names() -> None:
    assert _placed(a="node/cuda:0", b="node/cuda:1").device_map() == {"a": 0, "b": 1}


def test_what_has_no_device_map_is_told() -> None:
    with pytest.raises(PlacementError, match="several hosts, left, right"):
        _placed(a="left/cuda:0", b="right/cuda:0").device_map()
    with pytest.raises(PlacementError, match="it places no layer"):
        Placement(status="infeasible", objective="memory").device_map()


@pytest.mark.parametrize("model", ["resnet18", nn.Linear, 3])
def test_a_map_of_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(
        PlacementError,
        match=r"device_map was given .*; give the nn.Module that was placed, or nothing",
    ):
        _placed(a="cuda:0").device_map(model)


def _halves(graph: LayerGraph) -> Placement:
    """Place the first half of the layers on one device, the rest on another; keep colocation."""
    count = len(graph.layers)
    where = {layer.name: f"cuda:{2 * index // count}" for index, layer in enumerate(graph.layers)}
    for group in graph.colocated:
        where |= dict.fromkeys(group, where[group[0]])
    return _placed(**where)


LANGUAGE_MODELS = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
    "BertForMaskedLM",
]
QUICK = [
    ("LlamaForCausalLM", "auto"), ("T5ForConditionalGeneration", "blocks"), ("resnet18", "fine"),
]  # fmt: skip
REST = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        pytest.param(name, granularity, marks=[] if (name, granularity) in QUICK else [REST])
        for name in (*LANGUAGE_MODELS, "resnet18")
        for granularity in ("auto", "fine", "blocks")
    ],
)
def test_every_parameter_lies_in_a_module_of_the_map_as_accelerate_wants_it(
    name: str, granularity: str
) -> None:
    model = CASES[name].make()
    args, kwargs = CASES[name].inputs(False)
    graph = capture_graph(model.eval(), args, kwargs, granularity=granularity)
    try:
        found = _halves(graph).device_map(model)
    except PlacementError:
        assert hasattr(model, "_no_split_modules")
        return
    for key in model.state_dict():
        assert any(key.startswith(f"{path}.") for path in found), key


class _Own(nn.Module):
    """A parameter of its own, and a weight under two names, one of which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shared = nn.Linear(3, 3)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.shared.weight


def test_what_no_layer_names_goes_where_its_tensor_is_or_to_the_first_device() -> None:
    found = _placed(first="cuda:1", last="cuda:0").device_map(_Own())
    assert found == {"first": 1, "last": 0, "scale": 1, "shared": 0}


def test_modules_are_named_as_large_as_their_parts_allow() -> None:
    """What is added inside a block has to be brought to the block's device, as accelerate moves
    nothing in between."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
    )
    placement = _placed(
        **{"0.0": "cuda:0", "0.1": "cuda:0", "1.0": "cuda:0", "1.1": "cuda:1", "1.2": "cuda:1"}
    )
    assert placement.device_map(model) == {"0": 0, "1.0": 0, "1.1": 1, "1.2": 1}
    together = _placed(**dict.fromkeys(placement.layer_devices, "cuda:3"))
    assert together.device_map(model) == {"": 3}


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_accelerate_runs_whole_blocks_on_several_devices(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = CASES[name].make().eval()
    args, kwargs = CASES[name].inputs(False)
    with torch.no_grad():
        expected = model(*args, **kwargs)[0]
    found = _halves(capture_graph(model, args, kwargs, granularity="blocks")).device_map(model)
    assert set(found.values()) == {0, 1}
    with logical_devices(2), torch.no_grad():
        dispatched = accelerate.dispatch_model(
            copy.deepcopy(model), {path: f"cpu:{place}" for path, place in found.items()}
        )
        torch.testing.assert_close(dispatched(*args, **kwargs)[0].cpu(), expected)


@cache
def _fine_layers() -> list[str]:
    """Return the names of the layers of every ``_llama()``."""
    kwargs = {"input_ids": torch.randint(3, 50, (2, 7))}
    return [layer.name for layer in capture_graph(_llama(), (), kwargs, granularity="fine").layers]


def _cut_in_a_block() -> Placement:
    names = _fine_layers()
    cut = next(index for index, name in enumerate(names) if name.startswith("model.layers.1.mlp"))
    return _placed(**{name: f"cuda:{int(index >= cut)}" for index, name in enumerate(names)})


def _llama(**options: Any) -> nn.Module:
    library = transformers()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = library.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes, **options)
    model: nn.Module = library.LlamaForCausalLM(config).eval()
    return model


def test_a_map_that_cuts_inside_a_block_is_refused_as_accelerate_fails_on_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = _llama()
    placement = _cut_in_a_block()
    refused = (
        r"cuts inside 'model.layers.1', a LlamaDecoderLayer, .* "
        r"\('model.layers.1.mlp.gate_proj' on cuda:1, "
        r"'model.layers.1.input_layernorm' on cuda:0\): "
        r"place whole blocks with granularity=\"blocks\""
    )
    with pytest.raises(PlacementError, match=refused):
        placement.device_map(model)
    with logical_devices(2), torch.no_grad(), pytest.raises(MixedDevicesError):
        places = {path: f"cpu:{place}" for path, place in placement.device_map().items()}
        accelerate.dispatch_model(copy.deepcopy(model), places)(torch.randint(3, 50, (2, 7)))


def test_stand_ins_of_the_cpu_are_devices_of_their_own_until_the_map_is_made() -> None:
    model = _llama()
    gpus = _cut_in_a_block().layer_devices
    with pytest.raises(PlacementError, match=r"cuts inside 'model.layers.1'"):
        _placed(
            **{name: device.replace("cuda", "cpu") for name, device in gpus.items()}
        ).device_map(model)


class _Wrapper(nn.Module):
    """A model around another one, which hands on what it does not have, as wrappers of PEFT do."""

    def __init__(self, base: nn.Module, hands_on: bool) -> None:
        super().__init__()
        self.base_model = base
        self.hands_on = hands_on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model" or not self.hands_on:
                raise
            return getattr(self.base_model, name)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("hands_on", [False, True])
def test_blocks_of_a_model_in_a_wrapper_stay_whole(hands_on: bool) -> None:
    model = _Wrapper(_llama(), hands_on)
    where = {
        f"base_model.{name}": device for name, device in _cut_in_a_block().layer_devices.items()
    }
    with pytest.raises(PlacementError, match=r"cuts inside 'base_model.model.layers.1'"):
        _placed(**where).device_map(model)


@pytest.mark.exhaustive
def test_blocks_of_all_models_that_a_model_is_made_of_stay_whole() -> None:
    """A vision-language model: its parts name classes of their own."""
    library = transformers()
    vision = library.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )
    language = _llama().config
    language.vocab_size = 60
    model = library.LlavaForConditionalGeneration(
        library.LlavaConfig(
            vision_config=vision,
            text_config=language,
            image_token_index=59,
            vision_feature_layer=-1,
        )
    ).eval()
    tokens = torch.randint(3, 50, (2, 8))
    tokens[:, 1:5] = 59
    kwargs = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 28, 28)}
    graph = capture_graph(model, (), kwargs, granularity="blocks")
    names = [layer.name for layer in graph.layers]
    assert {"model.vision_tower.encoder.layers.1", "model.language_model.layers.2"} <= set(names)
    assert set(_halves(graph).device_map(model).values()) == {0, 1}
    inside = dict.fromkeys(names, "cuda:0") | {
        "model.vision_tower.encoder.layers.1.mlp.fc2": "cuda:1"
    }
    with pytest.raises(
        PlacementError,
        match=r"cuts inside 'model.vision_tower.encoder.layers.1', a CLIPEncoderLayer",
    ):
        _placed(**inside).device_map(model)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))  # type: ignore[no-any-return]


def test_a_tied_parameter_on_two_devices_is_refused_as_accelerate_keeps_it_on_one() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = _Tied().eval()
    apart = _placed(embed="cuda:0", body="cuda:0", head="cuda:1")
    with pytest.raises(
        PlacementError,
        match=r"'embed.weight' and 'head.weight' are one parameter, .* without split_tied",
    ):
        apart.device_map(model)
    assert _placed(embed="cuda:0", body="cuda:1", head="cuda:0").device_map(model) == {
        "embed": 0,
        "body": 1,
        "head": 0,
    }
    with logical_devices(2), torch.no_grad(), pytest.raises(MixedDevicesError):
        places = {path: f"cpu:{place}" for path, place in apart.device_map().items()}
        accelerate.dispatch_model(copy.deepcopy(model), places)(torch.tensor([[1, 2]]))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("training", [False, True])
def test_a_tied_language_model_is_placed_as_a_chain_of_whole_blocks_with_a_valid_map(
    training: bool,
) -> None:
    model = _llama(tie_word_embeddings=True).train(training)
    placement = placer.suggest(
        model,
        {"input_ids": torch.randint(3, 50, (2, 7))},
        devices=["cpu:0", "cpu:1"],
        training=training,
        granularity="blocks",
        progress=False,
        cache=False,
        constraints=Constraints(min_devices=2),
    )
    assert placement.status == "optimal"
    assert placement.layer_devices["model.embed_tokens"] == placement.layer_devices["lm_head"]
    found = placement.device_map(model)
    assert set(found.values()) == {"cpu"} and "lm_head" in found
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        assert any(name.startswith(f"{path}.") for path in found), name
