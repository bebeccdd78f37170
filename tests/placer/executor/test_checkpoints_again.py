"""What a checkpoint runs again in a backward pass runs where it ran before, with or without
``flow.applied()``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_captures import count_captures
from splitting import TOLERANCE, scatter_layers, twins
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from placer import DataFlow
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)

Loss = Callable[[nn.Module, Tensor], Tensor]


class Own(torch.autograd.Function):
    """A checkpoint as repositories of diffusion models have it."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.function(x)
        return None, *torch.autograd.grad(result, (x, *parameters), gradient, allow_unused=True)


class Coder(nn.Module):
    """Its parts and a parameter of its own, with operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.up = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def mixed(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(self.down(x) + x[:, :6]) * self.scale + x
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(self.down(x)) * self.scale
        return result


class Asks(Coder):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 1e9 else -x)


def _place(model: nn.Module, seed: int = 0) -> DataFlow:
    flow = DataFlow(model, fine_grained=True)
    scatter_layers(flow, 3, seed)
    return flow


def _leaf() -> Tensor:
    return X.clone().requires_grad_()


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = (x, *model.parameters())
    return [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


def _assert_close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def _of_method(model: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(model.mixed, x, use_reentrant=reentrant).pow(2).sum()


def _of_parts(model: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    h = checkpoint(model.down, x, use_reentrant=reentrant) + x[:, :6]
    return (
        (checkpoint(lambda h: model.up(h) * model.scale + h.mean(), h, use_reentrant=reentrant))
        .pow(2)
        .sum()
    )


def _of_model(model: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(model, x, use_reentrant=reentrant).pow(2).sum() + model.down(x).sum()


def _of_own(model: nn.Module, x: Tensor, _: bool) -> Tensor:
    return Own.apply(model.mixed, x, *model.parameters()).pow(2).sum() + model.down(x).sum()


@pytest.mark.covering
@pytest.mark.parametrize("make", [Coder, Asks])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("loss", [_of_method, _of_parts, _of_model, _of_own])
def test_gradients_through_checkpoints_of_the_callers_are_the_unsplit_models(
    loss: Callable[[nn.Module, Tensor, bool], Tensor],
    is_inside: bool,
    reentrant: bool,
    make: type[Coder],
) -> None:
    # Operations between modules met tensors of two devices, or the model ran as if it had not been
    # split.
    for seed in range(3):
        model, reference = twins(make)
        x, y = _leaf(), _leaf()
        loss(reference, y, reentrant).backward()
        with logical_devices(3):
            flow = _place(model, seed)
            with flow.applied():
                result = loss(model, x, reentrant)
                if is_inside:
                    result.backward()
            if not is_inside:
                result.backward()
            _assert_close(_gradients(model, x), _gradients(reference, y))


def test_an_operation_runs_again_on_the_device_that_it_ran_on() -> None:
    """Which one that is depends on the module before, and a checkpoint refuses to run anything
    elsewhere."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        up = model.up(model.down(x))
        product = checkpoint(lambda a, b: (a * b).tanh() * a, x, up, use_reentrant=False)
        # the latest module is another in the backward pass
        return product.sum() + model.down(x).mean()

    model, reference = twins(Coder)
    x, y = _leaf(), _leaf()
    loss(reference, y).backward()
    with logical_devices(3):
        flow = _place(model)
        flow.layer_gpus.update({"down.0": 1, "down.1": 1, "up": 2})
        flow.update_flow()
        with flow.applied():
            loss(model, x).backward()
        _assert_close(_gradients(model, x), _gradients(reference, y))


