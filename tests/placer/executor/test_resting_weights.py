"""Models whose parameters rest on the host compute what the unsplit model does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from resting_blocks import BLOCKS, Block, make, placed, placement
from torch import Tensor, nn

from placer import BatchOptions, DataFlow, devices
from placer.devices import tensor_moves
from placer.errors import InputError, PlacementError
from placer.executor.segments import Segment, Step
from placer.executor.state.resting.weight_slots import Unit
from placer.testing import logical_devices


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    with logical_devices(2):
        yield


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("first", [BLOCKS, 4])
@pytest.mark.parametrize("resting", ["0", "13", "0246", "0123456", "456"])
def test_a_call_gives_the_unsplit_models_result(resting: str, first: int) -> None:
    flow, model, reference = placed(resting, first=first)
    x = torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(flow(x).cpu(), reference(x))
    for name, parameter in model.named_parameters():
        layer = name.split(".")[0]
        own = torch.device("cpu", 0 if int(layer) < first else 1)
        assert devices.location(parameter) == (devices.HOST if layer in resting else own)


@pytest.mark.parametrize("first", [BLOCKS, 4])
def test_modules_run_through_hooks_on_their_copies(first: int) -> None:
    flow, model, reference = placed("12456", first=first)
    x = torch.randn(4, 8)
    before = [*model.parameters()]
    with torch.no_grad(), flow.applied() as applied:
        found = applied[:3](applied[3:6](x))
        torch.testing.assert_close(found.cpu(), reference[:3](reference[3:6](x)))
    assert all(map(lambda one, other: one is other, model.parameters(), before))


def test_micro_batches_give_the_result_of_the_batch() -> None:
    flow, _, reference = placed("01356", first=3)
    x = torch.randn(6, 8)
    torch.testing.assert_close(flow(x, chunks=3).cpu(), reference(x))


@pytest.mark.parametrize("first", [BLOCKS, 3])
@pytest.mark.parametrize("size", [6, 7])
def test_micro_batches_share_the_copies_of_a_layer(
    size: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, _, reference = placed("01356", first=first)
    for rows in (6, 7):  # the second size makes the capture general
        flow(torch.randn(rows, 8), chunks=3)
    loads, load = [], Unit.load

    def noted(unit: Unit) -> None:
        loads.append(unit)
        load(unit)

    monkeypatch.setattr(Unit, "load", noted)
    x = torch.randn(size, 8)
    torch.testing.assert_close(flow(x, chunks=3).cpu(), reference(x))
    assert len(loads) == len(set(loads)) == 5


def test_micro_batches_that_change_state_run_one_after_another() -> None:
    class Counted(nn.Module):
        """Layers that add to one buffer, and read it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) + self.total
            self.total += x.detach().sum(0)
            result: Tensor = self.second(x) + self.total
            return result

    torch.manual_seed(0)
    model = Counted().eval()
    reference = copy.deepcopy(model)
    flow = DataFlow(model, inference_only=True)
    given = placement("")
    names = {"first": "cpu:0", "second": "cpu:0"}
    update = {"layer_devices": names, "resting": dict.fromkeys(names, "host")}
    flow.update_flow(given.model_copy(update=update))
    x = torch.randn(6, 8)
    with torch.no_grad():
        found = flow(x, chunks=3, batch_options=BatchOptions(verify=False))
        expected = torch.cat([reference(part) for part in x.split(2)])
    torch.testing.assert_close(found.cpu(), expected)


def test_new_weights_are_copied_in_the_next_call() -> None:
    flow, model, reference = placed("0246")
    x = torch.randn(4, 8)
    flow(x)
    with torch.no_grad():
        for each in (model, reference):
            each[2].up.weight.mul_(3)
    torch.testing.assert_close(flow(x).cpu(), reference(x))
    state = {name: tensor * 0.5 for name, tensor in reference.state_dict().items()}
    model.load_state_dict(state)
    reference.load_state_dict(state)
    torch.testing.assert_close(flow(x).cpu(), reference(x))


def test_undo_gives_the_parameters_memory_of_their_own() -> None:
    flow, model, reference = placed("0246", first=3)
    keys = list(model.state_dict())
    flow.undo()
    assert list(model.state_dict()) == keys == list(reference.state_dict())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
        assert devices.location(one) == devices.HOST


def test_another_placement_moves_resting_parameters_to_devices() -> None:
    flow, model, reference = placed("0246", first=3)
    flow.update_flow(placement("35", first=5))
    x = torch.randn(4, 8)
    torch.testing.assert_close(flow(x).cpu(), reference(x))
    assert devices.location(model[2].up.weight) == torch.device("cpu", 0)
    assert devices.location(model[3].up.weight) == devices.HOST


def test_two_slots_of_the_largest_layer_are_all_that_a_device_needs() -> None:
    flow, _, _ = placed("012345")
    flow(torch.randn(4, 8))
    resting = flow.placed.hooks.resting
    assert resting is not None
    (slots,) = resting.slots
    sizes = [devices.aligned_bytes(one) for one in Block().parameters()]
    assert [one.numel() for one in slots.memory] == [sum(sizes)] * 2


