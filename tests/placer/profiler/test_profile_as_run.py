"""A model is profiled as its user runs it: at its batch sizes, in its modes, on what its tensors
are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_profiles import TOKENS, quick_profile, small_cnn, small_gpt
from torch import Tensor, nn

from placer.errors import InputError
from placer.testing import logical_devices


def test_a_model_on_meta_profiles() -> None:
    with torch.device("meta"):
        model = small_cnn()
        x = torch.randn(2, 3, 8, 8)
    found = quick_profile(model, x)
    real = quick_profile(small_cnn(), torch.randn(2, 3, 8, 8))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [layer.saved_bytes for layer in found.layers] == [
        layer.saved_bytes for layer in real.layers
    ]
    assert found.edges == real.edges
    assert found.graph_hash == real.graph_hash


def test_token_numbers_on_meta_are_valid() -> None:
    with torch.device("meta"):
        model = small_gpt()
    assert quick_profile(model, TOKENS.to("meta")).edges == quick_profile(model, TOKENS).edges


@pytest.mark.parametrize("given", [(torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)), None])
def test_inputs_may_be_positional_or_named(given: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            result: Tensor = self.inner(x).masked_fill(mask, 0.0)
            return result

    named = {"mask": torch.ones(2, 4, dtype=torch.bool), "x": torch.randn(2, 4)}
    assert quick_profile(Masked(), given or named).layers[0].name == "inner"


def test_several_batch_sizes_give_profiles_of_the_same_layers_the_smallest_first() -> None:
    model = small_cnn()
    small, large = quick_profile(
        model, torch.randn(4, 3, 8, 8), batch_sizes=(6, 2), granularity="fine"
    )
    assert (small.batch_size, large.batch_size) == (2, 6)
    assert [layer.name for layer in small.layers] == [layer.name for layer in large.layers]
    assert small.granularity == large.granularity == "fine"
    assert [3 * edge.bytes for edge in small.edges] == [edge.bytes for edge in large.edges]
    assert small.cluster == large.cluster


def test_each_batch_size_gives_what_an_example_of_that_size_gives() -> None:
    model = small_gpt()
    found = quick_profile(model, TOKENS, batch_sizes=[1, 3])
    for measured, example in zip(found, (TOKENS[:1], torch.cat([TOKENS, TOKENS[:1]])), strict=True):
        alone = quick_profile(
            model, example, granularity=tuple(layer.name for layer in measured.layers)
        )
        assert [layer.saved_bytes for layer in measured.layers] == [
            layer.saved_bytes for layer in alone.layers
        ]
        assert measured.edges == alone.edges


def test_only_what_has_the_batch_as_its_first_dimension_is_resized() -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor, bias: Tensor, scale: float) -> Tensor:
            return (x + bias) * scale

    (found,) = quick_profile(Biased(), (torch.randn(4, 8), torch.randn(8), 2.0), batch_sizes=[6])
    assert (found.batch_size, len(found.layers)) == (6, 1)


@pytest.mark.parametrize("sizes", [(), (0, 2), (2, 2), (2.5,), ("2", "4"), 8])
def test_batch_sizes_that_cannot_be_are_refused(sizes: Any) -> None:
    with pytest.raises(InputError, match="batch_sizes"):
        quick_profile(nn.Linear(4, 4), torch.randn(2, 4), batch_sizes=sizes)


def test_under_autocast_values_have_the_size_that_they_then_have() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    x = torch.randn(4, 16)
    full = quick_profile(model, x, granularity="fine")
    with torch.autocast("cpu", torch.bfloat16):
        half = quick_profile(model, x, granularity="fine")
    assert [edge.bytes for edge in full.edges] == [4 * 64, 4 * 64]
    assert [edge.bytes for edge in half.edges] == [2 * 64, 2 * 64]
    assert [edge.gradient_bytes for edge in half.edges] == [2 * 64, 2 * 64]
    # The half-precision copy of a weight is made in every pass, and kept for the way back.
    assert half.layers[1].saved_bytes == full.layers[1].saved_bytes + 2 * 256


def test_of_a_compiled_module_the_layers_inside_are_measured_as_they_will_run() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(8, 4))  # type: ignore[arg-type]
    found = quick_profile(model, torch.randn(2, 8), granularity="fine")
    assert found.captured
    assert [layer.module for layer in found.layers] == ["Linear", "ReLU", "Linear"]


def test_layouts_are_measured_as_the_user_has_them() -> None:
    layouts = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.placer_test.watch(x)

    library = torch.library.Library("placer_test", "FRAGMENT")
    library.define("watch(Tensor x) -> Tensor")

    def watch(x: Tensor) -> Tensor:
        layouts.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        return x * 2

    library.impl("watch", watch, "CompositeExplicitAutograd")
    library.impl("watch", lambda x: torch.empty_like(x), "Meta")
    model = nn.Sequential(nn.Conv2d(4, 8, 3), Watching()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    for example in (x, x.to("meta")):
        layouts.clear()
        quick_profile(model, example, granularity="fine", training=False)
        assert layouts
        assert all(layouts)


def test_sparse_gradients_profile() -> None:
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Linear(8, 4))
    found = quick_profile(model, torch.arange(6).reshape(2, 3), optimizer="sgd")
    assert [layer.grad_bytes for layer in found.layers] == [4 * 800, 4 * 36]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_are_measured_wherever_it_is_called(context: Any) -> None:
    model = nn.Linear(4, 4)
    with context():
        found = quick_profile(model, torch.randn(2, 4))
    # the input and the result
    assert found.layers[0].saved_bytes == 2 * 4 * 4 + 2 * 4 * 4


def test_a_model_that_cannot_be_captured_profiles() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x))
            result: Tensor = self.last(2 * y if y.sum().item() > 0 else y)
            return result

    model = Branching()
    found = quick_profile(model, torch.randn(4, 8))
    assert not found.captured
    assert found.not_captured_because
    assert [layer.name for layer in found.layers] == ["first", "norm", "last"]
    assert [layer.param_bytes for layer in found.layers] == [4 * 72, 4 * 16, 4 * 72]
    assert int(model.norm.num_batches_tracked) == 0  # type: ignore[arg-type]


def test_a_model_profiles_among_logical_devices() -> None:
    x = torch.randn(2, 3, 8, 8)
    with logical_devices(3):
        found = quick_profile(small_cnn(), x, None)
    assert found.cluster is not None
    assert [device.name for device in found.cluster.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    alone = quick_profile(small_cnn(), x)
    assert [layer.saved_bytes for layer in found.layers] == [
        layer.saved_bytes for layer in alone.layers
    ]
