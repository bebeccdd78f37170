"""Optimizer state that rests on the host: the same steps, and none on the devices between them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from replicated import replicated
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow, InputError, devices
from placer.executor.training.optimizer import optimizer_update
from placer.executor.training.optimizer.host_state import HostState
from placer.schema import DeviceLoad, MemoryUse, Placement
from placer.testing import logical_devices

BUCKET_BYTES = 1000
"""Bytes of a bucket, so that the model below has several on each device, and a parameter that is
larger than a bucket."""

EXACT = {"atol": 1e-10, "rtol": 1e-10}

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    f"{kind.__name__} {'foreach' if foreach else 'one by one'}": partial(
        kind, lr=0.05, foreach=foreach, **options
    )
    for kind, options in [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
    ]
    for foreach in (False, True)
} | {
    "Adam fused": partial(torch.optim.Adam, lr=0.05, fused=True),
    "SGD without state": partial(torch.optim.SGD, lr=0.05),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.05, momentum=0.9, centered=True),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    kept = partial(HostState, bucket_bytes=BUCKET_BYTES)
    monkeypatch.setattr(optimizer_update, "HostState", kept)
    with logical_devices(4) as places:
        yield places


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 40), nn.Linear(40, 2)).double()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, each with some on every device."""
    named = dict(model.named_parameters())
    return [
        {"params": [one for name, one in named.items() if name.endswith("weight")]},
        {"params": [one for name, one in named.items() if name.endswith("bias")], "lr": 0.02},
    ]


def _placed(model: nn.Module, count: int = 2) -> DataFlow:
    flow = DataFlow(model)
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = index * count // len(flow.layer_gpus)
    flow.update_flow()
    return unverified(flow)


def _train(step: Any, numbers: range) -> None:
    for number in numbers:
        step(*_batch(number), chunks=2)


def _train_unsplit(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        inputs, target = _batch(number)
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), target).backward()
        optimizer.step()


def _same_parameters(model: nn.Module, whole: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), msg=name, **EXACT)


def _same_state(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    ours, known = mine.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == known["param_groups"]
    assert ours["state"].keys() == known["state"].keys()
    for key, state in known["state"].items():
        assert ours["state"][key].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(ours["state"][key][name].cpu(), value, **EXACT)


def _places(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    return {
        devices.location(value)
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    }


def _pair(make: Make) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    model, whole = _model(), _model()
    return model, whole, make(_groups(model)), make(_groups(whole))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_state_equal_the_unsplit_models(name: str) -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS[name])
    step = _placed(model).train_step(functional.mse_loss, mine, optimizer_state="host")
    _train(step, range(3))
    _train_unsplit(whole, theirs, range(3))
    _same_parameters(model, whole)
    _same_state(mine, theirs)
    assert _places(mine) <= {devices.HOST}
    assert {place.index for place in map(devices.location, model.parameters())} == {0, 1}


def test_a_saved_state_goes_on_in_another_process_and_never_to_a_device() -> None:
    make = OPTIMIZERS["Adam foreach"]
    model, whole, mine, theirs = _pair(make)
    step = _placed(model).train_step(functional.mse_loss, mine, optimizer_state="host")
    _train(step, range(2))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": mine.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    later = _model()
    later.load_state_dict({name: value.cpu() for name, value in loaded["model"].items()})
    again = make(_groups(later))
    step = _placed(later).train_step(functional.mse_loss, again, optimizer_state="host")
    again.load_state_dict(loaded["optimizer"])
    assert _places(again) == {devices.HOST}
    _train(step, range(2, 4))
    _train_unsplit(whole, theirs, range(4))
    _same_parameters(later, whole)
    _same_state(again, theirs)


def test_a_state_that_is_loaded_between_steps_is_used() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["AdamW foreach"])
    step = _placed(model).train_step(functional.mse_loss, mine, optimizer_state="host")
    _train(step, range(1))
    _train_unsplit(whole, theirs, range(1))
    saved = copy.deepcopy(theirs.state_dict())
    _train(step, range(1, 3))
    _train_unsplit(whole, theirs, range(1, 3))
    for one in (mine, theirs):
        one.load_state_dict(copy.deepcopy(saved))
    _train(step, range(3, 5))
    _train_unsplit(whole, theirs, range(3, 5))
    _same_parameters(model, whole)
    _same_state(mine, theirs)


