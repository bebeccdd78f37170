"""PipeDream's configuration of stages: written, read, and solved for.

The grammar was also compared with PipeDream itself: the lines of ``StageRuntime.initialize`` that
read a configuration (runtime/runtime.py at commit 7db6a1c3), run once outside this repository on
300 random exports, gave each rank the modules that the placement has there.
"""

from __future__ import annotations

import json

import pytest
from block_plans import GPUS, segmented_plans
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.errors import InputError
from placer.exports.formats.pipedream import PipeDream
from placer.exports.plan import Plan

FORMAT = PipeDream()


@examples(300)
@given(data=st.data())
def test_an_exported_placement_is_read_again(data: st.DataObject) -> None:
    plan = data.draw(segmented_plans(FORMAT))
    assert FORMAT.read(FORMAT.text(plan), list(plan.layer_devices), GPUS) == plan.layer_devices


@examples(300)
@given(data=st.data(), copies=st.integers(2, 3))
def test_an_exported_placement_with_replicas_is_read_as_its_first_pipeline(
    data: st.DataObject, copies: int
) -> None:
    plan = data.draw(segmented_plans(FORMAT, GPUS[:3]))
    used = list(dict.fromkeys(plan.layer_devices.values()))
    replicas = {device: [device, *(f"{device} {i}" for i in range(1, copies))] for device in used}
    plan = Plan(plan.layer_devices, replicas)
    text = FORMAT.export(plan).text
    assert FORMAT.read(text, list(plan.layer_devices), plan.ranks) == plan.layer_devices


def test_each_module_has_a_stage_and_the_loss_has_the_last_one() -> None:
    plan = Plan(dict(zip("abc", "xxy", strict=True)), {"x": ["x", "z"], "y": ["y", "w"]})
    export = FORMAT.export(plan)
    assert json.loads(export.text) == {
        "module_to_stage_map": [0, 0, 1, 1],
        "stage_to_rank_map": {"0": [0, 1], "1": [2, 3]},
    }
    assert "The ranks of the engine, in order, are the devices x, z, y, w." in export.notes
    assert export.notes[0] == (
        "The list of modules has 3 modules, in the order of the placement's layers, and then the "
        "loss."
    )


def test_all_calls_of_a_module_are_one_entry() -> None:
    plan = Plan(dict(zip(["a", "b", "b@1", "c"], "xyyy", strict=True)), {})
    assert json.loads(FORMAT.text(plan))["module_to_stage_map"] == [0, 1, 1, 1]


def test_the_batch_of_a_training_step_is_noted() -> None:
    plan = Plan({"a": "x"}, {"x": ["x", "y"]}, training=True, batch_size=8)
    assert any("solved for -b 4" in note for note in FORMAT.notes(plan))
    inference = FORMAT.notes(Plan({"a": "x"}, {}))
    assert any("solve again with training=True" in note for note in inference)


CONFIGURATIONS = [
    # runtime/image_classification/models, at commit 7db6a1c3
    (
        "alexnet/gpus=4_straight/mp_conf.json",
        [0, 1, 2, 3, 3],
        {"0": [0], "1": [1], "2": [2], "3": [3]},
        "0123",
    ),
    ("resnet50/gpus=2/mp_conf.json", [0, 0, 1, 1, 1], {"0": [0], "1": [1]}, "0011"),
    ("resnet50/gpus=4/mp_conf.json", [0, 1, 2, 2], {"0": [0], "1": [1], "2": [2]}, "012"),
    ("vgg16/gpus=4/dp_conf.json", [0, 0, 0], {"0": [0, 1, 2, 3]}, "00"),
    ("vgg16/gpus=4/hybrid_conf_2-2.json", [0, 1, 1], {"0": [0, 1], "1": [2, 3]}, "02"),
]
"""Configurations of PipeDream, with the first rank of each module but the loss."""


@pytest.mark.parametrize(("file", "modules", "ranks", "on"), CONFIGURATIONS)
def test_pipedreams_own_configurations_are_read(
    file: str, modules: list[int], ranks: dict[str, list[int]], on: str
) -> None:
    layers = [f"module{i}" for i in range(len(modules) - 1)]
    text = json.dumps({"module_to_stage_map": modules, "stage_to_rank_map": ranks})
    assert FORMAT.read(text, layers, "0123") == dict(zip(layers, on, strict=True)), file


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        # vgg16/gpus=4/mp_conf.json of PipeDream, which Python's json does not read, either
        ('{"module_to_stage_map": [0,1,1], "stage_to_rank_map": {"0": [0], 1: [1]}}', "not JSON"),
        ("[]", "has no 'module_to_stage_map'"),
        ('{"module_to_stage_map": [0, 1, 1]}', "has no 'stage_to_rank_map'"),
        (
            '{"module_to_stage_map": [0, "1"], "stage_to_rank_map": {}}',
            "module_to_stage_map is .*give a list of numbers from 0",
        ),
        (
            '{"module_to_stage_map": [0, 0], "stage_to_rank_map": {"0": [0]}}',
            "has 2 modules; the model has 2 layers, and the loss is one more",
        ),
        (
            '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0]}}',
            "give the ranks of each stage, 0, 1",
        ),
        (
            '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0], "1": [0]}}',
            "has the ranks 0, 0; give each rank from 0 one stage",
        ),
        (
            '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0], "1": []}}',
            "has the ranks 0; give each rank from 0 one stage, and each stage a rank",
        ),
        (
            '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1], "1": [2, 3]}}',
            "has 4 ranks, and there are 3 devices",
        ),
        # models/vgg16/gpus=2/hybrid_conf.json
        (
            '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1], "1": [2]}}',
            "have 2, 1 replicas, and a map describes one of several equal pipelines",
        ),
    ],
)
def test_a_faulty_configuration_is_named(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        FORMAT.read(text, ["a", "b"], "xyz")


def test_each_stage_has_ranks_for_its_own_number_of_replicas() -> None:
    # models/vgg16/gpus=4/hybrid_conf.json has these ranks, for -b 64
    plan = Plan(
        {"a": "w", "b": "z"},
        {"w": ["w", "x", "y"]},
        stages=("w", "z"),
        training=True,
        batch_size=192,
    )
    export = FORMAT.export(plan)
    assert json.loads(export.text) == {
        "module_to_stage_map": [0, 1, 1],
        "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},
    }
    assert "The placement was solved for -b 64" in " ".join(export.notes)
