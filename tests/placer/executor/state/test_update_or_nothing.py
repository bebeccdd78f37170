"""``update_flow`` succeeds or changes nothing, wherever it fails.

A failure is injected before every line of the executor that an update runs, and at every copy, one
run for each."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer import DataFlow, InputError, PlacementError, devices
from placer.executor.state import state_moves
from placer.schema import BatchOptions, Placement
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)

OTHER = Placement(
    status="feasible",
    objective="throughput",
    training=True,
    layer_devices={"0": "cpu:1", "2": "cpu:2", "3": "cpu:0"},
    chunks=3,
    schedule="zero-bubble",
    recompute=("cpu:1",),
    batch_options=BatchOptions(reduction="sum"),
    links_through_host=(("cpu:0", "cpu:2"),),
)
"""It changes every setting of the flow below, moves each of its layers, and adds a device and a
detour."""


class _InjectedError(BaseException):
    """What no code of Placer expects."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def _trained(clones: bool = False) -> tuple[DataFlow, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A placed flow with gradients, an optimizer of its steps, and another one that it has not been
    told of."""
    model = _model()
    ours, users = (
        torch.optim.Adam(model[3].parameters(), 0.1),
        torch.optim.Adam(model[0].parameters(), 0.1),
    )
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"], enable_clone=clones)
    flow.layer_gpus.update({"0": 0, "2": 1, "3": 1})
    flow.update_flow()
    if clones:
        flow.eval()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        flow.placed.weights.follow(ours)
        ours.step()
        users.step()
    return flow, ours, users


def _whole_state(flow: DataFlow, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a user can see of a flow, of its model and of optimizers, tensors with their
    devices."""

    def seen(value: Any) -> Any:
        return (
            (str(devices.location(value)), value.tolist()) if isinstance(value, Tensor) else value
        )

    model = flow.module
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "settings": (
            flow.chunks,
            flow.schedule,
            list(flow.recompute),
            tuple(flow.in_flight),
            flow.batch_options,
        ),
        "map": list(flow.layer_gpus.items()),
        "devices": list(flow.device_ids),
        "granularity": flow.settings.granularity,
        "assignment": flow.assignment,
        "detours": devices.detours(),
        "followed": {id(one) for one in flow.placed.weights.optimizers},
        "clones": None if flow.placed.weights.clones is None else flow.placed.weights.clones.places,
        "tensors": {
            name: (id(one), seen(one.detach()), one.requires_grad) for name, one in state.items()
        },
        "gradients": {name: seen(one.grad) for name, one in model.named_parameters()},
        "optimizers": [
            [{name: seen(value) for name, value in kept.items()} for kept in each.state.values()]
            for each in optimizers
        ],
    }


Line = tuple[str, int]
"""A file and the number of a line in it."""