def test_state_stays_on_the_host_when_layers_move_and_goes_back_with_undo() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["SGD foreach"])
    flow = _placed(model)
    step = flow.train_step(functional.mse_loss, mine, optimizer_state="host")
    _train(step, range(2))
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = 3 - index * 4 // len(flow.layer_gpus)
    flow.update_flow(optimizer=mine)
    assert _places(mine) == {devices.HOST}
    _train(step, range(2, 4))
    flow.undo()
    # now it is an optimizer of the unsplit model
    for number in (4, 5):
        mine.zero_grad()
        inputs, target = _batch(number)
        functional.mse_loss(model(inputs), target).backward()
        mine.step()
    _train_unsplit(whole, theirs, range(6))
    _same_parameters(model, whole)


def test_state_that_was_on_the_devices_goes_to_the_host_and_back() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["Adam one by one"])
    flow = _placed(model)
    on_device = flow.train_step(functional.mse_loss, mine)
    on_host = flow.train_step(functional.mse_loss, mine, optimizer_state="host")
    on_device_again = flow.train_step(functional.mse_loss, mine, optimizer_state="device")
    for number, step in enumerate((on_device, on_host, on_device_again, on_host)):
        _train(step, range(number, number + 1))
        is_on_host = step is on_host
        assert (_places(mine) == {devices.HOST}) == is_on_host
    _train_unsplit(whole, theirs, range(4))
    _same_parameters(model, whole)


def test_parameters_that_get_gradients_later_get_state_later() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["Adam foreach"])
    flow = _placed(model)
    step = flow.train_step(functional.mse_loss, mine, optimizer_state="host")
    for one in (model, whole):
        one[1].requires_grad_(False)
    _train(step, range(2))
    _train_unsplit(whole, theirs, range(2))
    for one in (model, whole):
        one[1].requires_grad_(True)
    _train(step, range(2, 4))
    _train_unsplit(whole, theirs, range(2, 4))
    _same_parameters(model, whole)
    _same_state(mine, theirs)


@pytest.mark.parametrize("name", ["SGD foreach", "Adam fused"])
def test_a_scaler_skips_overflows_clips_and_accumulates(name: str) -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS[name])
    one, other = (torch.amp.GradScaler("cpu", init_scale=2.0**4) for _ in range(2))
    step = _placed(model).train_step(
        functional.mse_loss, mine, scaler=one, max_norm=0.1, optimizer_state="host"
    )
    factors = [1.0, float("inf"), 1.0]
    for number, factor in enumerate(factors):
        inputs, target = _batch(number)
        step(inputs, target, chunks=2, update=False)
        step(inputs * factor, target, chunks=2)
        theirs.zero_grad()
        for part in (inputs, inputs * factor):
            other.scale(functional.mse_loss(whole(part), target)).backward()
        other.unscale_(theirs)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        other.step(theirs)
        other.update()
    assert one.get_scale() == other.get_scale() == 2.0**3
    _same_parameters(model, whole)
    _same_state(mine, theirs)


def test_stages_with_replicas_keep_their_parts_of_the_state_on_the_host() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["Adam foreach"])
    flow = DataFlow(model)
    flow.update_flow(replicated(model, 4))
    step = unverified(flow).train_step(functional.mse_loss, mine, optimizer_state="host")
    for number in range(3):
        step(*_batch(number))
    _train_unsplit(whole, theirs, range(3))
    _same_parameters(model, whole)
    _same_state(mine, theirs)
    assert _places(mine) == {devices.HOST}
    assert len({devices.location(one) for one in model.parameters()}) == 4


def test_a_step_follows_the_placement_and_undo_forgets_it(recwarn: pytest.WarningsRecorder) -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["Adam foreach"])
    flow = unverified(DataFlow(model))
    where = {name: f"cpu:{number % 2}" for number, name in enumerate(flow.layer_gpus)}
    loads = tuple(
        DeviceLoad(
            device=name,
            layers=4,
            compute_ms=1.0,
            send_ms=0.0,
            receive_ms=0.0,
            load_ms=1.0,
            memory=MemoryUse(),
            limit_bytes=2**30,
            bottleneck=False,
        )
        for name in ("cpu:0", "cpu:1")
    )
    placement = Placement(
        status="feasible",
        objective="step",
        training=True,
        contiguous=False,
        layer_devices=where,
        devices=loads,
        optimizer_state="host",
    )
    flow.update_flow(placement)
    _train(flow.train_step(functional.mse_loss, mine), range(2))
    _train_unsplit(whole, theirs, range(2))
    _same_parameters(model, whole)
    assert _places(mine) == {devices.HOST}
    # the optimizer's memory is not compared with state on the devices
    assert not [one for one in recwarn if "needs other memory" in str(one.message)]
    flow.undo()
    flow.update_flow()
    assert not flow.train_step(functional.mse_loss, mine).update.is_on_host


