"""The layout of Megatron-LM: written, read, and solved for.

The grammar was also compared with Megatron-LM itself: the class ``PipelineParallelLayerLayout`` at
commit d98e8a64, called once outside this repository with 2,000 random exports, with and without
virtual stages, gave each rank the decoder layers, the embedding and the loss that the placement has
there, and ``validate_layer_layout`` accepted each of them.
"""

from __future__ import annotations

import itertools

import pytest
from block_plans import block_layers, segmented_plans
from hypothesis import assume, given
from hypothesis import strategies as st
from small_requests import examples

import placer
from placer.errors import InputError, PlacementError
from placer.exports.formats.megatron import Megatron
from placer.exports.plan import Plan
from placer.schema import (
    Cluster,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    TiedParameters,
)

FORMAT = Megatron()


def model(blocks: int, mtp: int = 0) -> list[str]:
    """Return the layers of a model, with its layers for multi-token prediction at the end."""
    layers = ["embed", *(f"decoder.layers.{i}" for i in range(blocks))]
    return [*layers, *(f"mtp.layers.{i}" for i in range(mtp)), "head"]


@examples(300)
@given(data=st.data())
def test_an_exported_placement_is_read_again(data: st.DataObject) -> None:
    plan = data.draw(segmented_plans(FORMAT))
    text = FORMAT.export(plan).text
    ranks = list(dict.fromkeys(plan.layer_devices.values()))
    assert FORMAT.read(text, list(plan.layer_devices), ranks) == plan.layer_devices


@examples(300)
@given(data=st.data())
def test_a_placement_with_virtual_stages_is_read_again(data: st.DataObject) -> None:
    """Devices may come again, if the last one does not hold the start of the model, too."""
    layers = data.draw(block_layers())
    units = FORMAT.units(layers)
    on = data.draw(st.lists(st.sampled_from("xyz"), min_size=len(units), max_size=len(units)))
    assume(on[0] != on[-1] or len(set(on)) == 1)
    placed = zip(units, on, strict=True)
    plan = Plan({layer: device for unit, device in placed for layer in unit.layers}, {})
    ranks = [device for device in dict.fromkeys(on) if device != on[-1]] + [on[-1]]
    assert FORMAT.read(FORMAT.export(plan).text, layers, ranks) == plan.layer_devices


def test_embedding_blocks_and_output_layer_have_their_symbols() -> None:
    layers = ["embed", "h.0", "h.1", "h.2", "h.3", "norm", "head"]
    assert FORMAT.text(Plan(dict(zip(layers, "xxxyyyy", strict=True)), {})) == "Et*2|t*2L"
    assert FORMAT.text(Plan(dict(zip(layers, "xyyzzww", strict=True)), {})) == "E|t*2|t*2|L"
    assert FORMAT.text(Plan({"h.0": "x", "h.1": "y"}, {})) == "Et|tL"


def test_several_segments_of_a_device_are_virtual_stages() -> None:
    layers = ["embed", "h.0", "h.1", "h.2", "h.3", "head"]
    plan = Plan(dict(zip(layers, "xxyxyy", strict=True)), {})
    export = FORMAT.export(plan)
    assert export.text == "Et|t|t|tL"
    assert export.notes[0] == "Start Megatron-LM with --pipeline-model-parallel-size 2."
    assert "2 virtual stages on each rank" in export.notes[1]


def test_stages_are_empty_where_a_rank_has_no_layer_in_a_round() -> None:
    plan = Plan(dict(zip(["embed", "h.0", "h.1", "h.2", "head"], "xyxzz", strict=True)), {})
    assert FORMAT.text(plan) == "E|t||t||tL"


def test_the_ends_of_the_model_need_the_first_and_the_last_rank() -> None:
    plan = Plan(dict(zip(["embed", "h.0", "head"], "xyx", strict=True)), {})
    with pytest.raises(PlacementError, match="gives x both ends of the model"):
        FORMAT.export(plan)


def test_layers_for_multi_token_prediction_stay_together() -> None:
    layers = model(2, mtp=2)
    plan = Plan(dict(zip(layers, "xxyyyy", strict=True)), {})
    assert FORMAT.text(plan) == "Et|tm*2L"
    assert FORMAT.read("Et|tmmL", layers, "xy") == plan.layer_devices
    apart = Plan(dict(zip(layers, "xxyyzz", strict=True)), {})
    with pytest.raises(PlacementError, match="keeps 'MTP layers' on one device"):
        FORMAT.export(apart)


