"""The modules of each model part of torchtitan.

The tests with torchtitan were run with version 0.3.0 and torch 2.13. It is not among the test
packages, because it needs dozens of others, and Placer reads only one of its settings. So a
splitter of the tests does what its documentation says.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exported import cut, layer_names, placed
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import placer
from placer.errors import InputError, PlacementError
from placer.exports.formats import format_named

TOKENS = torch.arange(8).reshape(2, 4)


class Decoder(nn.Module):
    """A model whose ``forward`` tolerates removed modules, as torchtitan's models do."""

    def __init__(self, layers: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(8, 4)
        self.dropout = nn.Identity()  # no operation, so no layer
        self.layers = layers
        self.norm, self.lm_head = nn.LayerNorm(4), nn.Linear(4, 8)

    def forward(self, values: Tensor) -> Tensor:
        values = self.tok_embeddings(values) if self.tok_embeddings is not None else values
        values = self.dropout(values) if self.dropout is not None else values
        for layer in self.layers.values() if self._by_name() else self.layers:  # type: ignore
            values = values + layer(values)
        values = self.norm(values) if self.norm is not None else values
        return self.lm_head(values) if self.lm_head is not None else values

    def _by_name(self) -> bool:
        return isinstance(self.layers, nn.ModuleDict)


def in_list() -> Decoder:
    return Decoder(nn.ModuleList(blocks()))


def in_dictionary() -> Decoder:
    return Decoder(nn.ModuleDict({str(index): block for index, block in enumerate(blocks())}))


def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]


def without_others(model: nn.Module, names: list[str]) -> nn.Module:
    """Return the part of a model that torchtitan's documentation describes."""
    part = copy.deepcopy(model)
    for child, module in part.named_children():
        if isinstance(module, nn.ModuleList):
            kept = [layer for i, layer in enumerate(module) if f"{child}.{i}" in names]
            setattr(part, child, nn.ModuleList(kept))
        elif isinstance(module, nn.ModuleDict):
            kept_by_name = {key: each for key, each in module.items() if f"{child}.{key}" in names}
            setattr(part, child, nn.ModuleDict(kept_by_name))
        elif child not in names:
            setattr(part, child, None)
    return part


def torchtitans(model: nn.Module, names: list[str]) -> nn.Module:
    module = pytest.importorskip("torchtitan.distributed.pipeline_parallel", exc_type=ImportError)
    part: nn.Module = module._split_module(model, names)
    return part


def read(text: str, layers: list[str], stages: int = 3) -> dict[str, str]:
    return format_named("torchtitan").read(text, layers, [f"cuda:{i}" for i in range(stages)])


@pytest.mark.parametrize("split", [without_others, torchtitans])
@pytest.mark.parametrize("make", [in_list, in_dictionary])
def test_the_parts_of_the_placement_one_after_another_give_the_same_result(
    make: Callable[[], Decoder], split: Callable[[nn.Module, list[str]], nn.Module]
) -> None:
    model = make()
    layers = layer_names(model, TOKENS, granularity="fine")
    placement = cut(layers, "layers.1.0", "norm")
    parts = json.loads(placement.export("torchtitan", model).text)
    assert parts == [
        ["tok_embeddings", "dropout", "layers.0"],
        ["layers.1", "layers.2"],
        ["norm", "lm_head"],
    ]
    values = TOKENS
    for names in parts:
        values = split(model, names)(values)
    assert torch.equal(values, model(TOKENS))


@pytest.mark.integration
def test_the_parts_of_torchtitans_own_llama_give_the_same_result() -> None:
    models = pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    model = models.llama3_configs["debugmodel"](attn_backend="flex").build()
    model.init_states()
    tokens, positions = torch.arange(256).reshape(2, 128), torch.arange(128).expand(2, -1)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    inputs = {"positions": positions, "attention_masks": mask}
    graph = placer.capture_graph(
        model.eval(), (), {"tokens": tokens} | inputs, granularity="blocks"
    )
    placement = cut([layer.name for layer in graph.layers], "layers.2", "layers.5")
    values = tokens
    with torch.no_grad():
        for names in json.loads(placement.export("torchtitan", model).text):
            values = torchtitans(model, names)(values, **inputs)
        assert torch.equal(values, model(tokens, **inputs))


