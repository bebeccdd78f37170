"""The options of llama.cpp: written, read, and solved for.

The grammar was also compared with llama.cpp itself: the lines of ``load_tensors`` that divide
layers among devices (src/llama-model.cpp at commit 0c1e5709), compiled once outside this repository
and called with 600 random exports and 600 random values of both options, gave each device the
layers that this format writes and reads.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from block_plans import GPUS, block_layers, segmented_plans
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

import placer
from placer.errors import InputError, PlacementError
from placer.exports.formats.llama_cpp import LlamaCpp
from placer.exports.plan import Plan
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile

FORMAT = LlamaCpp()
LAYERS = ["embed", "model.layers.0", "model.layers.1", "model.layers.2", "norm", "head"]


def documented(n_layer: int, n_gpu_layers: int, shares: list[float]) -> list[int | None]:
    """Return the GPU of each block and of the output layer as llama.cpp assigns it; None: host.

    In single precision: a layer is on the first GPU whose cumulative share exceeds the layer's
    position among the layers on GPUs.
    """
    ends = np.cumsum(np.float32(shares), dtype=np.float32)
    ends /= ends[-1]
    begin = max(n_layer + 1 - n_gpu_layers, 0)
    on_gpus = min(n_gpu_layers, n_layer + 1)
    return [
        None
        if layer < begin
        else int(np.flatnonzero(ends > np.float32(layer - begin) / np.float32(on_gpus))[0])
        for layer in range(n_layer + 1)
    ]


@st.composite
def plans(draw: st.DrawFn, devices: tuple[str, ...]) -> Plan:
    """Return a placement with the embedding on the host, or on the GPU of the first block."""
    plan = draw(segmented_plans(FORMAT, devices))
    units = FORMAT.units(list(plan.layer_devices))
    where = dict(plan.layer_devices)
    if len(units) > 1 and where[units[0].layers[0]] != "cpu":
        where |= dict.fromkeys(units[0].layers, where[units[1].layers[0]])
    return replace(plan, layer_devices=where)


def blocks_of(layers: list[str]) -> list[str]:
    return list(dict.fromkeys(layer[:14] for layer in layers if layer.startswith("model.layers")))


@pytest.mark.parametrize("devices", [GPUS, ("cpu", *GPUS)], ids=["gpus", "host"])
@examples(300)
@given(data=st.data())
def test_llama_cpp_gives_each_device_the_layers_of_the_placement(
    devices: tuple[str, ...], data: st.DataObject
) -> None:
    plan = data.draw(plans(devices))
    if set(plan.layer_devices.values()) == {"cpu"}:  # then it stands for a GPU
        return
    words = FORMAT.export(plan).text.split()
    assert words[::2] == ["--n-gpu-layers", "--tensor-split"]
    layers = list(plan.layer_devices)
    blocks = blocks_of(layers)
    shares = [float(share) for share in words[3].split(",")]
    gpus = [device for device in dict.fromkeys(plan.layer_devices.values()) if device != "cpu"]
    found = documented(len(blocks), int(words[1]), shares)
    names = ["cpu" if gpu is None else gpus[gpu] for gpu in found]
    for block, name in zip(blocks, names, strict=False):
        own = [device for layer, device in plan.layer_devices.items() if layer.startswith(block)]
        assert set(own) == {name}
    assert plan.layer_devices[layers[-1]] == names[-1] or layers[-1].startswith(blocks[-1])


@examples(300)
@given(data=st.data())
def test_an_exported_placement_is_read_again(data: st.DataObject) -> None:
    plan = data.draw(plans(GPUS))
    gpus = list(dict.fromkeys(plan.layer_devices.values()))
    assert FORMAT.read(FORMAT.text(plan), list(plan.layer_devices), gpus) == plan.layer_devices


@examples(300)
@given(
    layers=block_layers(),
    on_gpus=st.integers(0, 12),
    shares=st.lists(st.sampled_from([0, 1, 2, 0.5, 3.25, 7]), min_size=1, max_size=5).filter(any),
)
def test_any_proportions_are_read_as_llama_cpp_reads_them(
    layers: list[str], on_gpus: int, shares: list[float]
) -> None:
    gpus = GPUS[: len(shares)]
    text = f"-ngl {on_gpus} -ts {','.join(map(str, shares))}"
    read = FORMAT.read(text, layers, ("cpu", *gpus))
    blocks = blocks_of(layers)
    found = documented(len(blocks), on_gpus, shares)
    expected = ["cpu" if gpu is None else gpus[gpu] for gpu in found]
    assert [read[next(x for x in layers if x.startswith(block))] for block in blocks] == (
        expected[:-1]
    )
    if layers[-1] in ("norm", "head"):
        assert read[layers[-1]] == expected[-1]


def test_the_output_layer_counts_as_a_layer() -> None:
    plan = Plan(dict(zip(LAYERS, ["cuda:0"] * 3 + ["cuda:1"] * 3, strict=True)), {})
    export = FORMAT.export(plan)
    assert export.text == "--n-gpu-layers 4 --tensor-split 2,2"
    assert export.notes == (
        "Start llama.cpp with --device CUDA0,CUDA1.",
        "llama.cpp keeps the embedding on the host.",
    )


def test_the_output_layer_may_be_alone() -> None:
    plan = Plan(dict(zip(LAYERS, ["cuda:0"] * 4 + ["cuda:1"] * 2, strict=True)), {})
    assert FORMAT.text(plan) == "--n-gpu-layers 4 --tensor-split 3,1"


def test_layers_on_the_host_are_not_on_gpus() -> None:
    plan = Plan(dict(zip(LAYERS, ["cpu"] * 3 + ["cuda:0"] * 3, strict=True)), {})
    assert FORMAT.text(plan) == "--n-gpu-layers 2 --tensor-split 2"
    assert FORMAT.read(FORMAT.text(plan), LAYERS, ["cuda:0", "cpu"]) == plan.layer_devices


def test_a_placement_on_the_host_alone_has_no_layer_on_gpus() -> None:
    devices = ["cuda:0", "cuda:1", "cpu:0"]
    plan = Plan(dict.fromkeys(LAYERS, "cpu:0"), {}, devices=devices)
    assert FORMAT.export(plan).text == "--n-gpu-layers 0"
    assert FORMAT.read("--n-gpu-layers 0", LAYERS, devices) == plan.layer_devices


def test_the_embedding_may_be_on_the_host_alone() -> None:
    plan = Plan(dict(zip(LAYERS, ["cpu"] + ["cuda:0"] * 5, strict=True)), {})
    assert FORMAT.text(plan) == "--n-gpu-layers 4 --tensor-split 4"
    assert FORMAT.read(FORMAT.text(plan), LAYERS, ["cpu", "cuda:0"]) == plan.layer_devices


def test_stand_ins_count_as_gpus() -> None:
    plan = Plan(dict(zip(LAYERS, ["cpu:0"] * 3 + ["cpu:1"] * 3, strict=True)), {})
    assert FORMAT.text(plan) == "--n-gpu-layers 4 --tensor-split 2,2"
    assert FORMAT.read("-ngl 4 -ts 2,2", LAYERS, ["cpu:0", "cpu:1"]) == plan.layer_devices


def test_gpus_in_another_order_are_named_in_the_order_of_the_stages() -> None:
    plan = Plan(dict(zip(LAYERS, ["cuda:1"] * 3 + ["cuda:0"] * 3, strict=True)), {})
    assert FORMAT.notes(plan)[0] == "Start llama.cpp with --device CUDA1,CUDA0."
    text = f"--device CUDA1,CUDA0 {FORMAT.text(plan)}"
    assert FORMAT.read(text, LAYERS, ["cuda:0", "cuda:1"]) == plan.layer_devices


def test_later_layers_on_the_host_are_refused() -> None:
    plan = Plan(dict(zip(LAYERS, ["cuda:0"] * 3 + ["cpu"] * 3, strict=True)), {})
    with pytest.raises(PlacementError, match=r"'model\.layers\.2' on cpu after layers on cuda:0"):
        FORMAT.export(plan)


@pytest.mark.parametrize(
    "text",
    [
        # the help of --tensor-split gives 3,1 as an example
        "-ngl 99 -ts 3,1",
        "--gpu-layers all --tensor-split 3/1",
        "--n-gpu-layers auto -ts 0.75,0.25",
        "llama-server -m model.gguf -c 4096 -ngl 4 -sm layer -ts 3,1,0",
        "LLAMA_ARG_N_GPU_LAYERS=4 LLAMA_ARG_TENSOR_SPLIT=3,1 llama-cli",
        "-ts 3,1",
        "-ngl 2 -ngl 4 -ts 3,1",
    ],
)
def test_options_are_read_as_users_write_them(text: str) -> None:
    read = FORMAT.read(text, LAYERS, GPUS[:2])
    assert list(read.values()) == ["cuda:0"] * 4 + ["cuda:1"] * 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has neither --n-gpu-layers nor --tensor-split"),
        ("-ngl 'x", "is not a command line"),
        ("-ts 3,1 -ngl", "-ngl has no value"),
        ("-ngl some -ts 3,1", "--n-gpu-layers is 'some'; give a number"),
        ("-ngl 4", "--tensor-split gives no GPU a share"),
        ("-ngl 4 -ts 0,0", "--tensor-split gives no GPU a share"),
        ("-ngl 4 -ts 3,a", "--tensor-split is '3,a'; give the proportion"),
        ("-ngl 4 -ts nan,1", "--tensor-split is 'nan,1'; give the proportion"),
        ("-ngl 4 -ts=-1,2", "--tensor-split is '-1,2'; give the proportion"),
        ("-ngl 4 -ts 1,1,1", "has shares for 3 GPUs, and there are 2 GPUs"),
        ("-ngl 3 -ts 1,1", "keeps 1 of 4 layers on the host, which is not one of the devices"),
        ("-ngl 4 -ts 1,1 -sm row", "--split-mode is 'row'.*use --split-mode layer"),
        ("-ngl 4 -ts 1,1 -dev CUDA0,CUDA7", "--device names 'CUDA7', which is not one of CUDA0"),
    ],
)
def test_a_faulty_value_is_named(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        FORMAT.read(text, LAYERS, GPUS[:2])


def test_the_embedding_on_another_gpu_than_the_first_block_is_refused() -> None:
    plan = Plan(dict(zip(LAYERS, ["cuda:0"] + ["cuda:1"] * 5, strict=True)), {})
    with pytest.raises(PlacementError, match="has it on cuda:0 and the first block on cuda:1"):
        FORMAT.export(plan)


def profile(*devices: str) -> Profile:
    """Return a model of five layers, of which a GPU holds two, and the host is slow."""
    names = [*LAYERS[:4], "head"]
    return Profile(
        layers=[
            Layer(name=name, forward_ms={"gpu": 1.0, "cpu": 10.0}, param_bytes=10) for name in names
        ],
        edges=[Edge(source=a, targets=(b,), bytes=0) for a, b in itertools.pairwise(names)],
        cluster=Cluster(
            devices=[
                Device(name=name, type="cpu", memory_bytes=1000)
                if name == "cpu:0"
                else Device(name=name, type="gpu", memory_bytes=25)
                for name in devices
            ],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e9)
                for a, b in itertools.permutations(devices, 2)
            ],
        ),
    )


def test_the_host_has_the_first_layers_of_a_solved_placement() -> None:
    request = PlacementRequest(profile=profile("cuda:0", "cpu:0"), for_format="llama.cpp")
    placement = placer.solve(request)
    assert list(placement.layer_devices.values()) == ["cpu:0"] * 3 + ["cuda:0"] * 2
    export = placement.export("llama.cpp")
    assert export.text == "--n-gpu-layers 2 --tensor-split 2"
    assert FORMAT.read(export.text, list(placement.layer_devices), ["cuda:0", "cpu:0"]) == (
        placement.layer_devices
    )


def test_the_embedding_is_on_the_host_if_the_host_is_a_device() -> None:
    """The GPUs have room for it, and are ten times faster."""
    devices = ("cuda:0", "cuda:1", "cuda:2", "cpu:0")
    request = PlacementRequest(profile=profile(*devices), for_format="llama.cpp")
    placement = placer.solve(request)
    assert placement.layer_devices["embed"] == "cpu:0"
    assert "cpu:0" not in list(placement.layer_devices.values())[1:]


def test_the_embedding_counts_for_the_first_gpu_without_the_host() -> None:
    request = PlacementRequest(
        profile=profile("cuda:0", "cuda:1", "cuda:2"), for_format="llama.cpp"
    )
    where = placer.solve(request).layer_devices
    assert where["embed"] == where["model.layers.0"] != where["model.layers.1"]


def test_a_placement_that_leaves_all_gpus_idle_keeps_all_layers_on_the_host() -> None:
    request = PlacementRequest(
        profile=profile("cuda:0", "cpu:0"),
        for_format="llama.cpp",
        constraints=Constraints(max_devices=1),
    )
    assert placer.solve(request).export("llama.cpp").text == "--n-gpu-layers 0"


def test_an_embedding_pinned_to_a_gpu_is_refused_if_the_host_is_a_device() -> None:
    request = PlacementRequest(
        profile=profile("cuda:0", "cpu:0"),
        for_format="llama.cpp",
        constraints=Constraints(pinned={"embed": "cuda:0"}),
    )
    with pytest.raises(InputError, match=r"pins 'embed' to 'cuda:0', and llama\.cpp keeps"):
        placer.solve(request)


def test_a_map_as_llama_cpp_runs_it_is_judged_without_faults() -> None:
    found = placer.evaluate(profile("cuda:0", "cpu:0"), "-ngl 2 -ts 1", "llama.cpp")
    assert found.valid


def test_replicas_are_refused() -> None:
    plan = Plan(dict.fromkeys(LAYERS, "cuda:0"), {"cuda:0": ["cuda:0", "cuda:1"]})
    with pytest.raises(PlacementError, match="has no replicas"):
        FORMAT.export(replace(plan, training=True))