def test_a_copy_of_a_step_has_state_of_its_own() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["Adam foreach"])
    step = _placed(model).train_step(functional.mse_loss, mine, optimizer_state="host")
    _train(step, range(2))
    copied = copy.deepcopy(step)
    _train(copied, range(2, 5))
    _train(step, range(2, 4))
    _train_unsplit(whole, theirs, range(4))
    _same_parameters(model, whole)
    _train_unsplit(whole, theirs, range(4, 5))
    _same_parameters(copied.placed.module, whole)


def test_after_a_failure_all_is_on_the_host_and_in_its_groups_and_later_steps_run() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["SGD foreach"])
    step = _placed(model).train_step(functional.mse_loss, mine, optimizer_state="host")
    _train(step, range(2))
    _train_unsplit(whole, theirs, range(2))
    before = copy.deepcopy(whole.state_dict())
    groups = [list(group["params"]) for group in mine.param_groups]
    own, calls = mine.step, []

    def failing() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the third bucket fails")
        own()

    mine.step = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="third bucket"):
        _train(step, range(2, 3))
    mine.step = own  # type: ignore[method-assign]
    assert len(calls) == 3
    assert [[*map(id, group["params"])] for group in mine.param_groups] == [
        [*map(id, group)] for group in groups
    ]
    assert _places(mine) == {devices.HOST}
    # Each parameter is as before the step or as after it, and so is its state.
    old = copy.deepcopy(theirs.state_dict()["state"])
    _train_unsplit(whole, theirs, range(2, 3))
    after = theirs.state_dict()["state"]
    names = [name for kind in ("weight", "bias") for name in before if name.endswith(kind)]
    stepped = 0
    for number, name in enumerate(names):
        value = model.state_dict()[name].cpu()
        is_stepped = not torch.allclose(value, before[name], **EXACT)
        stepped += is_stepped
        known = whole.state_dict() if is_stepped else before
        torch.testing.assert_close(value, known[name], msg=name, **EXACT)
        momentum = (after if is_stepped else old)[number]["momentum_buffer"]
        mine_now = mine.state_dict()["state"][number]["momentum_buffer"]
        torch.testing.assert_close(mine_now, momentum, msg=name, **EXACT)
    assert 0 < stepped < len(names)
    _train(step, range(3, 4))


def test_tensors_that_an_optimizer_replaces_go_to_the_host_too() -> None:
    model, whole, mine, theirs = _pair(OPTIMIZERS["Adam foreach"])
    step = _placed(model).train_step(functional.mse_loss, mine, optimizer_state="host")
    own = mine.step

    def replacing() -> None:
        own()
        for group in mine.param_groups:
            for parameter in group["params"]:
                state = mine.state[parameter]
                state["exp_avg"] = state["exp_avg"].clone()

    mine.step = replacing  # type: ignore[method-assign, assignment]
    _train(step, range(3))
    _train_unsplit(whole, theirs, range(3))
    _same_parameters(model, whole)
    _same_state(mine, theirs)
    assert _places(mine) == {devices.HOST}


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class _OfUser(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda own: _OfUser(own, lr=0.1), "_OfUser is not an optimizer of torch.optim"),
        (_hooked, "SGD has hooks of its step"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_in_buckets_is_named(make: Make, message: str) -> None:
    flow = _placed(_model())
    with pytest.raises(InputError, match=message):
        flow.train_step(functional.mse_loss, make(flow.module.parameters()), optimizer_state="host")


def test_another_place_is_named() -> None:
    flow = _placed(_model())
    with pytest.raises(InputError, match="optimizer_state='disk': give 'device' or 'host'"):
        flow.train_step(functional.mse_loss, optimizer_state="disk")  # type: ignore[arg-type]
