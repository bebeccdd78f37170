"""Graphs that came as data: measured as the model itself is, and harmless where they mean harm."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import placer
from placer.capture.capture import capture_graph
from placer.capture.serialization import to_wire
from placer.errors import InputError, ProfilingError
from placer.profiler.remote import allowed_ops
from placer.profiler.remote.replay import rebuild, replay
from placer.schema.graph import Graph, ProfileRequest


def small():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )


X = torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_graph_is_profiled_as_its_model_is(training):
    model = small().train(training)
    direct = placer.profile(
        model,
        X,
        ["cpu:0", "cpu:1"],
        training=training,
        repeats=2,
        cache=False,
        progress=False,
        granularity="fine",
    )
    graph = to_wire(capture_graph(model, (X,), granularity="fine"))
    replayed = replay(ProfileRequest(graph=graph, devices=2, repeats=2))

    def without_times(profile):
        layers = [
            layer.model_copy(
                update={
                    key: {} for key in ("forward_ms", "backward_ms", "weight_grad_ms", "host_ms")
                }
            )
            for layer in profile.layers
        ]
        return [layer.model_copy(update={"optimizer_ms": {}, "spread": {}}) for layer in layers]

    assert without_times(replayed) == without_times(direct)
    for field in (
        "model",
        "graph_hash",
        "training",
        "optimizer",
        "batch_size",
        "granularity",
        "edges",
        "colocated",
    ):
        assert getattr(replayed, field) == getattr(direct, field)
    assert [device.name for device in replayed.cluster.devices] == ["cpu:0", "cpu:1"]
    assert all(ms > 0 for layer in replayed.layers for ms in layer.forward_ms.values())


@pytest.mark.gpu
@pytest.mark.alone
def test_times_of_a_replayed_graph_are_those_of_the_model_on_the_gpu():
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    x = torch.randn(256, 4096)
    direct = placer.profile(
        model.cuda(), x.cuda(), 1, cache=False, progress=False, granularity="fine"
    )
    graph = to_wire(capture_graph(model.cpu().train(), (x,), granularity="fine"))
    replayed = replay(ProfileRequest(graph=graph, devices=1))
    for one, other in zip(direct.layers, replayed.layers, strict=True):
        (kind,) = one.forward_ms
        assert other.forward_ms[kind] == pytest.approx(one.forward_ms[kind], rel=0.25)
        assert other.param_bytes == one.param_bytes


TEXTS = {
    "approximate",
    "assert_msg",
    "equation",
    "indexing",
    "mode",
    "norm",
    "ord",
    "pad_mode",
    "padding",
    "reduce",
}
TEXTS |= {"rounding_mode", "side"}
PLAIN_TEXT = {"a", "b", "el", "self", "separator", "string", "substr"}
"""Arguments of functions of text, which bear names of operators of tensors."""


def graph_of(*operations, results=("n0",), **layer):
    """A graph of one layer that reads one tensor of four numbers."""
    return Graph.model_validate(
        {
            "values": [
                {"name": "x", "shape": [4], "dtype": "float32"},
                {"name": "y", "shape": [4], "dtype": "float32", "source": "a"},
            ],
            "inputs": ["x"],
            "outputs": ["y"],
            "layers": [
                {
                    "name": "a",
                    "reads": ["x"],
                    "writes": ["y"],
                    "results": results,
                    "operations": operations,
                    **layer,
                }
            ],
        }
    )


def call(op, *args, out="n0", **kwargs):
    return {"op": op, "out": out, "args": args, "kwargs": kwargs}


R0 = {"ref": "r0"}


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.as_strided.default",
        "aten._unsafe_index.Tensor",
        "aten.record_stream.default",
        "aten.save.default",
        "aten.manual_seed.default",
        "aten.warn.default",
        "aten.__class__.default",
        "aten.add.__class__",
        "aten.add.out",
        "aten.add",
        "aten.add.Tensor.out",
        "aten..",
        "aten",
        "",
        "prims.add.default",
        "torchvision.nms.default",
        "profiler._record_function_enter.default",
        "number.__import__",
        "aten.mul.left_t",
        "aten.add.t",
        "aten.add.str",
        "aten.split.str",
        "aten.copy.Dict_str",
        "number.pow",
        "number.eval",
        "builtins.exec",
        "os.system",
        "torch.load",
        "placer.enter.more",
        "\u0000",
        "aten.add.Tensor\u0000",
    ],
)
def test_what_is_not_allowed_is_refused_before_anything_runs(op):
    with pytest.raises(
        ValueError if not op else InputError, match="layer 'a'" if op else "at least 1"
    ):
        rebuild(graph_of(call(op, R0, R0)))


@pytest.mark.parametrize(
    "operation",
    [
        call("placer.enter", "grad"),
        call("placer.enter", "inference", True),
        call("placer.enter", "autocast", "cpu", {"dtype": "float64"}, True, None),
        call("placer.enter", "autocast", "cpu", "bfloat16", True, None),
        call("placer.enter", "autocast", {"device": True}, None, True, None),
        call("aten.zeros.default", [4], pin_memory=True),
    ],
)
def test_regions_and_options_of_other_kinds_are_refused(operation):
    with pytest.raises(InputError, match="layer 'a'"):
        rebuild(graph_of(operation))


@pytest.mark.parametrize(
    "operations",
    [
        [call("aten.add.Tensor", R0)],
        [call("aten.add.Tensor", R0, "text")],
        [call("aten.add.Tensor", R0, R0, nonsense=1)],
        [call("aten.reshape.default", R0, [3, 5])],
        [call("aten.index_select.default", R0, 0, {"ref": "r0"})],
        [call("aten.select.int", R0, 0, 99)],
        [call("aten.zeros.default", [2**40], dtype={"dtype": "float64"}, device={"device": True})],
        [call("aten.zeros.default", [4], dtype={"dtype": "object"})],
        [call("aten.zeros.default", [4], dtype={"dtype": "Tensor"})],
        [call("aten.contiguous.default", R0, memory_format={"memory_format": "__dict__"})],
        [call("number.getitem", R0, 0)],
        [call("number.getitem", "text", 0)],
        [call("number.mul", "x", 10**9)],
        [call("number.mul", [1, 2], 10**9)],
        [call("number.floordiv", 1, 0)],
        [call("number.mul", 2**62, 2**62)],
        [call("placer.leave")],
        [call("aten.item.default", R0)],
        [call("aten.linear.default", R0, None)],
    ],
)
def test_what_cannot_run_is_an_error_that_names_the_layer(operations):
    with pytest.raises(ProfilingError, match="layer 'a'"):
        replay(ProfileRequest(graph=graph_of(*operations), devices=1, repeats=1))


def test_numbers_that_grow_without_end_are_stopped():
    grown = [
        call("number.mul", {"ref": f"n{index - 1}"} if index else 3, 3, out=f"n{index}")
        for index in range(1000)
    ]
    with pytest.raises(ProfilingError, match="above 2 \\*\\* 63"):
        replay(ProfileRequest(graph=graph_of(*grown), devices=1, repeats=1))


def test_a_value_is_freed_when_no_later_operation_needs_it():
    doubled = [call("aten.mul.Tensor", R0, 2.0, out="n0")]
    doubled += [
        call("aten.mul.Tensor", {"ref": f"n{index}"}, 2.0, out=f"n{index + 1}")
        for index in range(50)
    ]
    graph = rebuild(graph_of(*doubled, results=["n50"]))
    alive, most = set(), 0

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            result = func(*args, **(kwargs or {}))
            import weakref

            alive.add(id(result))
            weakref.finalize(result, alive.discard, id(result))
            most = max(most, len(alive))
            return result

    with Counted():
        graph.layers[0].function(torch.device("cpu"), [], [torch.ones(4)])
    assert most <= 3


def test_what_a_stranger_says_of_its_layers_stays_out_of_the_cache():
    graph = rebuild(graph_of(call("aten.add.Tensor", R0, R0)))
    assert not graph.layers[0].signature_is_complete


def test_every_allowed_name_is_an_operator_of_this_torch():
    known = {
        name
        for name in allowed_ops.ALLOWED
        if hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, name + "_")
    }
    assert known == allowed_ops.ALLOWED


def test_the_only_text_that_an_allowed_operator_takes_is_a_mode_an_equation_or_a_message():
    taken = set()
    for name in allowed_ops.ALLOWED:
        for form in (name, f"{name}_"):
            packet = getattr(torch.ops.aten, form, None)
            for overload in packet.overloads() if packet else ():
                arguments = getattr(packet, overload)._schema.arguments
                taken |= {argument.name for argument in arguments if "str" in str(argument.type)}
    assert taken <= TEXTS | PLAIN_TEXT
    for name in allowed_ops.ALLOWED:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet else ():
            arguments = getattr(packet, overload)._schema.arguments
            if any(
                argument.name in PLAIN_TEXT and "str" in str(argument.type)
                for argument in arguments
            ):
                with pytest.raises(InputError):
                    allowed_ops.find(f"aten.{name}.{overload}")


def test_a_request_says_nothing_of_the_machine_it_comes_from():
    text = json.dumps(to_wire(capture_graph(small(), (X,))).model_dump(mode="json"))
    assert "/" not in text.replace("\\/", "")
