"""Eight devices, as CPU stand-ins: each way to run a placement equals the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from replicated import replicated
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer.schema import Placement, Schedule
from placer.testing import logical_devices

DEVICES = 8
BATCH = 16
STEPS = 2


@pytest.fixture(scope="module")
def devices() -> Iterator[list[torch.device]]:
    with logical_devices(DEVICES) as found:
        yield found


@pytest.fixture(scope="module")
def profile(devices: list[torch.device]) -> placer.Profile:
    """Return a measured profile whose layers all take the same times, so that answers do not vary.

    A measured time of the optimizer that another process interrupts changes the best placement.
    """
    measured = placer.profile(
        _model(), (_data()[0][:2],), devices=devices, repeats=1, cache=False, granularity="fine"
    )
    kinds = {device.type for device in measured.cluster.devices}
    times = {
        "forward_ms": 1.0,
        "backward_ms": 2.0,
        "weight_grad_ms": 1.0,
        "optimizer_ms": 0.2,
        "host_ms": 0.2,
    }
    equal = {name: dict.fromkeys(kinds, time_ms) for name, time_ms in times.items()}
    layers = tuple(layer.model_copy(update=equal) for layer in measured.layers)
    return measured.model_copy(update={"layers": layers})


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(16))).double()


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, 6).double(), torch.randn(BATCH, 6).double()


def _difference_after_training(placement: Placement) -> float:
    """Return the largest difference of a parameter from the unsplit model's after some steps."""
    unsplit, placed = _model(), _model()
    inputs, target = _data()
    flow = placer.DataFlow(placed)
    flow.update_flow(placement)
    step = flow.train_step(functional.mse_loss, torch.optim.AdamW(placed.parameters()))
    optimizer = torch.optim.AdamW(unsplit.parameters())
    for _ in range(STEPS):
        step(inputs, target)
        optimizer.zero_grad()
        functional.mse_loss(unsplit(inputs), target).backward()
        optimizer.step()
    pairs = zip(placed.parameters(), unsplit.parameters(), strict=True)
    return max(float((mine.detach().cpu() - theirs).abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize(
    "schedule",
    [
        "zero-bubble",
        "interleaved",
        pytest.param("1f1b", marks=pytest.mark.exhaustive),
        pytest.param("fill-drain", marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_step_over_eight_devices_equals_the_unsplit_model(
    profile: placer.Profile, schedule: Schedule
) -> None:
    request = placer.PlacementRequest(
        profile=profile,
        objective="step",
        batch_size=BATCH,
        schedule=schedule,
        step_kind="steady-state",
        constraints=placer.Constraints(min_devices=DEVICES),
        time_limit_s=0.5,
    )
    placement = placer.solve(request)
    assert len(set(placement.layer_devices.values())) == DEVICES
    assert _difference_after_training(placement) < 1e-12


@pytest.mark.parametrize(
    ("replicas", "stages"),
    [(2, 4), *(pytest.param(*shape, marks=pytest.mark.exhaustive) for shape in [(4, 2), (8, 1)])],
)
def test_replicated_stages_on_eight_devices_equal_the_unsplit_model(
    devices: list[torch.device], replicas: int, stages: int
) -> None:
    placement = replicated(_model(), replicas, stages, chunks=BATCH // replicas)
    assert _difference_after_training(placement) < 1e-12


@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
@pytest.mark.parametrize("heavy", ["first", "last"])
def test_replicas_by_stage_equal_the_unsplit_model(
    profile: placer.Profile, heavy: str, schedule: Schedule
) -> None:
    """Gradients of the heavy layers take so long to exchange that one device has these layers."""
    layers = list(profile.layers)
    for index in range(4) if heavy == "first" else range(12, 16):
        layers[index] = layers[index].model_copy(update={"grad_bytes": 10**9})
    assert profile.cluster is not None
    links = [
        link.model_copy(
            update={"bandwidth_bytes_per_s": 1e10, "latency_s": 0.0, "bidirectional": None}
        )
        for link in profile.cluster.links
    ]
    request = placer.PlacementRequest(
        profile=profile.model_copy(
            update={
                "layers": tuple(layers),
                "cluster": profile.cluster.model_copy(update={"links": tuple(links)}),
            }
        ),
        objective="step",
        batch_size=24,
        schedule=schedule,
        step_kind="steady-state",
        replicas="by-stage",
        constraints=placer.Constraints(max_devices=4),
        time_limit_s=2,
    )
    placement = placer.solve(request)
    assert len(set(placement.replicas_by_stage)) > 1
    assert _difference_after_training(placement) < 1e-12
    model, inputs = _model().eval(), _data()[0]
    with torch.no_grad():
        expected = model(inputs)
        flow = placer.DataFlow(model)
        flow.update_flow(placement)
        torch.testing.assert_close(flow(inputs).cpu(), expected, rtol=0, atol=1e-12)
        found = torch.cat([result.cpu() for result in flow.stream(inputs.split(2))])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    flow.undo()
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)


def test_a_stream_over_eight_devices_equals_the_unsplit_model(profile: placer.Profile) -> None:
    rules = placer.Constraints(min_devices=DEVICES)
    request = placer.PlacementRequest(profile=profile, training=False, constraints=rules)
    model = _model().eval()
    inputs = _data()[0].split(2)
    with torch.no_grad():
        expected = [copy.deepcopy(model)(part) for part in inputs]
        flow = placer.DataFlow(model)
        flow.update_flow(placer.solve(request))
        found = [result.cpu() for result in flow.stream(inputs)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
