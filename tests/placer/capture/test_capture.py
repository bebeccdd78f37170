from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from model_list import CASES, SMALL, Case
from small_models import Skips
from torch import Tensor, nn

from placer.capture import LayerGraph, capture_graph
from placer.capture.layers import named_state
from placer.capture.pytrees import flatten
from placer.errors import CaptureError, InputError


def _run(graph: LayerGraph, inputs: list[Any]) -> list[Any]:
    values = dict(zip(graph.inputs, inputs, strict=True))
    for layer in graph.layers:
        state = [graph.state[name] for name in layer.state]
        writes = layer.function(torch.device("cpu"), state, [values[name] for name in layer.reads])
        values.update(zip(layer.writes, writes, strict=True))
    return [values[name] for name in graph.outputs]


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", [*SMALL, CASES["BertForMaskedLM"]], ids=str)
def test_the_layers_one_after_another_compute_the_output_of_the_model(
    case: Case, training: bool
) -> None:
    model = case.make().train(training)
    args, kwargs = case.inputs(training)
    graph = capture_graph(model, args, kwargs)
    assert graph.captured
    assert graph.training == training
    torch.manual_seed(1)
    outputs = _run(graph, flatten((args, kwargs))[0])
    torch.manual_seed(1)
    expected = flatten(model(*args, **kwargs))[0]
    # in training the first run has changed running statistics, which the output does not depend on
    if not training:
        assert not any(layer.mutated for layer in graph.layers)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_state_is_the_users_own_tensors() -> None:
    model = Skips()
    graph = capture_graph(model, torch.randn(2, 5))
    own = named_state(model)
    for layer in graph.layers:
        for name in layer.state:
            assert graph.state[name] is own[name]


def test_capture_leaves_the_model_as_it_was() -> None:
    model = Skips()
    before = {name: tensor.clone() for name, tensor in named_state(model).items()}
    torch.manual_seed(2)
    state = torch.get_rng_state()
    capture_graph(model, torch.randn(2, 5))
    torch.manual_seed(2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in named_state(model).items():
        assert torch.equal(tensor, before[name])
        assert tensor.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_values_carry_shape_dtype_bytes_and_batch_dimension() -> None:
    graph = capture_graph(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.randn(3, 4), granularity="fine"
    )
    value = graph.values[graph["0"].writes[0]]
    assert (value.shape, value.dtype, value.bytes, value.batch_dim) == (
        (3, 6),
        torch.float32,
        3 * 6 * 4,
        0,
    )
    assert value.requires_grad
    assert value.source == "0"
    assert graph.batch_size == 3


class ScaledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, scale: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * scale, self.linear.weight * scale


def test_of_a_number_before_the_batch_no_weight_that_is_as_long_is_taken_for_a_batch() -> None:
    graph = capture_graph(ScaledTwice(), (torch.tensor(2.0), torch.randn(3, 4)))
    assert [graph.values[name].batch_dim for name in graph.outputs] == [0, None]


def test_running_statistics_are_mutated_in_training_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = capture_graph(model, torch.randn(3, 4), granularity="fine")
    assert {"1.running_mean", "1.running_var"} <= set(graph["1"].mutated)
    assert capture_graph(model.eval(), torch.randn(3, 4), granularity="fine")["1"].mutated == ()


def test_layers_that_draw_random_numbers_say_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    graph = capture_graph(model, torch.randn(3, 4), granularity="fine")
    assert [layer.random for layer in graph.layers] == [False, True]


def test_a_model_on_meta_is_captured() -> None:
    with torch.device("meta"):
        model = Skips()
    graph = capture_graph(model, torch.randn(2, 5, device="meta"), granularity="fine")
    assert graph.captured
    assert len(graph.layers) == 8


def test_without_the_hook_path_a_refusal_is_an_error() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"torch\.export"):
        capture_graph(Branch(), torch.randn(2), hooks=False)


_HASH = """
import torch
from placer import capture_graph
from placer.zoo import gpt
def found(width):
    model = gpt(layers=2, width=width, heads=2, context=8, vocabulary=20)
    return capture_graph(model, torch.randint(0, 20, (2, 8))).hash
"""


@pytest.mark.exhaustive
def test_the_hash_is_the_same_in_every_process_and_another_for_another_size() -> None:
    here: dict[str, Any] = {}
    exec(_HASH, here)
    command = [sys.executable, "-P", "-c", f"{_HASH}torch.manual_seed(5)\nprint(found(16))"]
    elsewhere = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert here["found"](16) == elsewhere != here["found"](32)


class _Elsewhere(nn.Module):
    """A model that names another device than the capture's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(self.linear(x), device="meta")


def test_a_device_that_the_model_names_stays_the_one_that_it_names() -> None:
    inputs = torch.randn(4, 2)
    (output,) = _run(capture_graph(_Elsewhere(), (inputs,)), [inputs])
    assert output.is_meta and output.shape == (4, 3)


def test_hooks_that_a_look_puts_on_modules_are_taken_away() -> None:
    class Hooks(nn.Module):
        """A model that adds a hook to a module at its first call, as transformers' models do."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.hooked = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.hooked:
                self.hooked = True
                self.first.register_forward_hook(lambda module, args, output: output * 2)
            return self.second(self.first(x))

    model = Hooks()
    x = torch.randn(3, 4)
    layers = capture_graph(model, x).layers
    assert len(layers) == 2
    assert not model.hooked and not model.first._forward_hooks
    once = model(x)
    assert len(model.first._forward_hooks) == 1
    torch.testing.assert_close(model(x), once)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification"])
def test_hooks_of_transformers_own_are_captured(name: str) -> None:
    case = CASES[name]
    model = case.make()
    model.enable_input_require_grads()
    args, kwargs = case.inputs(True)
    model(*args, **kwargs, output_hidden_states=True)  # puts on hooks that stay
    assert any(child._forward_hooks for child in model.modules())
    graph = capture_graph(model, args, {**kwargs, "output_hidden_states": True})
    assert graph.captured, graph.not_captured_because


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if y.sum() > 0 else y


def test_the_line_of_the_model_that_cannot_be_captured_is_told() -> None:
    with pytest.raises(
        CaptureError,
        match=r"data-dependent.*\(at .*test_capture\.py:\d+: return y \* 2 if y\.sum\(\)",
    ):
        capture_graph(_Branches(), torch.randn(2, 4), hooks=False)


def test_a_granularity_in_the_place_of_keyword_arguments_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match=r"kwargs is a str; .*granularity='fine'"):
        capture_graph(nn.Linear(2, 2), torch.ones(1, 2), "fine")  # type: ignore[arg-type]