class _WithBias(nn.Module):
    """Makes a bias next to its activations, as a leaf, for later layers, as a T5 layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        if bias is None:
            bias = torch.zeros(1, 8, device=x.device, dtype=x.dtype)
            bias.requires_grad = True
        return x + bias, bias


class _Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([_WithBias(), _WithBias()])

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.first(x), None
        for layer in self.layers:
            x, bias = checkpoint(layer, x, bias, use_reentrant=True)
        return x


def test_what_runs_again_is_told_the_device_of_a_tensor() -> None:
    # A backward pass leaves torch's function modes: the device was a bare cpu, the bias was moved
    # from the host, and so its gradient was moved back there.
    model, reference = twins(_Biased)
    x, y = _leaf(), _leaf()
    reference(y).pow(2).sum().backward()
    with logical_devices(2):
        flow = DataFlow(model, fine_grained=True)
        flow.layer_gpus.update({"first": 0, "layers.0.linear": 0, "layers.1.linear": 1})
        flow.update_flow()
        flow(x).pow(2).sum().backward()
        _assert_close(_gradients(model, x), _gradients(reference, y))


@pytest.mark.parametrize("make", [Coder, Asks])
def test_a_checkpoint_may_run_the_flow_itself(
    make: type[Coder], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What capturing saved for a backward pass of its own counted as the checkpoint's, and the error
    # by which it ends what it runs again was told as a segment's, or had a model captured anew that
    # cannot be.
    model, reference = twins(make)
    made = count_captures(monkeypatch)
    with logical_devices(3):
        flow = _place(model)
        for _ in range(3):
            x, y = _leaf(), _leaf()
            checkpoint(flow, x, use_reentrant=False).pow(2).sum().backward()
            checkpoint(reference, y, use_reentrant=False).pow(2).sum().backward()
            _assert_close(_gradients(model, x), _gradients(reference, y))
    assert len(made) == 1


@pytest.mark.parametrize("loss", [_of_method, _of_model])
@pytest.mark.parametrize("is_inside", [True, False])
def test_the_threads_of_autograd_wait_for_nobody(
    loss: Callable[..., Tensor], is_inside: bool
) -> None:
    """Each GPU has one; the thread that holds the flow waits for them."""
    model, reference = twins(Coder)
    x, y = _leaf(), _leaf()
    loss(reference, y, False).backward()
    flow = DataFlow(model, ["cpu:0", "cpu:1"], fine_grained=True)
    scatter_layers(flow, 2)
    with flow.applied():
        result = loss(model, x, False)
        backward = threading.Thread(target=result.backward, daemon=True)
        if is_inside:
            backward.start()
            backward.join(30)
    if not is_inside:
        backward.start()
        backward.join(30)
    assert not backward.is_alive()
    _assert_close(_gradients(model, x), _gradients(reference, y))


def test_a_module_that_a_checkpoint_ran_may_be_gone_at_the_end() -> None:
    model, _ = twins(Coder)
    with logical_devices(3):
        flow = _place(model)
        with flow.applied():
            checkpoint(model.down, _leaf(), use_reentrant=False).sum().backward()
            del model.down


def test_nothing_is_left_on_a_model_whose_backward_pass_is_to_come() -> None:
    # Hooks that were left moved things when the model ran by itself.
    model, reference = twins(Coder)
    x, y = _leaf(), _leaf()
    _of_method(reference, y, False).backward()
    with logical_devices(3):
        flow = _place(model)
        with flow.applied():
            result = _of_method(model, x, False)
            with torch.no_grad():
                model.down(X)
        assert not any(
            child._forward_hooks or child._forward_pre_hooks for child in model.modules()
        )
        result.backward()
        assert not any(
            child._forward_hooks or child._forward_pre_hooks for child in model.modules()
        )
        _assert_close(_gradients(model, x), _gradients(reference, y))


def test_checkpoints_are_torchs_own_again_afterwards() -> None:
    was = (
        torch.utils.checkpoint.CheckpointFunction.apply,
        vars(torch.utils.checkpoint)["checkpoint"],
    )
    model, _ = twins(Coder)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.update_flow()
    with flow.applied():
        functional.mse_loss(checkpoint(model.mixed, _leaf(), use_reentrant=True), X).backward()
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)
    assert was == (
        torch.utils.checkpoint.CheckpointFunction.apply,
        vars(torch.utils.checkpoint)["checkpoint"],
    )
