"""What state a placed model has: its optimizers, state_dict, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from small_flows import CPU, Model, X, placed
from splitting import twins
from torch import Tensor, nn

from placer import DataFlow
from placer.testing import logical_devices


def _train(run: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        run(X).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], 1.0
        )
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adamw_loop": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.05, foreach=False, amsgrad=True
    ),
    "adam_foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.05, foreach=True),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_made_before_trains_the_split_model_as_the_unsplit_one(name: str) -> None:
    model, reference = twins(Model)
    optimizer, other = (
        OPTIMIZERS[name](model.parameters()),
        OPTIMIZERS[name](reference.parameters()),
    )
    _train(reference, other, 4)
    with logical_devices(3):
        _train(placed(model, stem=1, head=2), optimizer, 4)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_given_along_moves_with_the_parameters(name: str) -> None:
    model, reference = twins(Model)
    optimizer, other = (
        OPTIMIZERS[name](model.parameters()),
        OPTIMIZERS[name](reference.parameters()),
    )
    for _ in range(2):
        _train(reference, other, 2)
    _train(model, optimizer, 2)
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(stem=1, head=2)
        flow.update_flow(optimizer=optimizer)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    assert value.device == (
                        torch.device("cpu") if key == "step" else parameter.device
                    )
        _train(flow, optimizer, 2)
        flow.undo()
        assert {
            v.device.index
            for s in optimizer.state.values()
            for v in s.values()
            if isinstance(v, Tensor)
        } == {None}
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("rename", [False, True])
def test_what_was_put_into_a_placed_model_goes_home_with_the_rest(rename: bool) -> None:
    # Home was known by name alone: a replaced head and a renamed weight stayed behind.
    model, _ = twins(Model)
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        if rename:
            nn.utils.parametrizations.weight_norm(model.head)
        else:
            model.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
        flow.update_flow()
        assert {parameter.device.index for parameter in model.head.parameters()} == {2}
        flow.undo()
        assert {parameter.device.index for parameter in model.parameters()} == {None}


def test_state_dict_keys_and_values_never_change() -> None:
    model, reference = twins(Model)
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        flow(X)
        assert list(model.state_dict()) == list(reference.state_dict())
        assert list(flow.state_dict()) == [f"module.{name}" for name in reference.state_dict()]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_loads_with_and_without_the_prefix(prefix: str) -> None:
    model, _ = twins(Model, training=False)
    other = Model().double().eval()
    state = {f"{prefix}{name}": value for name, value in other.state_dict().items()}
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        flow(X)
        result = flow.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        y = flow(X)
        assert model.head.weight.device == CPU[2]
    torch.testing.assert_close(y.detach().cpu(), other(X).detach(), atol=1e-10, rtol=1e-10)


def test_a_missing_key_is_an_error_of_load_state_dict() -> None:
    flow = DataFlow(Model())
    state = flow.state_dict()
    del state["module.head.bias"]
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        flow.load_state_dict(state)


def test_a_saved_state_dict_loads_into_a_plain_model(tmp_path: Path) -> None:
    model, reference = twins(Model)
    flow = placed(model, stem=1, head=2)
    flow(X)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    reference.load_state_dict(torch.load(tmp_path / "model.pt"))
    for ours, theirs in zip(
        model.state_dict().values(), reference.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_deepcopy_of_the_flow_is_a_flow_of_its_own() -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        flow(X)
        other = copy.deepcopy(flow)
        with torch.no_grad():
            model.head.weight.zero_()
        assert other.module.head.weight is not model.head.weight
        assert dict(other.layer_gpus) == dict(flow.layer_gpus)
    y = other(X)
    torch.testing.assert_close(y.detach(), reference(X).detach(), atol=1e-10, rtol=1e-10)


def test_a_copy_of_a_step_trains_the_copy_of_its_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus["1"] = 1
    flow.update_flow()
    step = flow.train_step(
        nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    x, target = torch.randn(4, 4), torch.randn(4, 2)
    step(x, target, chunks=2)
    for twin in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss = twin(x, target, chunks=2)
        assert all(map(torch.equal, before, model.parameters()))
        again = copy.deepcopy(step)
        torch.testing.assert_close(again(x, target, chunks=2), loss)
        for ours, theirs in zip(
            twin.placed.module.parameters(), again.placed.module.parameters(), strict=True
        ):
            assert not any(torch.equal(ours, parameter) for parameter in before)
            torch.testing.assert_close(ours, theirs)


def test_model_and_flow_are_pickled() -> None:
    model, reference = twins(Model, training=False)
    flow = placed(model, stem=1, head=2)
    flow(X)
    for loaded in (pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(flow))):
        torch.testing.assert_close(loaded(X), reference(X), atol=1e-10, rtol=1e-10)
    stream = io.BytesIO()
    torch.save(flow, stream)
    stream.seek(0)
    torch.testing.assert_close(
        torch.load(stream, weights_only=False)(X), reference(X), atol=1e-10, rtol=1e-10
    )
