"""Weights that are more than one block of numbers: their bytes are those stored, and layers are
measured with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from weight_kinds import KINDS, WIDTH, Kind, Linear, Packed, Scaled, State, batch_of, model_of

import placer
from placer.capture.capture import capture_graph
from placer.profiler.profile import profile
from placer.schema import Profile


def taken(model: nn.Module, x: Tensor, training: bool = False) -> Profile:
    return profile(model, x, ["cpu:0"], training=training, cache=False, progress=False, repeats=1)


def stored_bytes(kind: Kind, layer: nn.Module) -> int:
    """The bytes of different tensors; two with one memory are stored once."""
    return sum(
        {
            tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in kind.stored(layer)
        }.values()
    )


@pytest.mark.covering
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_that_are_stored(kind: str, training: bool) -> None:
    model = model_of(KINDS[kind]).train(training)
    layers = taken(model, batch_of(KINDS[kind]), training).layers
    first, last = layers[0], layers[-1]
    assert first.param_bytes + first.buffer_bytes == stored_bytes(KINDS[kind], model[0])
    assert last.param_bytes + last.buffer_bytes == stored_bytes(KINDS[kind], model[2])


@pytest.mark.parametrize("kind", ["wrapper", "attached object", "csr parameter"])
def test_a_frozen_weight_is_a_parameter_without_a_gradient(kind: str) -> None:
    layer = taken(model_of(KINDS[kind]).train(), batch_of(KINDS[kind]), training=True).layers[0]
    assert layer.param_bytes == stored_bytes(KINDS[kind], model_of(KINDS[kind])[0])
    assert layer.buffer_bytes == 0
    # of the bias
    assert layer.grad_bytes == (4 * WIDTH if KINDS[kind].trained else 0)


def test_the_gradient_of_a_trained_wrapper_is_one_block_of_numbers() -> None:
    model = nn.Sequential(Linear(Scaled.of))
    model[0].weight.requires_grad_()
    layer = taken(model.train(), batch_of(KINDS["wrapper"]), training=True).layers[0]
    assert layer.grad_bytes == 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture
def met() -> Iterator[list[Tensor]]:
    """The whole numbers that operations met."""
    Scaled.seen.clear()
    yield Scaled.seen
    Scaled.seen.clear()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", ["wrapper", "wrapper in a wrapper", "wrapper without a protocol"])
def test_a_layer_is_measured_with_the_numbers_that_it_has(
    kind: str, training: bool, met: list[Tensor]
) -> None:
    model = model_of(KINDS[kind]).train(training)
    weights = [KINDS[kind].stored(layer)[0] for layer in (model[0], model[2])]
    taken(model, batch_of(KINDS[kind]), training)
    real = [numbers for numbers in met if type(numbers) is Tensor]
    own = [weight.data_ptr() for weight in weights]
    copies = [numbers for numbers in real if numbers.data_ptr() not in own]
    assert copies  # layers are measured on copies
    assert all(any(torch.equal(numbers, weight) for weight in weights) for numbers in copies)


class Checked(nn.Module):
    """A layer that refuses to run with another state than its own."""

    def __init__(self) -> None:
        super().__init__()
        whole = Scaled.of(torch.randn(WIDTH, WIDTH))
        self.weight = Packed(whole.numbers, State(whole.scale, State(torch.full((1,), 0.5))))
        self.expected = [whole.numbers.tolist(), whole.scale.tolist()]
        self.runs: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.weight.state
        assert isinstance(self.weight, Packed)
        assert [self.weight.data.tolist(), state.scale.tolist()] == self.expected
        assert state.nested.scale.tolist() == [0.5]
        return functional.linear(x, self.weight.data.to(x.dtype) * state.value())


def test_a_layer_is_measured_with_the_state_that_is_attached_to_its_weight() -> None:
    taken(nn.Sequential(Checked(), nn.ReLU(), Checked()), batch_of(KINDS["wrapper"]))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_profiling_leaves_the_model_as_it_was(kind: str) -> None:
    model, x = model_of(KINDS[kind]), batch_of(KINDS[kind])
    before = [
        (id(tensor), tensor.data_ptr())
        for layer in (model[0], model[2])
        for tensor in KINDS[kind].stored(layer)
    ]
    states = [{**vars(parameter)} for parameter in model.parameters()]
    taken(model, x)
    if "sparse" not in kind and not kind.startswith(("coo", "csr", "csc", "attached")):
        after = [
            tensor.data_ptr()
            for layer in (model[0], model[2])
            for tensor in KINDS[kind].stored(layer)
        ]
        assert after == [place for _, place in before]
    assert [vars(parameter) for parameter in model.parameters()] == states
    with torch.no_grad():
        assert torch.equal(model(x), model_of(KINDS[kind])(x))


def test_state_that_moves_from_a_weight_to_its_module_moves_back_after_a_look() -> None:
    """Without its state the weight would be quantised again, from what is quantised already."""
    model: Any = model_of(KINDS["state that is taken away"])
    taken(model, batch_of(KINDS["state that is taken away"]))
    for layer in (model[0], model[2]):
        assert layer.weight.state is not None
        assert layer.own.scale is None


def test_wrappers_that_differ_inside_are_measured_apart() -> None:
    """Weights of one class, shape and type, of which one has a single scale."""

    def signature(weight_of: Any) -> str:
        return (
            capture_graph(nn.Sequential(Linear(weight_of)).eval(), batch_of(KINDS["wrapper"]))
            .layers[0]
            .signature
        )

    by_rows, again = signature(Scaled.of), signature(Scaled.of)
    single = signature(lambda weight: Scaled(weight.to(torch.int8), torch.ones(1)))
    assert by_rows == again != single


def test_a_layer_with_a_wrapper_is_measured_anew_in_each_run() -> None:
    """The class may do something else in the next run, and no signature tells."""
    graph = capture_graph(model_of(KINDS["wrapper"]), batch_of(KINDS["wrapper"]))
    assert [layer.signature_is_complete for layer in graph.layers] == [False, True, False]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("kind", ["wrapper", "attached object", "gptq"])
def test_a_suggested_placement_counts_what_devices_store(kind: str) -> None:
    model, x = model_of(KINDS[kind]), batch_of(KINDS[kind])
    placement = placer.suggest(
        model,
        x,
        devices=["cpu:0", "cpu:1"],
        training=False,
        progress=False,
        constraints=placer.Constraints(min_devices=2),
    )
    found = sorted(
        device.memory.param_bytes + device.memory.buffer_bytes for device in placement.devices
    )
    assert found == [stored_bytes(KINDS[kind], model[0])] * 2


def test_a_wrapper_on_meta_is_measured_on_random_numbers_inside() -> None:
    """A model that is too large for this machine: the layer still works on whole numbers and a
    scale."""
    model = nn.Sequential(Linear(Scaled.of)).eval()
    weight: Any = model[0].weight
    meta = Scaled(weight.numbers.to("meta"), weight.scale.to("meta"))
    model[0].weight = nn.Parameter(meta, requires_grad=False)
    model[0].bias = None
    layer = taken(model, batch_of(KINDS["wrapper"])).layers[0]
    assert layer.param_bytes == WIDTH * WIDTH + 4 * WIDTH
