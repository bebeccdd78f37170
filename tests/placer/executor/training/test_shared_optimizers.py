"""An optimizer that steps more than the model of one flow: two models, a prompt, weights that were
the model's."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from placer import DataFlow
from placer.errors import InputError
from placer.testing import logical_devices

X, Y = torch.randn(6, 6, dtype=torch.float64), torch.randint(4, (6,))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _placed(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = f"cpu:{2 * index // len(flow.layer_gpus)}"
    flow.update_flow()
    return flow


def _sgd(*parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for some in parameters for one in some], 0.1, momentum=0.5)


def _of_both(
    optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor = X, *, step: bool = True
) -> Tensor:
    """A step of the unsplit model, whose gradients were zeroed before."""
    loss = functional.cross_entropy(model(x), Y)
    loss.backward()
    if step:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def test_two_flows_are_trained_in_turn_by_one_optimizer() -> None:
    ours, theirs = (_net(), _net()), []
    theirs = [copy.deepcopy(model) for model in ours]
    whole, optimizer = (
        _sgd(*(model.parameters() for model in theirs)),
        _sgd(*(model.parameters() for model in ours)),
    )
    with logical_devices(2):
        steps = [_placed(model).train_step(functional.cross_entropy, optimizer) for model in ours]
        for _ in range(3):
            for model, step in zip(theirs, steps, strict=True):
                torch.testing.assert_close(step(X, Y, chunks=2).cpu(), _of_both(whole, model))
        # gradients of the one wait for the step of the other, and then no longer
        for _ in range(2):
            one, other = (_of_both(whole, model, step=model is theirs[1]) for model in theirs)
            torch.testing.assert_close(steps[0](X, Y, update=False).cpu(), one)
            torch.testing.assert_close(steps[1](X, Y).cpu(), other)
        torch.testing.assert_close(steps[0](X, Y).cpu(), _of_both(whole, theirs[0]))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_prompt_is_stepped_by_its_gradient_of_this_step(frozen: bool) -> None:
    model = _net().requires_grad_(not frozen)
    whole, prompt = copy.deepcopy(model), nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    known = nn.Parameter(prompt.detach().clone())
    theirs = _sgd([known], () if frozen else whole.parameters())
    step = _placed(model).train_step(
        functional.cross_entropy, _sgd([prompt], () if frozen else model.parameters())
    )
    for _ in range(3):
        torch.testing.assert_close(step(prompt, Y, chunks=2).cpu(), _of_both(theirs, whole, known))
        torch.testing.assert_close(prompt, known)
    if frozen:
        with pytest.raises(
            InputError, match="no parameter of this Sequential, and no input requires a gradient"
        ):
            step(prompt.detach(), Y)


def test_what_is_the_models_no_longer_is_not_stepped_by_gradients_of_before() -> None:
    model = _net()
    step = _placed(model).train_step(
        functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)
    )
    step(X, Y)
    parametrizations.weight_norm(model[2])
    before = model[2].parametrizations.weight.original1.detach().clone()
    step(X, Y)
    assert torch.equal(model[2].parametrizations.weight.original1.detach(), before)


def test_an_optimizer_of_sparse_gradients_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Linear(6, 4))
    with pytest.raises(
        InputError, match=r"SparseAdam needs sparse gradients.*optimizer.step\(\) yourself"
    ):
        _placed(model).train_step(
            functional.cross_entropy, torch.optim.SparseAdam(model[0].parameters())
        )


@pytest.mark.filterwarnings("ignore:the model is not captured")
@pytest.mark.parametrize("captured", [True, False])
def test_gradients_of_a_part_that_two_models_share_wait_too(captured: bool) -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if captured or y.sum().item() > -1e9 else -y

    trunk = nn.Linear(6, 8).double()
    ours = [Net(trunk, nn.Tanh(), nn.Linear(8, 4).double()) for _ in range(2)]
    theirs = copy.deepcopy(ours)
    heads = [model[2].parameters() for model in ours]
    whole = _sgd(theirs[0].parameters(), theirs[1][2].parameters())
    with logical_devices(2):
        optimizer = _sgd(trunk.parameters(), *heads)
        steps = [_placed(model).train_step(functional.cross_entropy, optimizer) for model in ours]
        for _ in range(3):
            _of_both(whole, theirs[0], step=False)
            _of_both(whole, theirs[1])
            steps[0](X, Y, chunks=2, update=False)
            steps[1](X, Y, chunks=2)
    for mine, other in zip(ours, theirs, strict=True):
        for one, another in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), another)


def test_a_measurement_does_not_take_the_place_of_gradients_that_wait() -> None:
    with logical_devices(2):
        flow = _placed(_net())
        step = flow.train_step(functional.cross_entropy)
        step(X, Y, update=False)
        with pytest.raises(InputError, match="wait for the next"):
            flow.measure(X, Y, step=step)
        step(X, Y)
        flow.measure(X, Y, step=step)
