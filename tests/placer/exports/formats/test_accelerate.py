"""The device map of accelerate, which runs what is exported.

``tests/placer/schema/test_device_map.py`` has the maps of models.
"""

from __future__ import annotations

import copy
import functools
import json
from typing import Any, ClassVar

import pytest
import torch
from commands import chain
from exported import cut, layer_names, placed
from torch import Tensor, nn

import placer
from placer.errors import InputError, PlacementError
from placer.exports.formats import format_named
from placer.testing import logical_devices

GPUS = ["cuda:0", "cuda:1", "cuda:2"]


class Residual(nn.Module):
    """Blocks whose sums need their operands on one device, between other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embed(tokens)
        for block in self.blocks:
            values = block(values)
        return self.head(values)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.fc(self.norm(values))  # type: ignore[no-any-return]


TOKENS = torch.arange(8).reshape(2, 4)


def read(text: str, layers: list[str], devices: list[str] = GPUS) -> dict[str, str]:
    return format_named("accelerate").read(text, layers, devices)


@pytest.mark.parametrize("with_model", [False, True])
def test_accelerate_runs_the_map_with_the_same_result(with_model: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Residual().eval()
    layers = layer_names(model, TOKENS)
    devices = [1 if "blocks.1" in layer else 0 for layer in layers]  # back to an earlier device
    placement = placed({k: f"cuda:{device}" for k, device in zip(layers, devices, strict=True)})
    found = json.loads(placement.export("accelerate", model if with_model else None).text)
    assert {device for path, device in found.items() if "blocks.1" in path} == {1}
    places = {path: f"cpu:{place}" for path, place in found.items()}
    with logical_devices(2), torch.no_grad():
        dispatched = accelerate.dispatch_model(copy.deepcopy(model), places)
        torch.testing.assert_close(dispatched(TOKENS).cpu(), model(TOKENS))


@pytest.mark.parametrize("with_model", [False, True])
def test_a_cut_inside_a_block_is_refused_with_the_layers_and_the_remedy(with_model: bool) -> None:
    model = Residual()
    placement = cut(layer_names(model, TOKENS), "blocks.1.fc")
    with pytest.raises(
        PlacementError,
        match=r"keeps 'blocks.1' on one device, and this placement does not \('blocks.1.norm' on "
        r"cuda:0, 'blocks.1.fc' on cuda:1\): solve again with for_format='accelerate'",
    ):
        placement.export("accelerate", model if with_model else None)


class Whole(nn.Module):
    """Two modules that the model keeps on one device, and nothing else."""

    _no_split_modules: ClassVar = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, values: Tensor) -> Tensor:
        return self.block(values)  # type: ignore[no-any-return]


def test_a_models_own_list_counts_instead_of_its_blocks() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    placement = cut(["0.0", "0.1", "1"], "0.1")
    with pytest.raises(PlacementError, match="keeps '0' on one device"):
        placement.export("accelerate", model)
    model.append(Whole())
    with_list = cut(["0.0", "0.1", "1", "2.block.norm", "2.block.fc"], "0.1")
    assert json.loads(with_list.export("accelerate", model).text) == {
        "0.0": 0,
        "0.1": 1,
        "1": 1,
        "2": 1,
    }


def test_suggest_keeps_the_modules_whole_that_the_model_names() -> None:
    suggest = functools.partial(
        placer.suggest,
        Whole().eval(),
        torch.zeros(2, 4),
        devices=["cpu:0", "cpu:1"],
        training=False,
        granularity="fine",
        progress=False,
        constraints=placer.Constraints(min_devices=2),
    )
    apart = suggest()
    assert list(apart.layer_devices) == ["block.norm", "block.fc"]
    with pytest.raises(PlacementError, match="cuts inside 'block', a Block"):
        apart.export("accelerate", Whole())
    with pytest.raises(placer.InfeasibleError):
        suggest(for_format="accelerate")


def test_the_export_is_the_map_of_the_placement() -> None:
    placement = placed({"a+b": "node/cuda:1", "relu": "node/cuda:0", "relu@1": "node/cuda:0"})
    assert json.loads(placement.export("accelerate").text) == placement.device_map()
    assert placed({"(model)": "cpu:0"}).export("accelerate").text == '{\n "": "cpu"\n}'


def test_operations_between_modules_are_warned_of_where_devices_change_between_modules() -> None:
    (note,) = (
        cut(["tokens", "positions", "h.0", "h.1", "norm"], "positions").export("accelerate").notes
    )
    assert note.endswith("Run the model once: devices change between 'tokens' and 'positions'.")
    assert cut(["tokens", "h.0", "h.1"], "h.1").export("accelerate").notes == ()


LAYERS = ["embed", "h.0.a", "h.0.b", "h.1.a+h.1.b", "head"]


@pytest.mark.parametrize(
    "text",
    [
        '{"embed": 0, "h.0": 1, "h.1": 2, "head": 0}',
        "{'': 0, 'h': 1, 'h.1': 2}",
        "device_map = {'embed': 'cuda:0', 'h.0.a': 'cuda:1', 'h.0.b': 1, 'h.1': 2, 'head': 'cuda'}",
        "OrderedDict([('embed', 0), ('h.0', 1), ('h.1.a', 2), ('h.1.b', 2), ('head', 0)])",
        "OrderedDict({'': 0, 'h.0': device(type='cuda', index=1), 'h.1': torch.device('cuda:2')})",
        '{"": 0, "h.0": 1, "h.1.a.weight": 2, "h.1": 2, "unused.scale": 1}',
    ],
)
def test_maps_as_users_write_and_print_them_are_read(text: str) -> None:
    assert read(text, LAYERS) == {
        "embed": "cuda:0",
        "h.0.a": "cuda:1",
        "h.0.b": "cuda:1",
        "h.1.a+h.1.b": "cuda:2",
        "head": "cuda:0",
    }


@pytest.mark.parametrize(
    ("place", "devices", "device"),
    [
        ("1", ["cuda:1", "cuda:0"], "cuda:1"),
        ("1", ["node/cuda:0", "node/cuda:1"], "node/cuda:1"),
        ("1", ["cpu:0", "cpu:1"], "cpu:1"),
        ('"cpu"', ["cuda:0", "cpu:0"], "cpu:0"),
        ('"cpu:1"', ["cpu:0", "cpu:1"], "cpu:1"),
        ('"node/cuda:0"', ["other/cuda:0", "node/cuda:0"], "node/cuda:0"),
    ],
)
def test_a_number_is_an_index_or_else_a_position_and_a_name_may_leave_out_the_host(
    place: str, devices: list[str], device: str
) -> None:
    assert read(f'{{"": {place}}}', ["a"], devices) == {"a": device}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("auto", "neither JSON nor a Python literal"),
        ('"auto"', "give a dictionary from modules to devices"),
        ("{}", "give a dictionary from modules to devices"),
        ('{"": "disk"}', "keeps the weights on disk and names no device that computes"),
        ('{"": "cpu"}', "keeps the weights on the host, which is not among the devices"),
        ('{"": 3}', "on 3, which is not a device; give a GPU's index or a device's name"),
        ('{"": true}', "which is not a device"),
        ('{"": "cuda:x"}', "which is not a device"),
        ('{"": [0]}', "which is not a device"),
        ('{"embed": 0, "h": 1, "haed": 0}', "no entry for layer 'head'; did you mean 'haed'"),
        ('{"": 0, "h.1.b": 1}', r"cuts inside layer 'h.1.a\+h.1.b' \('' on cuda:0, 'h.1.b' on"),
        ('{"": 0, "embed.weight": 1}', "cuts inside layer 'embed'"),
        (f'{{"{"a." * 100}a": 0}}', "has more than 100 steps"),
    ],
)
def test_maps_that_cannot_be_placed_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(text, LAYERS)


def test_a_name_that_several_devices_have_is_refused() -> None:
    with pytest.raises(InputError, match="is one of left/cuda:0, right/cuda:0; name one of them"):
        read('{"": 0}', ["a"], ["left/cuda:0", "right/cuda:0"])
    with pytest.raises(InputError, match="is one of cpu:0, cpu:1; name one of them"):
        read('{"": "cpu"}', ["a"], ["cpu:0", "cpu:1"])


def test_several_hosts_and_replicas_are_refused() -> None:
    with pytest.raises(PlacementError, match="several hosts"):
        placed({"a": "left/cuda:0", "b": "right/cuda:0"}).export("accelerate")
    replicas: Any = {
        "cuda:0": [{"device": "cuda:0", "samples": 1}, {"device": "cuda:1", "samples": 1}]
    }
    with pytest.raises(PlacementError, match="accelerate has no replicas"):
        placed({"a": "cuda:0"}, replicas=replicas, batch_size=2).export("accelerate")


def test_a_map_that_returns_to_an_earlier_device_is_valid() -> None:
    profile = chain([1.0, 2.0, 1.0])
    names = [layer.name for layer in profile.layers]
    first, second = (device.name for device in profile.cluster.devices[:2])
    where = dict(zip(names, [first, second, first], strict=True))
    found = placer.evaluate(profile, json.dumps(where), "accelerate")
    assert found.faults == ()
    assert found.valid and found.objective_value >= 2.0


def test_a_map_of_several_cpu_stand_ins_says_that_it_does_not_split_the_model() -> None:
    # Every module was on "cpu", and no note said why.
    exported = placed({"embed": "cpu:0", "head": "cpu:1"}).export("accelerate")
    assert json.loads(exported.text) == {"embed": "cpu", "head": "cpu"}
    assert any("cpu:0 and cpu:1" in note for note in exported.notes)
    on_one_cpu = placed({"embed": "cpu:0", "head": "cpu:0"}).export("accelerate")
    assert not any("does not split" in note for note in on_one_cpu.notes)
