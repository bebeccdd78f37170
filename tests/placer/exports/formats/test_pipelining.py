"""The split points of torch.distributed.pipelining, which runs what is exported."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from exported import cut, layer_names, placed
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from placer.errors import InputError, PlacementError
from placer.exports.formats import format_named
from placer.zoo import gpt

TOKENS = torch.arange(32).reshape(2, 16)


def split(model: nn.Module, example: Tensor, text: str) -> Pipe:
    spec = {path: SplitPoint[point.upper()] for path, point in json.loads(text).items()}
    return pipeline(copy.deepcopy(model), (example,), split_spec=spec)


def parameters(pipe: Pipe) -> list[set[str]]:
    """Return the names of the parameters of each stage."""
    return [
        {name for name, _ in pipe.get_stage_module(stage).named_parameters()}
        for stage in range(pipe.num_stages)
    ]


def read(text: str, layers: list[str], stages: int = 3) -> dict[str, str]:
    return format_named("pipelining").read(text, layers, [f"cuda:{i}" for i in range(stages)])


def test_a_model_cut_inside_a_block_gives_the_same_result_in_the_stages_of_the_placement() -> None:
    model = gpt(layers=2, width=8, heads=2, context=16, vocabulary=50).eval()
    placement = cut(layer_names(model, TOKENS), "blocks.0.norm2", "norm")
    export = placement.export("pipelining")
    pipe = split(model, TOKENS, export.text)
    torch.testing.assert_close(pipe(TOKENS)[0], model(TOKENS))
    expected: list[set[str]] = [set(), set(), set()]
    for name, _ in model.named_parameters():
        layer = max(filter(name.startswith, placement.layer_devices), key=len)
        expected[int(placement.layer_devices[layer][-1])].add(name)
    assert parameters(pipe) == expected


class Branches(nn.Module):
    """A skip connection, an activation that is called twice, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.left, self.right, self.join = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)
        self.act = nn.ReLU()
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embed(tokens)
        left = self.act(self.left(values))
        right = self.act(self.right(values))
        return self.head(self.join(torch.cat([left, right], -1)))  # type: ignore[no-any-return]


def test_skip_connections_repeated_modules_and_tied_weights_give_the_same_result() -> None:
    model = Branches()
    layers = layer_names(model, TOKENS)
    assert layers == ["embed", "left", "act", "right", "act@1", "join", "head"]
    export = cut(layers, "right", "head", training=True).export("pipelining", model)
    assert json.loads(export.text) == {"right": "beginning", "head": "beginning"}
    pipe = split(model, TOKENS, export.text)
    torch.testing.assert_close(pipe(TOKENS)[0], model(TOKENS))
    assert parameters(pipe)[2] == {"head.weight"}
    (note,) = [note for note in export.notes if "sum its gradients" in note]
    assert note.startswith("'embed.weight' and 'head.weight' are one parameter")


def test_a_single_stage_has_no_split_points() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    text = cut(["0", "1"]).export("pipelining").text
    assert text == "{}"
    assert split(model, torch.ones(1, 2), text).num_stages == 1


def test_torch_cuts_at_each_call_of_a_module_which_is_why_such_a_boundary_is_refused() -> None:
    model = Branches()
    assert split(model, TOKENS, '{"act": "beginning"}').num_stages == 3
    with pytest.raises(
        PlacementError,
        match=r"keeps 'left' on one device, .*'left' on cuda:0, 'act' on cuda:1.*"
        r"for_format='pipelining'",
    ):
        cut(layer_names(model, TOKENS), "act").export("pipelining")
    with pytest.raises(InputError, match="names 'act', which is called several times"):
        read('{"act": "beginning"}', layer_names(model, TOKENS))


def test_the_boundary_before_a_merged_layer_is_the_beginning_of_its_first_module() -> None:
    placement = cut(["a", "b+c", "d"], "b+c")
    assert placement.export("pipelining").text == '{"b": "beginning"}'
    assert read('{"b": "beginning"}', ["a", "b+c", "d"]) == placement.layer_devices
    with pytest.raises(InputError, match=r"names 'c', and a cut there is inside layer 'b\+c'"):
        read('{"c": "beginning"}', ["a", "b+c", "d"])


def test_devices_of_several_hosts_are_ranks_in_their_order() -> None:
    export = placed({"a": "left/cuda:1", "b": "left/cuda:0", "c": "right/cuda:0"}).export(
        "pipelining"
    )
    assert json.loads(export.text) == {"b": "beginning", "c": "beginning"}
    assert export.notes == (
        "The ranks of the engine, in order, are the devices left/cuda:1, left/cuda:0, "
        "right/cuda:0.",
    )


def test_a_device_with_two_segments_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"gives cuda:0 both 'a' and, after other devices"):
        placed({"a": "cuda:0", "b": "cuda:1", "c": "cuda:0"}).export("pipelining")


def test_the_schedule_of_a_training_step_is_stated() -> None:
    export = cut(["a", "b"], "b", training=True, chunks=4, schedule="fill-drain").export(
        "pipelining"
    )
    assert any("4 micro-batches with ScheduleGPipe" in note for note in export.notes)


LAYERS = ["embed", "blocks.0.norm", "blocks.0.fc", "blocks.1.norm", "blocks.1.fc", "head"]


@pytest.mark.parametrize(
    "text",
    [
        '{"blocks.1": "beginning"}',
        "{'blocks.1': SplitPoint.BEGINNING}",
        "split_spec = {'blocks.0': SplitPoint.END}",
        "{'blocks.0.fc': <SplitPoint.END: 2>}",
        "{'blocks.1.norm': 'BEGINNING', 'blocks.0': 'end'}",
    ],
)
def test_split_points_as_users_write_and_print_them_are_read(text: str) -> None:
    assert read(text, LAYERS) == cut(LAYERS, "blocks.1.norm").layer_devices


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("blocks.1", "neither JSON nor a Python literal"),
        ('["blocks.1"]', "give a dictionary from modules to split points"),
        ('{"blocks.1": "middle"}', "is 'middle'; give SplitPoint.BEGINNING"),
        ('{"blocks.3": "end"}', "names 'blocks.3', which has no layer"),
        ('{"blocks.1.fc.0": "end"}', "is inside layer 'blocks.1.fc'; profile with a finer"),
        ('{"embed": "beginning"}', "where the model begins, which leaves a stage without layers"),
        ('{"head": "end"}', "where the model ends"),
        ('{"blocks.0": "end", "blocks.1": "end", "embed": "end"}', "makes 4 stages, and there are"),
    ],
)
def test_split_points_that_cannot_be_placed_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(text, LAYERS)


def test_a_model_that_calls_no_modules_is_one_stage() -> None:
    assert placed({"(model)": "cuda:0"}).export("pipelining").text == "{}"
    assert read("{}", ["(model)"]) == {"(model)": "cuda:0"}


def test_replicas_of_all_stages_are_copies_of_the_pipeline() -> None:
    replicas: Any = {
        "cuda:0": [{"device": "cuda:0", "samples": 1}, {"device": "cuda:2", "samples": 1}],
        "cuda:1": [{"device": "cuda:1", "samples": 1}, {"device": "cuda:3", "samples": 1}],
    }
    export = cut(["a", "b"], "b", replicas=replicas, batch_size=2).export("pipelining")
    assert export.text == '{"b": "beginning"}'
    assert "Run 2 equal copies of the pipeline, by data parallelism." in export.notes
