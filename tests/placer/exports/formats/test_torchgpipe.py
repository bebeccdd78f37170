"""torchgpipe's number of children on each device; it runs what is exported."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from exported import cut, layer_names, placed
from torch import nn

from placer.errors import InputError, PlacementError
from placer.exports.formats import format_named


def read(text: str, layers: list[str], stages: int = 3) -> dict[str, str]:
    return format_named("torchgpipe").read(text, layers, [f"cuda:{i}" for i in range(stages)])


def sequence() -> nn.Sequential:
    """Children with several layers, with one, and without operations, also at the end."""
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return nn.Sequential(
        nn.Linear(4, 4), nn.Identity(), block, nn.ReLU(), nn.Linear(4, 2), nn.Identity()
    )


def test_torchgpipe_runs_the_stages_of_the_placement_with_the_same_result() -> None:
    torchgpipe = pytest.importorskip("torchgpipe")
    model, inputs = sequence(), torch.randn(4, 4)
    layers = layer_names(model, inputs)
    assert layers == ["0", "2.0", "2.1", "2.2", "3", "4"]
    balance = json.loads(cut(layers, "2.0", "4").export("torchgpipe", model).text)
    pipe = torchgpipe.GPipe(copy.deepcopy(model), balance, devices=["cpu"] * 3, chunks=2)
    torch.testing.assert_close(pipe(inputs), model(inputs))
    names = [[name for name, _ in stage.named_parameters()] for stage in pipe.partitions]
    assert names == [
        ["0.weight", "0.bias"],
        ["2.0.weight", "2.0.bias", "2.2.weight", "2.2.bias"],
        ["4.weight", "4.bias"],
    ]


def test_children_without_operations_count_for_the_stage_before_them() -> None:
    placement = cut(["0", "2.0", "2.1", "2.2", "3", "4"], "2.0", "4")
    assert placement.export("torchgpipe", sequence()).text == "[2, 2, 2]"


def test_without_the_model_its_last_child_is_assumed_and_said() -> None:
    export = cut(["0", "2.0", "2.1", "2.2", "3", "4"], "2.0", "4").export("torchgpipe")
    assert export.text == "[2, 2, 1]"
    assert any("whose last child is '4'; export with the model" in note for note in export.notes)


def test_children_may_have_names() -> None:
    layers = {"embed": nn.Linear(2, 2), "gap": nn.Identity(), "head": nn.Linear(2, 2)}
    placement = cut(["embed", "head"], "head")
    assert placement.export("torchgpipe", nn.Sequential(OrderedDict(layers))).text == "[2, 1]"
    assert read("[1, 1]", ["embed", "head"]) == placement.layer_devices


def test_a_cut_inside_a_child_is_refused_with_the_layers_and_the_remedy() -> None:
    with pytest.raises(
        PlacementError,
        match=r"keeps '2' on one device, and this placement does not \('2.0' on cuda:0, '2.1' on "
        r"cuda:1\): solve again with for_format='torchgpipe'",
    ):
        cut(["0", "2.0", "2.1"], "2.1").export("torchgpipe")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(2, 2), "the model is a Linear: give the nn.Sequential that was placed"),
        (nn.Sequential(nn.ReLU()), "layers of '1', which is not a child of the model"),
        (nn.Linear, "give the nn.Module that was placed, or nothing"),
    ],
)
def test_a_model_that_is_not_the_sequence_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        cut(["0", "1"], "1").export("torchgpipe", model)


def test_a_model_that_calls_no_modules_has_no_children_to_count() -> None:
    with pytest.raises(PlacementError, match="this model calls no modules: wrap it"):
        placed({"(model)": "cuda:0"}).export("torchgpipe")


def test_merged_children_and_a_child_called_again_stay_together() -> None:
    layers = ["0", "1+2", "3", "4", "3@1", "5"]
    placement = cut(layers, "1+2", "5")
    assert placement.export("torchgpipe").text == "[1, 4, 1]"
    assert read("[1, 4, 1]", layers) == placement.layer_devices
    with pytest.raises(InputError, match="cuts before '4', which shares calls with '3'; move"):
        read("[1, 3, 2]", layers)


def test_gpipe_has_no_replicas() -> None:
    replicas: Any = {
        "cuda:0": [{"device": "cuda:0", "samples": 1}, {"device": "cuda:1", "samples": 1}]
    }
    with pytest.raises(PlacementError, match="torchgpipe has no replicas"):
        cut(["0"], replicas=replicas, batch_size=2).export("torchgpipe")


def test_the_arguments_of_a_training_step_are_stated() -> None:
    export = cut(["0", "1"], "1", training=True, chunks=4, recompute=("cuda:0",)).export(
        "torchgpipe"
    )
    assert "Construct GPipe with chunks=4, checkpoint='always'." in export.notes
    assert any("all micro-batches in flight" in note for note in export.notes)


@pytest.mark.parametrize("text", ["[1, 2]", "(1, 2)", "balance=[1, 2]", "[1,\n 2]"])
def test_numbers_as_users_write_them_are_read(text: str) -> None:
    assert read(text, ["0", "1.a", "1.b", "2"]) == {
        "0": "cuda:0",
        "1.a": "cuda:1",
        "1.b": "cuda:1",
        "2": "cuda:1",
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1;2", "neither JSON nor a Python literal"),
        ("[1, 0, 2]", "give the positive number of children"),
        ("[1, 1.5]", "give the positive number of children"),
        ("[true, 2]", "give the positive number of children"),
        ("3", "give the positive number of children"),
        ("[1, 1]", "states 2 children in total, and the model has at least 3"),
        ("[1, 1, 1, 1]", "states 4 stages, and there are 3 devices"),
    ],
)
def test_numbers_that_cannot_be_placed_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(text, ["0", "1", "2"])
