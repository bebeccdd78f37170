from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import TiedTokens
from splitting import scatter_layers, twins
from torch import nn

from placer import DataFlow, devices
from placer.errors import InputError
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
TOKENS = torch.tensor([[1, 2], [0, 6]])


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_switching_between_maps_moves_no_weight_and_gives_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, reference = twins(_layers, training=False)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        flow(X)
        monkeypatch.setattr(
            "placer.executor.state.state_moves.relocate",
            lambda *_: pytest.fail("a weight was moved"),
        )
        for seed in range(4):
            scatter_layers(flow, 3, seed)
            torch.testing.assert_close(flow(X).cpu(), reference(X), atol=1e-10, rtol=1e-10)


def test_tied_weights_have_one_clone_a_device() -> None:
    model, reference = twins(TiedTokens, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        flow.layer_gpus.update(embedding=1, mix=0, head=1)
        flow.update_flow()
        torch.testing.assert_close(flow(TOKENS).cpu(), reference(TOKENS), atol=1e-10, rtol=1e-10)
        (_, segments), *_ = flow.placed._plans.values()
        used = {step.layer.name: step.state for segment in segments for step in segment.steps}
        assert used["embedding"][0] is used["head"][0]
        assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("training", [True, False])
def test_training_is_refused_and_says_what_to_do(training: bool) -> None:
    model, _ = twins(_layers, training=training)
    with logical_devices(2):
        flow = DataFlow(model, enable_clone=True)
        scatter_layers(flow, 2)
        with pytest.raises(InputError, match=r"no_grad"):
            flow(X)


def test_clones_follow_a_change_of_the_weights() -> None:
    model, reference = twins(_layers, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        flow.layer_gpus.update({"0": 1, "3": 1})
        flow.update_flow()
        before = flow(X)
        for module in (model, reference):
            module[3].weight.mul_(2)
            module[0].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
        after = flow(X).cpu()
        assert not torch.allclose(before.cpu(), after)
        torch.testing.assert_close(after, reference(X), atol=1e-10, rtol=1e-10)
        for module in (model, reference):
            # another storage, which torch counts as no write
            module[3].weight.data = module[3].weight.detach() * 3
        torch.testing.assert_close(flow(X).cpu(), reference(X), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("fused", [True, False])
def test_clones_follow_an_optimizer_and_stay_while_others_step(fused: bool) -> None:
    # Torch does not count what the kernel of a fused step writes.
    model, reference = twins(_layers, training=False)
    other = nn.Linear(2, 2)
    with logical_devices(2):
        flow = DataFlow(model, enable_clone=True)
        flow.layer_gpus.update({"0": 1, "3": 1})
        flow.update_flow()
        steps = [
            torch.optim.SGD(each.parameters(), lr=0.1, fused=fused)
            for each in (model, reference, other)
        ]
        for _ in range(2):
            for module in (model, reference, other):
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
            steps[0].step(), steps[1].step()
            with torch.no_grad():
                torch.testing.assert_close(flow(X).cpu(), reference(X), atol=1e-10, rtol=1e-10)
            assert flow.placed.weights.clones is not None
            times_copied = flow.placed.weights.clones.times_copied
            steps[2].step()
            flow.placed.weights.clones.refresh()
            assert flow.placed.weights.clones.times_copied == times_copied


def test_construct_module_is_a_second_flow_on_the_same_clones() -> None:
    model, reference = twins(_layers, training=False)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        scatter_layers(flow, 3, 0)
        other = flow.construct_module({"0": 2, "1": 1, "2": 0, "3": 1})
        assert dict(other.layer_gpus) != dict(flow.layer_gpus)
        for run in (flow, other, flow):
            torch.testing.assert_close(run(X).cpu(), reference(X), atol=1e-10, rtol=1e-10)


def test_each_flow_on_the_same_clones_follows_a_change_of_the_weights() -> None:
    # The first flow that ran after it brought the clones up to date, and the others kept the ones
    # before.
    model, reference = twins(_layers, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        flow.layer_gpus.update({"0": 0, "3": 1})
        flow.update_flow()
        other = flow.construct_module({"0": 1, "1": 1, "2": 1, "3": 0})
        flow(X), other(X)
        for order in ((flow, other), (other, flow)):
            for module in (model, reference):
                module[0].weight.mul_(2)
                module[3].weight.mul_(2)
            for run in order:
                torch.testing.assert_close(run(X).cpu(), reference(X), atol=1e-10, rtol=1e-10)


def test_construct_module_without_clones_is_refused() -> None:
    with pytest.raises(InputError, match="enable_clone=True"):
        DataFlow(_layers()).construct_module()


def test_a_model_that_cannot_be_captured_is_refused_with_clones() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > 0 else x

    with logical_devices(2), torch.no_grad():
        flow = DataFlow(Branch().double().eval(), enable_clone=True)
        flow.update_flow()
        with pytest.raises(InputError, match="captured"):
            flow(X)


def test_the_weights_of_the_user_stay_where_they_were() -> None:
    model, _ = twins(_layers, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        scatter_layers(flow, 2)
        flow(X)
        assert {devices.location(parameter).index for parameter in model.parameters()} == {None}


def test_clones_follow_new_weights_at_the_address_of_freed_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4).double()).eval()
    weight, memory = model[0].weight, np.ones((4, 4))
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        flow.layer_gpus.update({"0": 1, "1": 0})
        flow.update_flow()
        weight.data = torch.from_numpy(memory)
        flow(X)
        weight.data = torch.empty(0)
        memory *= 2
        weight.data = torch.from_numpy(memory)
        torch.testing.assert_close(flow(X).cpu(), model(X))