QUOTED = [
    # docs/user-guide/features/pipeline_parallel_layout.md
    (
        "Et*3|(tt|)*29,m|L",
        (61, 1, 16),
        {0: [0, 1, 2, 33, 34], 13: [27, 28, 59, 60], 14: [29, 30], 15: [31, 32]},
    ),
    # tests/unit_tests/pipeline_parallel/test_pipeline_layout.py
    ("E|t*3|(t|)*5mL", (8, 1, 4), {0: [5], 1: [0, 1, 2, 6], 2: [3, 7], 3: [4]}),
    ("E|t*3|(t|)*4tm|L", (8, 1, 4), {0: [5], 1: [0, 1, 2, 6], 2: [3, 7], 3: [4]}),
    ("E|t*3|(t|)*3tt|m|L", (8, 1, 4), {0: [5], 1: [0, 1, 2, 6, 7], 2: [3], 3: [4]}),
    # tests/functional_tests/test_cases, model_config.yaml of several cases
    ("Et*7|t*7mL", (14, 1, 2), {0: [*range(7)], 1: [*range(7, 14)]}),
    ("Et*2|(tt|)*5t|tmL", (14, 1, 4), {0: [0, 1, 8, 9], 2: [4, 5, 12], 3: [6, 7, 13]}),
    ("Et*3|(tt|)*6mL", (15, 1, 4), {0: [0, 1, 2, 9, 10], 2: [5, 6, 13, 14], 3: [7, 8]}),
    ("Et*3|(tt|)*6L", (15, 0, 2), {0: [0, 1, 2, 5, 6, 9, 10, 13, 14], 1: [3, 4, 7, 8, 11, 12]}),
]
"""Layouts of Megatron-LM at commit d98e8a64, with the numbers of blocks, MTP layers and ranks, and
the blocks of some ranks as ``get_layer_id_list`` of Megatron-LM gave them."""


@pytest.mark.parametrize(("text", "sizes", "blocks"), QUOTED)
def test_layouts_of_megatron_are_read_as_megatron_reads_them(
    text: str, sizes: tuple[int, int, int], blocks: dict[int, list[int]]
) -> None:
    count, mtp, ranks = sizes
    read = FORMAT.read(text, model(count, mtp), [str(rank) for rank in range(ranks)])
    assert read["embed"] == "0" and read["head"] == str(ranks - 1)
    for rank, own in blocks.items():
        on = [name for name, device in read.items() if device == str(rank) and ".layers." in name]
        decoders = [name for name in on if name.startswith("decoder")]
        assert decoders == [f"decoder.layers.{block}" for block in own]


def test_layers_for_multi_token_prediction_are_where_megatron_has_them() -> None:
    """The documentation's table has the MTP layer on rank 14 of 16, and the loss on rank 15."""
    ranks = [str(rank) for rank in range(16)]
    assert FORMAT.read("Et*3|(tt|)*29,m|L", model(61, 1), ranks)["mtp.layers.0"] == "14"


@pytest.mark.parametrize(
    "text",
    ["Et|tttL", "E,t|t,t,t,L", " E t | t*3 L\n", "'Et|t*3L'", '"E(t)*1|(t)*3L"', "E(t|t)*1ttL"],
)
def test_repetitions_commas_and_spaces_are_read(text: str) -> None:
    read = FORMAT.read(text, model(4), "xy")
    assert list(read.values()) == list("xxyyyy")


