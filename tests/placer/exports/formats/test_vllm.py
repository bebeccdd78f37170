"""The partition of vLLM: written, read, and solved for.

The grammar was also compared with vLLM itself: ``get_pp_indices`` of vllm/distributed/utils.py at
commit 5a6541db, called once outside this repository with 2,000 random exports, gave each rank the
blocks that the placement has there.
"""

from __future__ import annotations

import pytest
from block_plans import GPUS, segmented_plans
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.errors import InputError, PlacementError
from placer.exports.formats.vllm import VLLM
from placer.exports.plan import Plan

FORMAT = VLLM()
LAYERS = ["embed", *(f"model.layers.{i}" for i in range(7)), "norm", "head"]


@examples(300)
@given(data=st.data())
def test_an_exported_placement_is_read_again(data: st.DataObject) -> None:
    plan = data.draw(segmented_plans(FORMAT))
    text = FORMAT.export(plan).text
    assert FORMAT.read(text, list(plan.layer_devices), GPUS) == plan.layer_devices


def test_each_rank_has_its_number_of_blocks() -> None:
    plan = Plan(dict(zip(LAYERS, ["x"] * 4 + ["y"] * 2 + ["z"] * 4, strict=True)), {})
    export = FORMAT.export(plan)
    assert export.text == "3,2,2"
    assert export.notes == ("Start vLLM with --pipeline-parallel-size 3.",)


@pytest.mark.parametrize(
    "text",
    ["3,2,2", " 3, 2, 2\n", "VLLM_PP_LAYER_PARTITION=3,2,2", 'VLLM_PP_LAYER_PARTITION="3,2,2"'],
)
def test_values_are_read_as_users_write_them(text: str) -> None:
    read = FORMAT.read(text, LAYERS, "xyz")
    assert read == dict(zip(LAYERS, ["x"] * 4 + ["y"] * 2 + ["z"] * 4, strict=True))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("3,two,2", "is '3,two,2'; give the blocks of each rank, such as 8,9,9,6"),
        ("", "is ''; give"),
        ("8,-1", "is '8,-1'; give"),
        ("3,2", "states 5 blocks in total, and the model has 7 blocks"),
        ("2,2,2,1", "states 4 stages, and there are 3 devices"),
    ],
)
def test_a_faulty_value_is_named(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        FORMAT.read(text, LAYERS, "xyz")


def test_the_order_of_devices_is_noted_where_it_is_not_their_own() -> None:
    plan = Plan({"h.0": "cuda:1", "h.1": "cuda:0"}, {})
    assert "The ranks of the engine, in order, are the devices cuda:1, cuda:0." in FORMAT.notes(
        plan
    )


def test_a_placement_for_training_is_noted() -> None:
    notes = FORMAT.notes(Plan({"h.0": "x", "h.1": "y"}, {}, training=True))
    assert any("solve again with training=False (--inference)" in note for note in notes)


def test_replicas_are_refused() -> None:
    plan = Plan({"h.0": "x", "h.1": "x"}, {"x": ["x", "y"]})
    with pytest.raises(PlacementError, match=r"has no replicas.*for_format='vllm'"):
        FORMAT.export(plan)


def test_an_empty_placement_is_refused() -> None:
    with pytest.raises(PlacementError, match="places no layer"):
        FORMAT.export(Plan({}, {}))
