"""Models whose state, calls or operations make splitting hard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_models import AWKWARD, AutocastInside, Checkpointed, MixedDtypes, NoModules
from covering import named
from small_models import Skips, TiedTokens
from splitting import assert_same, assert_split_equals_unsplit, scatter_layers, step, twins
from torch import Tensor, nn

from placer import DataFlow
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


# A norm is called twice too, old parametrisations draw and write as the newer ones do.
FURTHER = [
    *("called_twice", "detach_inside", "functional_dropout", "weight_norm", "spectral_norm"),
    "frozen",
]


@pytest.mark.covering
@MODES
@pytest.mark.parametrize("name", named(dict(zip(AWKWARD, AWKWARD, strict=True)), FURTHER))
def test_split_equals_unsplit(name: str, training: bool) -> None:
    assert_split_equals_unsplit(AWKWARD[name], (X,), training=training)


@MODES
def test_tied_embeddings_equal_unsplit(training: bool) -> None:
    assert_split_equals_unsplit(TiedTokens, (torch.tensor([[1, 2], [0, 6]]),), training=training)


def test_a_model_without_modules_runs_on_the_output_device() -> None:
    model, reference = twins(NoModules)
    with logical_devices(2):
        flow = DataFlow(model, output_device=1)
        flow.update_flow()
        split = step(flow, model, (X,), {})
        assert model.weight.device == torch.device("cpu:1")
    assert_same(split, step(reference, reference, (X,), {}))


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("seed", range(8))
def test_complex_skips_over_many_devices(seed: int) -> None:
    model, reference = twins(lambda: Skips(layers=7, features=4))
    with logical_devices(6):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 6, seed)
        split = step(flow, model, (X,), {})
    assert_same(split, step(reference, reference, (X,), {}))


def test_tied_parameters_stay_one_object_and_one_gradient_when_their_layers_are_apart() -> None:
    model, reference = twins(TiedTokens)
    tokens = torch.tensor([[1, 2], [0, 6]])
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(embedding=0, mix=1, head=2)
        flow.update_flow()
        split = step(flow, model, (tokens,), {})
        assert model.head.weight is model.embedding.weight
    assert_same(split, step(reference, reference, (tokens,), {}))


@pytest.mark.parametrize("make", [MixedDtypes, AutocastInside])
def test_mixed_dtypes_equal_unsplit(make: type[nn.Module]) -> None:
    dtype = torch.float64 if make is MixedDtypes else torch.float32
    model, reference = twins(make, dtype=dtype)
    whole = step(reference, reference, (X.to(dtype),), {})
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        split = step(flow, model, (X.to(dtype),), {})
    assert [tensor.dtype for tensor in split.tensors] == [tensor.dtype for tensor in whole.tensors]
    assert_same(split, whole)


def test_autocast_around_the_flow_acts_as_around_the_model() -> None:
    model, reference = twins(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
        dtype=torch.float32,
    )
    x = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = step(reference, reference, (x,), {})
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            split = step(flow, model, (x,), {})
        outside = flow(x)
    assert split.tensors[0].dtype == torch.bfloat16
    assert outside.dtype == torch.float32
    assert_same(split, whole)


def test_no_grad_and_inference_mode_around_the_flow_keep_no_graph() -> None:
    model, reference = twins(Skips)
    x = X[:, :4].repeat(1, 2)[:, :5]
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with torch.no_grad():
            quiet = flow(x)
        assert not quiet.requires_grad
        assert flow(x).requires_grad
        with torch.inference_mode():
            inference = flow(x)
        assert inference.is_inference()
    with torch.no_grad():
        torch.testing.assert_close(quiet, reference(x), atol=1e-10, rtol=1e-10)


def test_gradient_checkpointing_inside_the_model_gives_the_same_gradients() -> None:
    assert_split_equals_unsplit(lambda: Checkpointed(use_reentrant=False), (X,))


def test_a_reentrant_checkpoint_is_not_captured_since_a_graph_would_train_nothing_after_it() -> (
    None
):
    # Captured, everything behind the checkpoint stood in a no_grad region that never ended.
    model, reference = twins(lambda: Checkpointed(use_reentrant=True))
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["stem"] = 1
        flow.update_flow()
        torch.manual_seed(1)
        y = flow(X)
        assert (
            "reentrant checkpoint" in flow.not_captured_because
            or "CheckpointFunction" in flow.not_captured_because
        )
    torch.manual_seed(1)
    torch.testing.assert_close(y.detach(), reference(X).detach(), atol=1e-10, rtol=1e-10)


def test_a_reentrant_checkpoint_over_two_devices_runs_again_on_both_in_the_backward_pass() -> None:
    # The hooks were gone when the backward pass ran the blocks again, and their inputs stayed where
    # they were.
    model, reference = twins(lambda: Checkpointed(use_reentrant=True))
    x = X.clone().requires_grad_()
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["stem"] = 1
        flow.update_flow()
        split = step(flow, model, (x,), {})
        flow.undo()
    assert_same(split, step(reference, reference, (x,), {}))
    assert not any(child._forward_pre_hooks for child in model.modules())


def test_forward_hooks_of_the_user_run_on_every_call() -> None:
    model, reference = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    seen: list[Any] = []
    handle = model[0].register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(output.shape))
    )
    model[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    reference[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 1, "2": 2})
        flow.update_flow()
        split = step(flow, model, (X,), {})
        flow(X)
        assert seen == [(6, 4), (6, 4)]
        assert "hooks" in flow.not_captured_because
        handle.remove()
        flow(X)
        assert len(seen) == 2
    assert_same(split, step(reference, reference, (X,), {}))


def test_backward_hooks_of_the_user_run() -> None:
    model, _ = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    seen = []
    model[0].register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append(grad_output[0].shape)
    )
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 1, "2": 0})
        flow.update_flow()
        flow(X).sum().backward()
    assert seen == [torch.Size([6, 4])]


def test_parameter_hooks_run_on_the_parameter_itself() -> None:
    model, reference = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    for module in (model, reference):
        module[0].weight.register_hook(lambda gradient: gradient * 3)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 1, "1": 0})
        flow.update_flow()
        split = step(flow, model, (X,), {})
    assert_same(split, step(reference, reference, (X,), {}))


class _WritesBehind(nn.Module):
    """A layer writes through a view to an earlier result that the model also returns."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view, self.first, self.act, self.last = (
            view,
            nn.Linear(4, 4),
            nn.ReLU(inplace=True),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        return self.last(self.act(self.view(first))), first


@pytest.mark.parametrize("view", [Tensor.detach, lambda x: x[:], lambda x: x.t().t()])
def test_a_write_through_a_view_is_seen_in_what_the_model_returns(
    view: Callable[[Tensor], Tensor],
) -> None:
    # The write went to a copy on its own device.
    assert_split_equals_unsplit(lambda: _WritesBehind(view), (X,), kinds=("fine", "submodule"))