def test_an_empty_stage_leaves_its_device_without_layers() -> None:
    """The documentation gives E||t|L as an example."""
    assert FORMAT.read("E||t|L", model(1), "xyzw") == dict(zip(model(1), "xzw", strict=True))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Et|xtL", "contains 'x'; give stages of E, t, m and L"),
        ("", "E must be the first symbol of the first stage"),
        ("t|tL", "E must be the first symbol"),
        ("E|E|ttL", "E must be the first symbol of the first stage, once"),
        ("|Et|tL", "E must be the first symbol of the first stage"),
        ("Et|t", "L must be the last symbol of the last stage"),
        ("EtL|t", "L must be the last symbol of the last stage"),
        ("Et|tL|", "L must be the last symbol of the last stage"),
        ("Et|t|t|tL", "has 4 stages, which 3 devices cannot share evenly"),
        ("Et|tttL", "states 4 decoder layers, and the model has 2 decoder layers"),
        ("Et|tmL", "states 1 MTP layer, and the model has 0 MTP layers"),
        ("Em|ttL", "every t must be before the first m"),
        ("Ett|m|mL", "all m must be in one stage"),
        ("Et|tm|||L|", "L must be"),
        ("Et*999999999|tL", "repeats 999,999,999 symbols; give at most 100,000"),
        ("E((t|)*2)*3L", r"contains '\(|contains '\)'"),
    ],
)
def test_a_faulty_layout_is_named(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        FORMAT.read(text, model(2), "xyz")


def test_an_example_of_megatrons_help_that_megatron_refuses_is_refused() -> None:
    """The help of the option has "E|(t|)*3,m|m||L"; its validation wants all m in one stage."""
    with pytest.raises(InputError, match="all m must be in one stage"):
        FORMAT.read("E|(t|)*3,m|m||L", model(3, 2), "01234567")


def test_mtp_layers_are_in_the_last_stage_of_their_rank() -> None:
    with pytest.raises(InputError, match="m must be in the last stage of its rank"):
        FORMAT.read("Ett|m||L", model(2, 1), "xy")


def test_replicas_are_data_parallelism() -> None:
    plan = Plan(
        {"embed": "a", "h.0": "a", "h.1": "b"},
        {"a": ["a", "c"], "b": ["b", "d"]},
        samples={"a": [4, 4], "b": [4, 4]},
        training=True,
        batch_size=8,
        chunks=4,
    )
    export = FORMAT.export(plan)
    assert export.text == "Et|tL"
    assert "The placement was solved for --micro-batch-size 4 and --global-batch-size 32." in (
        export.notes
    )
    assert "Run 2 equal copies of the pipeline, by data parallelism." in export.notes
    assert "The ranks of the engine, in order, are the devices a, c, b, d." in export.notes


def test_uneven_shares_of_a_micro_batch_are_refused() -> None:
    plan = Plan({"h.0": "a", "h.1": "a"}, {"a": ["a", "b"]}, samples={"a": [2, 1]})
    with pytest.raises(PlacementError, match="replicas of a 2, 1: use micro-batches that"):
        FORMAT.export(plan)


def profile(devices: int, memory_bytes: int = 1000) -> Profile:
    """Return a tied model for training, whose output layer takes as long as all the rest."""
    times_ms = {"embed": 1.0, "h.0": 2.0, "h.1": 2.0, "h.2": 2.0, "head": 7.0}
    names = [f"cuda:{index}" for index in range(devices)]
    return Profile(
        layers=[
            Layer(name=name, forward_ms={"t": ms}, backward_ms={"t": ms}, param_bytes=8)
            for name, ms in times_ms.items()
        ],
        edges=[Edge(source=a, targets=(b,), bytes=0) for a, b in itertools.pairwise(times_ms)],
        training=True,
        batch_size=4,
        colocated=(("embed", "head"),),
        tied=(TiedParameters(layers=("embed", "head"), param_bytes=8, gradient_bytes=0),),
        cluster=Cluster(
            devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in names],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e12)
                for a, b in itertools.permutations(names, 2)
            ],
        ),
    )


def test_the_output_layer_may_be_alone_although_it_shares_parameters() -> None:
    placement = placer.solve(PlacementRequest(profile=profile(2), for_format="megatron"))
    assert placement.objective_value == pytest.approx(14.0)
    assert placement.export("megatron").text == "Et*3|L"


def test_the_best_placement_with_replicas_is_exported_with_them() -> None:
    """A device has room for four of the five layers, so two pipelines of two devices are best."""
    request = PlacementRequest(
        profile=profile(4, memory_bytes=33), for_format="megatron", replicas="auto", chunks=4
    )
    placement = placer.solve(request)
    assert placement.objective_value == pytest.approx(14.0 / 2)
    export = placement.export("megatron")
    assert export.text == "Et*3|L"
    assert "Run 2 equal copies of the pipeline, by data parallelism." in export.notes
    assert any("--micro-batch-size 4 and --global-batch-size 16" in note for note in export.notes)
