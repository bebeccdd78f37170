"""A graph that does something else than its model is not used: the model runs through hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.executor.placed_model import PlacedModel
from placer.testing import logical_devices


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class OtherResult(Linears):
    """Code that asks whether it is traced, as that of libraries does."""

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x) * (2 if torch.compiler.is_exporting() else 3)}


class OtherGradient(Linears):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.second(x.detach() if torch.compiler.is_exporting() else x)


class OtherWrite(Linears):
    """Leaves something else in what it was given."""

    def forward(self, x: Tensor, kept: list[Tensor]) -> Any:  # type: ignore[override]
        y = super().forward(x)
        kept.append(y * (2 if torch.compiler.is_exporting() else 3))
        return y


class Noisy(Linears):
    """Its numbers are drawn anew in each run, and its statistics are of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.drop(self.norm(super().forward(x))) + torch.randn_like(x)


def _flow(model: nn.Module) -> placer.DataFlow:
    flow = placer.DataFlow(model, device_ids=2)
    flow.layer_gpus.update(first=0, second=1)
    flow.update_flow()
    return flow


def test_a_graph_with_another_result_is_not_used_and_the_reason_names_the_output() -> None:
    model, x = OtherResult(), torch.randn(3, 4)
    want = model(x)["y"]
    with logical_devices(2):
        flow = _flow(model)
        torch.testing.assert_close(flow(x)["y"].cpu(), want)
        assert (
            "its graph gives other results than the model: output ['y'] is"
            in flow.not_captured_because
        )


def test_a_graph_with_other_gradients_is_not_used_in_training() -> None:
    model, x = OtherGradient(), torch.randn(4, 4)
    twin = copy.deepcopy(model)
    twin(x).square().mean().backward()
    with logical_devices(2):
        flow = _flow(model)
        step = flow.train_step(lambda y, _: y.square().mean())
        with pytest.warns(
            UserWarning,
            match=r"another gradient than the model: the gradient of 'first\.weight' has",
        ):
            step(x, chunks=2)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
        flow.eval()
        with torch.no_grad():
            flow(x)
        assert flow.not_captured_because == ""  # its results are right


def test_a_graph_that_leaves_something_else_in_its_inputs_is_not_used() -> None:
    model, x, kept, found = OtherWrite(), torch.randn(3, 4), [], []
    model(x, kept)
    with logical_devices(2):
        flow = _flow(model)
        flow(x, found)
        torch.testing.assert_close(found[0].cpu(), kept[0])
        assert len(found) == 1
        assert "what forward leaves in its inputs" in flow.not_captured_because


def test_a_model_with_noise_is_captured_and_left_as_it_was() -> None:
    model, x = Noisy(), torch.randn(6, 4)
    with logical_devices(2):
        flow = _flow(model)
        state = torch.get_rng_state()
        flow(x)
        assert flow.not_captured_because == ""
    # a graph does not count calls
    assert model.calls == 0 and model.norm.num_batches_tracked == 1
    torch.set_rng_state(state)
    torch.randn_like(x)
    assert not any(one.grad is not None for one in model.parameters())


def test_each_capture_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    original = PlacedModel.difference
    monkeypatch.setattr(
        PlacedModel,
        "difference",
        lambda self, *args: compared.append(args) or original(self, *args),
    )
    with logical_devices(2):
        flow = _flow(Linears())
        for size in (3, 3, 5, 8):
            flow(torch.randn(size, 4))
    assert len(compared) == 1