def test_parameters_that_other_layers_share_stay_on_their_device() -> None:
    model = make()
    model[3].up.weight = model[1].up.weight
    reference = copy.deepcopy(model)
    flow = DataFlow(model, inference_only=True)
    flow.update_flow(placement("1"))
    x = torch.randn(4, 8)
    torch.testing.assert_close(flow(x).cpu(), reference(x))
    assert devices.location(model[1].up.weight) == torch.device("cpu", 0)
    assert devices.location(model[1].down.weight) == devices.HOST


def test_hooks_do_not_align_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, _, reference = placed("0123")
    sizes: list[int] = []
    moved = tensor_moves.copy

    def noted(tensor: Tensor, device: torch.device, known: object = None) -> Tensor:
        sizes.append(tensor.numel())
        return moved(tensor, device, known)

    monkeypatch.setattr(tensor_moves, "copy", noted)
    x = torch.randn(1, 8)
    with torch.no_grad(), flow.applied() as applied:
        found = applied[:4](x)
    assert sizes == [x.numel()], "only the input moves, from the host"
    torch.testing.assert_close(found.cpu(), reference[:4](x))


def test_another_placement_frees_the_slots_at_once() -> None:
    flow, _, _ = placed("0123")
    with torch.no_grad(), flow.applied() as applied:
        applied[1](applied[0](torch.randn(1, 8)))
    flow(torch.randn(1, 8))
    resting = flow.placed.hooks.resting
    assert resting is not None
    memory = weakref.ref(resting.slots[0].memory[0])
    del resting
    gc.disable()
    try:
        flow.update_flow(placement("45"))
        assert memory() is None
    finally:
        gc.enable()


def test_parameters_of_other_classes_are_refused() -> None:
    class Packed(nn.Parameter):
        pass

    model = make()
    model[1].up.weight = Packed(model[1].up.weight.detach())
    with pytest.raises(PlacementError, match=r"'1\.up\.weight' is a Packed, which cannot rest"):
        DataFlow(model, inference_only=True).update_flow(placement("1"))


def test_a_captured_layer_may_be_larger_than_the_layers_of_the_map() -> None:
    flow, model, _ = placed("0123")
    flow(torch.randn(4, 8))
    resting = flow.placed.hooks.resting
    assert resting is not None
    place = torch.device("cpu", 0)
    state = [*model[0].parameters(), *model[1].parameters()]
    layer = SimpleNamespace(state=[str(number) for number in range(len(state))], mutated=())
    step = Step(layer, place, state, tuple(range(len(state))), (), ())  # type: ignore[arg-type]
    units = resting.attach([Segment(place, [step])])
    with torch.no_grad(), resting.reading(units):
        (unit,) = units[place]
        unit.enter()
        found = [devices.copy(view, devices.HOST) for view in unit.views]
        assert all(map(torch.equal, found, state))
    assert step.foreign == ()


def test_gradients_are_refused() -> None:
    model = make()
    flow = DataFlow(model)
    flow.update_flow(placement("0123"))
    with pytest.raises(InputError, match=r"rest on the host, which supports no gradients"):
        flow(torch.randn(4, 8))
    with torch.no_grad():
        assert flow(torch.randn(4, 8)).shape == (4, 8)


def test_what_does_not_support_resting_parameters_says_so() -> None:
    flow, _, _ = placed("0123")
    with pytest.raises(InputError, match="train_step does not support parameters that rest"):
        flow.train_step(nn.MSELoss())
    with pytest.raises(InputError, match=r"flow\.stream does not support parameters that rest"):
        flow.stream([torch.randn(4, 8)])
    with pytest.raises(InputError, match=r"flow\.measure does not support parameters that rest"):
        flow.measure(torch.randn(4, 8))
    clones = DataFlow(make(), inference_only=True, enable_clone=True)
    with pytest.raises(PlacementError, match="make the flow without enable_clone"):
        clones.update_flow(placement("0123"))
    with pytest.raises(InputError, match="training does not support"):
        placement("0", training=True)


def test_a_cpu_alone_keeps_all_parameters_in_its_memory() -> None:
    devices.stand_ins.pop()
    try:
        flow, _, _ = placed("0246")
    finally:
        devices.stand_ins.append(2)
    assert flow.assignment is not None and not flow.assignment.resting


def test_parameters_that_replace_others_rest_in_their_place() -> None:
    flow, model, reference = placed("0246")
    x = torch.randn(4, 8)
    flow(x)
    state = {name: tensor * 0.5 for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(state)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    torch.testing.assert_close(flow(x).cpu(), reference(x))
    with torch.no_grad(), flow.applied() as applied:
        torch.testing.assert_close(applied[:4](x).cpu(), reference[:4](x))