@contextmanager
def _failing_before(chosen: Line | None, time: int = 1) -> Iterator[dict[Line, int]]:
    """Count how often each line of the executor runs inside; raise before the chosen one, when it
    comes that time."""
    seen: dict[Line, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name, number = frame.f_code.co_filename, frame.f_lineno
        if name.endswith("executor/state/model_lock.py"):  # the lock is released after the change
            return None
        if (
            not name.endswith("devices/routes.py")
            and "/placer/executor/" not in name.rpartition("/tests/")[2]
        ):
            return None
        # A `with` runs once more when it is left; after an error there Python would not release the
        # lock.
        if event == "line" and not linecache.getline(name, number).lstrip().startswith("with "):
            seen[name, number] = seen.get((name, number), 0) + 1
            if (name, number) == chosen and seen[chosen] == time:
                sys.settrace(None)
                raise _InjectedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


@pytest.fixture(autouse=True)
def no_detours() -> Iterator[None]:
    before = devices.detours()
    yield
    devices.set_detours(before)


@pytest.mark.parametrize(
    "moments",
    ["every fifth line", pytest.param("first, middle and last", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("clones", [False, True], ids=["moved", "cloned"])
def test_a_failure_before_any_line_changes_nothing(clones: bool, moments: str) -> None:
    """A line that runs many times fails the first, the middle and the last time.

    Of every fifth line, one of the three fails, in turn.
    """
    with logical_devices(3):
        flow, _, users = _trained(clones)
        with _failing_before(None) as seen:
            flow.update_flow(OTHER, optimizer=users)
        every = 5 if moments == "every fifth line" else 1
        for number, (line, times) in enumerate([*seen.items()][::every]):
            three = (1, (times + 1) // 2, times)
            for time in set(three) if every == 1 else {three[number % 3]}:
                devices.set_detours([])
                flow, ours, users = _trained(clones)
                before = _whole_state(flow, ours, users)
                with _failing_before(line, time), pytest.raises(_InjectedError):
                    flow.update_flow(OTHER, optimizer=users)
                assert _whole_state(flow, ours, users) == before, (
                    f"after a failure before {line}, time {time}"
                )
        assert len(seen) > 60
        expected = flow.module(X).cpu() if clones else None
        flow.update_flow(OTHER, optimizer=users)
        after = _whole_state(flow, ours, users)
        assert all(
            after[name] != before[name]
            for name in ("settings", "map", "devices", "assignment", "detours")
        )
        assert all(
            after[name] != before[name]
            for name in (["clones"] if clones else ["followed", "tensors"])
        )
        if clones:
            with torch.no_grad():
                torch.testing.assert_close(
                    flow(X, chunks=1).cpu(), expected, rtol=1e-12, atol=1e-12
                )


@pytest.mark.parametrize("clones", [False, True], ids=["moved", "cloned"])
def test_a_device_that_is_full_at_any_copy_changes_nothing(
    clones: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, left = devices.copy, 0

    def full(tensor: Tensor, target: torch.device, known: Any = None) -> Tensor:
        nonlocal left
        left -= 1
        if left == 0:  # only once: there is room to put things back
            raise torch.OutOfMemoryError("out of memory")
        return copy(tensor, target, known)

    monkeypatch.setattr(devices, "copy", full)
    with logical_devices(3):
        flow, ours, users = _trained(clones)
        before = _whole_state(flow, ours, users)
        for number in range(1, 200):
            left = number
            try:
                flow.update_flow(OTHER, optimizer=users)
            except (PlacementError, torch.OutOfMemoryError):
                assert _whole_state(flow, ours, users) == before, f"after copy {number}"
            else:
                break
        assert number > 6
        assert _whole_state(flow, ours, users)["map"] != before["map"]


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        (OTHER.model_copy(update={"layer_devices": {"0": "cpu:1", "nowhere": "cpu:0"}}), "nowhere"),
        (OTHER.model_copy(update={"layer_devices": {"0": "cpu:1", "3": "cpu:9"}}), "cpu:9"),
        (OTHER.model_copy(update={"layer_devices": {}}), "places no layer"),
    ],
)
def test_a_placement_of_another_model_or_machine_changes_nothing(
    placement: Placement, told: str
) -> None:
    with logical_devices(3):
        flow, ours, users = _trained()
        before = _whole_state(flow, ours, users)
        with pytest.raises(PlacementError, match=told):
            flow.update_flow(placement, optimizer=users)
        assert _whole_state(flow, ours, users) == before
        with flow.applied(), pytest.raises(InputError, match="not applied"):
            flow.update_flow(OTHER)
        assert _whole_state(flow, ours, users) == before


def test_a_placement_of_a_model_without_weights_changes_nothing() -> None:
    model = _model()
    with logical_devices(3):
        flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
        model[3] = nn.Linear(4, 2, device="meta", dtype=torch.float64)
        state = (
            flow.chunks,
            flow.schedule,
            list(flow.layer_gpus.items()),
            devices.detours(),
            flow.assignment,
        )
        with pytest.raises(PlacementError, match="on meta"):
            flow.update_flow(OTHER)
        now = (
            flow.chunks,
            flow.schedule,
            list(flow.layer_gpus.items()),
            devices.detours(),
            flow.assignment,
        )
        assert now == state
        assert {str(devices.location(one)) for one in model[0].parameters()} == {"cpu"}
        assert flow.device_ids == [0, 1]


def test_state_of_an_optimizer_that_was_elsewhere_goes_back_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An optimizer that was loaded on the host, say: its state is beside its parameters only after
    # an update.
    with logical_devices(3):
        flow, _, users = _trained()
        for kept in users.state.values():
            kept["exp_avg"] = devices.copy(kept["exp_avg"], torch.device("cpu:2"))
        before = _whole_state(flow, users)
        monkeypatch.setattr(
            devices, "release_cache", lambda: (_ for _ in ()).throw(_InjectedError())
        )
        with pytest.raises(_InjectedError):
            flow.update_flow(OTHER, optimizer=users)
        assert _whole_state(flow, users) == before


def test_after_a_failure_the_flow_runs_as_before_and_can_be_updated() -> None:
    whole = _model().eval()
    with logical_devices(3), torch.no_grad():
        flow, ours, users = _trained()
        whole.load_state_dict(
            {name: value.cpu() for name, value in flow.module.state_dict().items()}
        )
        flow.eval()
        expected = whole(X)
        torch.testing.assert_close(flow(X, chunks=2).cpu(), expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(PlacementError):
            flow.update_flow(
                OTHER.model_copy(update={"layer_devices": {"0": "cpu:1", "3": "cpu:9"}})
            )
        torch.testing.assert_close(flow(X).cpu(), expected, rtol=1e-12, atol=1e-12)
        flow.update_flow(OTHER, optimizer=[ours, users])
        torch.testing.assert_close(flow(X).cpu(), expected, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_refuses_its_new_data_keeps_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with logical_devices(2):
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), 3.0)
        fill, calls = state_moves._Contents.fill, []

        def refusing(self: Any, tensor: Tensor) -> None:
            calls.append(tensor)
            if len(calls) == 1:
                tensor.grad = None
                raise _InjectedError
            fill(self, tensor)

        monkeypatch.setattr(state_moves._Contents, "fill", refusing)
        with pytest.raises(_InjectedError):
            state_moves.relocate(weight, torch.device("cpu:1"))
        assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]
