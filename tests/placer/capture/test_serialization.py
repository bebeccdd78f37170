"""Graphs as data: they describe all that the layers do, and contain nothing of the model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from placer.capture.capture import capture_graph
from placer.capture.serialization import to_wire
from placer.errors import CaptureError, InputError
from placer.profiler.remote.replay import rebuild
from placer.schema.graph import Graph
from placer.zoo.gpt import GPT
from placer.zoo.unet import UNet


class Regions(nn.Module):
    """Regions, numbers computed from shapes, a constant, an infinity, and a buffer that changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        with torch.no_grad():
            scale = self.first(x).abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
        y = self.norm(y.float()) * scale + torch.tensor([0.5])
        rows = y.shape[0] * 2
        y = (
            y.repeat(2, 1)
            .view(rows, 8)
            .masked_fill(y.repeat(2, 1) > 3.0, float("-inf"))
            .clamp(min=-1e3)
        )
        return self.last(y.to(torch.float32))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(10, 6),
            nn.LSTM(6, 5, batch_first=True),
            nn.Linear(5, 10),
        )

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        return self.head(states.contiguous(memory_format=torch.contiguous_format))


MODELS = {
    "regions": (Regions, lambda: torch.randn(4, 8)),
    "recurrent": (Recurrent, lambda: torch.randint(10, (3, 7))),
    "unet": (lambda: UNet(3, 2, width=4), lambda: torch.randn(2, 3, 32, 32)),
    "gpt": (
        lambda: GPT(layers=2, width=16, heads=2, context=8, vocabulary=20, tied=True),
        lambda: torch.randint(20, (2, 8)),
    ),
}


def sent(graph):
    """Return the graph as the receiver has it."""
    return Graph.model_validate_json(to_wire(graph).model_dump_json(exclude_defaults=True))


@pytest.mark.covering
@pytest.mark.parametrize("half", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_computes_after_the_journey_what_it_computed_before(name, training, half):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = make().train(training), inputs()
    around = partial(torch.autocast, "cpu", torch.bfloat16, enabled=half, cache_enabled=False)
    with around():
        try:
            model(x)
        except RuntimeError as error:
            pytest.skip(f"torch itself cannot run this model in bfloat16 here: {error}")
        graph = capture_graph(model, (x,), granularity="fine")
        again = rebuild(sent(graph))
    values = dict(zip(graph.inputs, [x], strict=True))
    device = torch.device("cpu")
    for layer, copy in zip(graph.layers, again.layers, strict=True):
        results = []
        for one in (layer, copy):
            state = [graph.state[name].detach().clone() for name in layer.state]
            torch.manual_seed(1)
            reads = [
                item.clone() if isinstance(item, torch.Tensor) else item
                for item in map(values.get, layer.reads)
            ]
            # what is sent brings its autocast with it
            with around() if one is layer else nullcontext():
                results.append((one.function(device, state, reads), state))
        (before, state), (after, state_after) = results
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(state_after, state, rtol=0, atol=0)
        values.update(zip(layer.writes, before, strict=True))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", MODELS)
def test_the_rebuilt_graph_has_the_layers_values_and_state_of_the_captured_one(name):
    make, inputs = MODELS[name]
    graph = capture_graph(make(), (inputs(),))
    again = rebuild(sent(graph))
    assert again.values == graph.values
    assert (again.inputs, again.outputs, again.colocated) == (
        graph.inputs,
        graph.outputs,
        graph.colocated,
    )
    for layer, copy in zip(graph.layers, again.layers, strict=True):
        for field in (
            "name",
            "modules",
            "module_type",
            "state",
            "mutated",
            "reads",
            "writes",
            "signature",
            "random",
        ):
            assert getattr(copy, field) == getattr(layer, field)
        for key in layer.state:
            one, other = graph.state[key], again.state[key]
            assert (one.shape, one.dtype, one.requires_grad) == (
                other.shape,
                other.dtype,
                other.requires_grad,
            )
            assert other.is_meta and isinstance(other, nn.Parameter) == isinstance(
                one, nn.Parameter
            )


def test_no_weight_and_no_input_is_sent():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.123456789)
        model.bias.fill_(7.654321)
    text = to_wire(capture_graph(model, (torch.full((5, 3), 3.14159),))).model_dump_json()
    assert not any(secret in text for secret in ("0.1234", "7.6543", "3.1415"))


def test_a_model_on_meta_is_sent_as_one_with_weights():
    tokens = torch.randint(10, (3, 7))
    with torch.device("meta"):
        empty = Recurrent()
    here, there = (
        sent(capture_graph(Recurrent(), (tokens,))),
        sent(capture_graph(empty, (tokens.to("meta"),))),
    )
    assert [layer.operations for layer in here.layers] == [
        layer.operations for layer in there.layers
    ]


def test_weights_in_channels_last_arrive_in_it():
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    again = rebuild(sent(capture_graph(model, (torch.randn(1, 4, 8, 8),))))
    assert again.state["weight"].is_contiguous(memory_format=torch.channels_last)


def test_a_model_that_cannot_be_captured_is_named_with_the_reason():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(CaptureError, match="profile it on the machine with the devices"):
        to_wire(capture_graph(Branching(), (torch.ones(1, 2),)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g["layers"][0].update(reads=["nowhere"]), "no value made before it 'nowhere'"),
        (lambda g: g["layers"].append(g["layers"][0]), "listed twice"),
        (lambda g: g["layers"][0].update(state=["nothing"]), "no state 'nothing'"),
        (lambda g: g["layers"][0].update(results=[]), "1 writes and 0 results"),
        (lambda g: g["state"][0].update(shape=[2**40, 2**40]), "takes more than"),
        (lambda g: g["state"][0].update(shape=[-1]), "greater than or equal to 0"),
        (lambda g: g["state"][0].update(dtype="object"), "dtype: should be .*, not .object."),
        (
            lambda g: g["layers"][0]["operations"][0]["args"].append({"code": "x"}),
            "not an argument that can be sent",
        ),
        (
            lambda g: g["layers"][0]["operations"][0]["args"].append([[[[[1]]]]]),
            "nested too deeply",
        ),
        (
            lambda g: g["layers"][0]["operations"][0]["args"].append({"ref": "r0", "dtype": "x"}),
            "not an argument",
        ),
        (lambda g: g["layers"][0]["operations"][0]["args"].append(2**70), "64 bits"),
        (lambda g: g["layers"][0]["operations"][0]["args"].append("x" * 65), "at most 64"),
        (
            lambda g: g["layers"][0]["operations"][0]["args"].append({"device": "cuda:0"}),
            "not an argument that can be",
        ),
    ],
)
def test_a_graph_that_does_not_hold_together_is_refused(change, said):
    content = json.loads(
        to_wire(capture_graph(nn.Linear(3, 2), (torch.randn(4, 3),))).model_dump_json()
    )
    change(content)
    with pytest.raises(ValueError, match=said):
        Graph.model_validate(content)


def test_what_is_read_before_it_is_made_is_refused():
    content = json.loads(
        to_wire(capture_graph(nn.Linear(3, 2), (torch.randn(4, 3),))).model_dump_json()
    )
    content["layers"][0]["operations"][0]["args"][0] = {"ref": "n7"}
    with pytest.raises(InputError, match="'n7' is read before it is made"):
        rebuild(Graph.model_validate(content))
