"""What all formats share: refusals that name the remedy, notes, and texts that are read again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from block_plans import block_layers
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples
from torch import nn

from placer.errors import PlacementError
from placer.exports.format import Format
from placer.exports.formats import FORMATS
from placer.exports.plan import Plan
from placer.exports.units import Unit


class Rows(Format):
    """Layers and devices, for tests of what the base class does."""

    name = "pipelining"
    title = "F"
    source = "this file"
    replicates = True

    def units(self, layers: Sequence[str]) -> list[Unit]:
        return [Unit((layer,), (layer,)) for layer in layers]

    def text(self, plan: Plan) -> str:
        return " ".join(plan.layer_devices.values())

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        return dict(zip(layers, text.split(), strict=True))


ROWS = Rows()


@pytest.mark.parametrize("name", ["llama.cpp", "megatron", "pipedream", "piper", "vllm"])
@examples(300)
@given(data=st.data())
def test_any_placement_is_refused_or_read_again(name: str, data: st.DataObject) -> None:
    layers = data.draw(block_layers())
    cuts = data.draw(st.lists(st.integers(0, len(layers)), max_size=3).map(sorted))
    devices = data.draw(st.lists(st.sampled_from("xyz"), min_size=4, max_size=4))
    on = {layer: devices[sum(cut <= index for cut in cuts)] for index, layer in enumerate(layers)}
    try:
        text = FORMATS[name].export(Plan(on, {})).text
    except PlacementError as error:
        assert f"for_format={name!r}" in str(error)
        return
    ranks = list(dict.fromkeys(on.values()))
    last = on[layers[-1]]
    if name == "megatron" and ranks[0] != last:  # the loss is on the last rank
        ranks = [*(device for device in ranks if device != last), last]
    assert FORMATS[name].read(text, layers, ranks) == on


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_each_format_is_found_by_its_name_and_names_its_grammar(name: str) -> None:
    form = FORMATS[name]
    assert form.name == name
    assert form.title and form.source


def test_devices_in_the_order_of_their_numbers_need_no_note() -> None:
    names = [f"cuda:{index}" for index in range(11)]
    assert ROWS.notes(Plan({f"l{i}": name for i, name in enumerate(names)}, {})) == []
    assert ROWS.notes(Plan({"a": "cuda:10", "b": "cuda:9"}, {})) == [
        "The ranks of the engine, in order, are the devices cuda:10, cuda:9."
    ]


def test_replicas_of_a_stage_are_neighbouring_ranks() -> None:
    replicas = {"cuda:0": ["cuda:0", "cuda:2"], "cuda:1": ["cuda:1", "cuda:3"]}
    plan = Plan({"a": "cuda:0", "b": "cuda:1"}, replicas)
    assert ROWS.notes(plan) == [
        "The ranks of the engine, in order, are the devices cuda:0, cuda:2, cuda:1, cuda:3.",
        "Run 2 equal copies of the pipeline, by data parallelism.",
    ]


def test_stages_that_recompute_are_named() -> None:
    assert ROWS.notes(Plan({"a": "x"}, {}, recompute=("x",))) == [
        "Recompute the forward passes (activation checkpointing) of the stages on x."
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_another_model_than_the_placed_one_is_refused(name: str) -> None:
    # Only some formats noticed: the others wrote names of modules that the model does not have.
    of_children = name in ("deepspeed", "torchgpipe")
    paths = ["0", "1"] if of_children else ["blocks.0", "blocks.1"]
    on = {path: f"cuda:{index}" for index, path in enumerate(paths)}
    plan = Plan(on, {}, training=name != "vllm", model=nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(PlacementError, match=r"give the model that was placed|not a child of"):
        FORMATS[name].export(plan)