def test_the_elements_of_a_named_dictionary_are_listed() -> None:
    model = Decoder(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
    placement = cut(layer_names(model, TOKENS), "norm")
    assert json.loads(placement.export("torchtitan", model).text) == [
        ["tok_embeddings", "dropout", "layers.a", "layers.b"],
        ["norm", "lm_head"],
    ]


def test_a_cut_inside_an_element_is_refused_with_the_layers_and_the_remedy() -> None:
    with pytest.raises(
        PlacementError,
        match=r"keeps 'layers.0' on one device, .*'layers.0.0' on cuda:0, 'layers.0.1' on cuda:1.*"
        "for_format='torchtitan'",
    ):
        cut(["layers.0.0", "layers.0.1"], "layers.0.1").export("torchtitan")


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Wrapper(), "'model' of the model is neither a ModuleList nor a ModuleDict"),
        (nn.Linear(2, 2), "layers of 'model.0', which is not a child of the model"),
        (nn.Linear, "give the nn.Module that was placed"),
        (3, "give the nn.Module that was placed"),
    ],
)
def test_a_model_that_torchtitan_cannot_take_apart_so_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        cut(["model.0", "model.1"], "model.1").export("torchtitan", model)


def test_a_model_that_calls_no_modules_has_no_parts() -> None:
    with pytest.raises(PlacementError, match="this model calls no modules"):
        placed({"(model)": "cuda:0"}).export("torchtitan")


def test_merged_layers_name_all_of_their_modules() -> None:
    layers = ["embed", "layers.0+layers.1.a", "layers.1.b", "head"]
    placement = cut(layers, "layers.0+layers.1.a", "head")
    text = placement.export("torchtitan").text
    assert json.loads(text) == [["embed"], ["layers.0", "layers.1"], ["head"]]
    assert read(text, layers) == placement.layer_devices


def test_the_settings_of_a_training_step_are_stated() -> None:
    export = cut(["a", "b"], "b", training=True, chunks=4, batch_size=2).export("torchtitan")
    assert export.notes == (
        "Set pipeline_parallel_degree to 2.",
        "Set pipeline_parallel_microbatch_size to 2, local_batch_size to 8, and "
        "pipeline_parallel_schedule to '1F1B', for which the memory was computed.",
    )


LAYERS = ["tok_embeddings", "layers.0.a", "layers.0.b", "layers.1", "norm", "lm_head"]


@pytest.mark.parametrize(
    "text",
    [
        '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]',
        "[['tok_embeddings', 'layers.0'], ['layers.1', 'norm', 'lm_head', 'unused']]",
        "module_fqns_per_model_part = (('tok_embeddings', 'layers.0.a', 'layers.0.b'),"
        " ('layers', 'norm', 'lm_head'))",
    ],
)
def test_parts_as_users_write_them_are_read(text: str) -> None:
    assert read(text, LAYERS) == cut(LAYERS, "layers.1").layer_devices


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("layers.0", "neither JSON nor a Python literal"),
        ('["tok_embeddings"]', "give a list of the modules of each stage"),
        ("[]", "give a list of the modules of each stage"),
        ('[["tok_embeddings", "layers"], ["norm"]]', "has no entry for layer 'lm_head'"),
        (
            '[["tok_embeddings", "layers"], ["norm", "lm_head", "layers"]]',
            "has 'layers' on stages 0 and 1",
        ),
        ('[["tok_embeddings"], ["layers"], ["norm"], ["lm_head"]]', "4 stages, and there are 3"),
    ],
)
def test_parts_that_cannot_be_placed_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(text, LAYERS)


def test_a_cut_inside_a_layer_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"cuts inside layer 'layers.0' \('layers.0.a' on stage 0, 'layers.0.b'"
    ):
        read('[["layers.0.a"], ["layers.0.b"]]', ["layers.0"])
