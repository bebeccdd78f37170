from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from corruption import corrupt

import placer
from placer import devices
from placer.devices import routes
from placer.testing import logical_devices

ONE, TWO = torch.device("cpu", 0), torch.device("cpu", 1)


@pytest.fixture(autouse=True)
def no_detours_left() -> Iterator[None]:
    yield
    routes._detours.clear()


def test_a_copy_over_a_bad_link_arrives_changed_until_it_takes_the_detour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoilt = corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    with logical_devices(2):
        there = torch.ones(4).to(ONE)
        assert devices.copy(there, TWO).sum() == 5
        devices.detour(ONE, TWO)
        around = devices.copy(there, TWO)
        assert around.sum() == 4
        assert devices.location(around) == TWO
    assert spoilt() == 1


def test_only_the_bad_direction_takes_the_detour() -> None:
    devices.detour(ONE, TWO)
    assert devices.has_detour(ONE, TWO)
    assert not devices.has_detour(TWO, ONE)
    devices.straight(ONE, TWO)
    assert not devices.has_detour(ONE, TWO)


def test_gradients_take_the_detour_back(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch, ("cpu:1", "cpu:0"))
    gradients = []
    with logical_devices(2):
        for _ in range(2):
            x = torch.ones(4).to(ONE).requires_grad_()
            devices.move(x, TWO).sum().backward()
            assert x.grad is not None
            gradients.append(x.grad.sum().item())
            devices.detour(TWO, ONE)
    assert gradients == [5, 4]


def test_a_courier_takes_the_detour_and_uses_its_buffer_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoilt = corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    courier = devices.Courier()
    devices.detour(ONE, TWO)
    with logical_devices(2):
        target = torch.zeros(4).to(TWO)
        for value in (1.0, 2.0):
            courier.send(torch.full((4,), value).to(ONE), None, target, None, "values")
            assert target.tolist() == [value] * 4
    assert spoilt() == 0
    assert len(courier._stopovers) == 1


@pytest.mark.parametrize("detoured", [False, True])
def test_all_that_goes_at_one_time_arrives_and_is_one_delivery(detoured: bool) -> None:
    courier = devices.Courier()
    courier.trace = []
    if detoured:
        devices.detour(ONE, TWO)
    with logical_devices(2):
        sources = [
            torch.full((4,), 1.0).to(ONE),
            torch.full((4,), 2.0).to(ONE),
            torch.ones(2, dtype=torch.int64).to(ONE),
        ]
        targets = [torch.zeros_like(source).to(TWO) for source in sources]
        courier.send_all(sources, None, targets, None, "values", "together")
        assert [target.tolist() for target in targets] == [[1.0] * 4, [2.0] * 4, [1, 1]]
    assert [(item.source, item.target, item.label) for item in courier.trace] == [
        (ONE, TWO, "together")
    ]


@pytest.mark.parametrize("detoured", [False, True])
def test_a_placed_model_over_a_bad_link_is_right_by_the_detour_and_wrong_without(
    monkeypatch: pytest.MonkeyPatch, detoured: bool
) -> None:
    corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).double(),
        torch.randn(3, 4).double(),
    )
    expected = model(x)
    with logical_devices(2):
        flow = placer.DataFlow(model, device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update({"0": 0, "1": 1})
        flow.update_flow()
        if detoured:
            devices.detour(ONE, TWO)
        result = flow(x)
        assert torch.allclose(result.to("cpu"), expected, rtol=1e-12) is detoured


def test_a_placement_tells_which_links_to_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).double(),
        torch.randn(3, 4).double(),
    )
    expected = model(x)
    profile = placer.profile(model, x, ["cpu:0", "cpu:1"], progress=False, repeats=1)
    rules = placer.Constraints(pinned={"0": "cpu:0", "1": "cpu:1"})
    placement = placer.solve(placer.PlacementRequest(profile=profile, constraints=rules))
    assert placement.links_through_host == (("cpu:0", "cpu:1"),)
    routes._detours.clear()  # as in another process
    with logical_devices(2):
        flow = placer.DataFlow(model, device_ids=["cpu:0", "cpu:1"])
        flow.update_flow(placement)
        assert torch.allclose(flow(x).to("cpu"), expected, rtol=1e-12)


def test_links_between_devices_elsewhere_make_no_difference_here() -> None:
    devices.take_detours([("node7/cuda:0", "node8/cuda:0"), ("cpu:0", "cpu:1")])
    assert routes._detours == {(ONE, TWO)}


def test_filling_a_tensor_takes_the_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    devices.detour(ONE, TWO)
    with logical_devices(2):
        target = torch.zeros(4).to(TWO)
        devices.fill(target, torch.ones(4).to(ONE))
        assert target.tolist() == [1.0] * 4


def test_a_tied_weight_on_two_devices_trains_over_a_bad_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoilt = corrupt(monkeypatch, ("cpu:0", "cpu:1"), ("cpu:1", "cpu:0"))
    first, last = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    model, loss_fn = (
        torch.nn.Sequential(first, torch.nn.Tanh(), last).double(),
        torch.nn.functional.mse_loss,
    )
    x, goal = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    (gradient,) = torch.autograd.grad(loss_fn(model(x), goal), [first.weight])
    devices.take_detours([("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")])
    with logical_devices(2):
        flow = placer.DataFlow(model, device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
        flow.update_flow()
        flow.train_step(loss_fn)(x, goal, chunks=2)
        assert first.weight.grad is not None
        assert torch.allclose(first.weight.grad.to("cpu"), gradient, rtol=1e-10)
    assert spoilt() == 0


def test_a_stream_over_a_bad_link_gives_the_unsplit_models_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoilt = corrupt(monkeypatch, ("cpu:0", "cpu:1"), ("cpu:1", "cpu:0"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).double().eval()
    batches = [torch.randn(3, 4).double() for _ in range(5)]
    expected = [model(batch) for batch in batches]
    devices.take_detours([("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")])
    with logical_devices(2):
        flow = placer.DataFlow(model, device_ids=["cpu:0", "cpu:1"], inference_only=True)
        flow.layer_gpus.update({"0": 0, "1": 1})
        flow.update_flow()
        results = [result.to("cpu") for result in flow.stream(batches)]
    for result, wanted in zip(results, expected, strict=True):
        assert torch.allclose(result, wanted, rtol=1e-12)
    assert spoilt() == 0


def test_a_model_that_runs_through_hooks_takes_the_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            result: torch.Tensor = self.last(2 * y if y.sum().item() > 0 else y)
            return result

    spoilt = corrupt(monkeypatch, ("cpu:0", "cpu:1"))
    model, x = Branching().double(), torch.randn(3, 4).double()
    expected = model(x)
    devices.take_detours([("cpu:0", "cpu:1")])
    with logical_devices(2):
        flow = placer.DataFlow(model, device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update(first=0, last=1)
        flow.update_flow()
        assert torch.allclose(flow(x).to("cpu"), expected, rtol=1e-12)
    assert spoilt() == 0
