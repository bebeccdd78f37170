"""On real devices: stages as they run beside what the layers' own times add up to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import placer
from placer import Constraints, PlacementRequest, zoo
from placer.devices import NotRecordable

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MODELS = {
    "resnet50": (
        zoo.resnet50,
        lambda: torch.randn(32, 3, 224, 224),
        lambda: torch.randint(1000, (32,)),
    ),
    "gpt": (
        lambda: zoo.gpt(layers=8, width=1024, heads=16, context=512, vocabulary=8192),
        lambda: torch.randint(8192, (8, 512)),
        lambda: torch.randint(8192, (8, 512)),
    ),
}


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, target.dim() - 1), target.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_a_stage_add_up_to_what_it_takes(
    name: str, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        try:
            return recorded(*args, **kwargs)
        except NotRecordable as error:
            refused.append(str(error))
            raise

    recorded = placer.devices.record
    monkeypatch.setattr(placer.devices, "record", record)
    model, inputs, target = (make() for make in MODELS[name])
    devices = [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    found = placer.profile(model, inputs, devices, progress=False)
    request = PlacementRequest(
        profile=found,
        chunks=4,
        schedule=schedule,
        constraints=Constraints(contiguous=True),
        transfers="overlapped",
    )
    refined = placer.refine(
        placer.solve(request),
        model,
        inputs,
        request=request,
        loss_fn=_loss,
        target=target,
        rounds=2,
    )
    for stage in refined.rounds[0].stages:
        measured = stage.measured_ms - stage.loss_forward_ms - stage.loss_backward_ms
        print(
            f"{name}, {schedule}, {stage.device}: {stage.predicted_ms:.3f} ms predicted, "
            f"{measured:.3f} measured"
        )
        assert stage.predicted_ms == pytest.approx(measured, rel=0.15)
    assert all(
        parameter.device.type == "cpu" and parameter.grad is None
        for parameter in model.parameters()
    )
    assert not refused


def test_the_stages_of_an_inference_add_up_too() -> None:
    model, inputs, _ = (make() for make in MODELS["resnet50"])
    devices = [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    found = placer.profile(model, inputs, devices, training=False, progress=False)
    placement = placer.solve(PlacementRequest(profile=found, transfers="overlapped"))
    refined = placer.refine(placement, model, inputs, profile=found, rounds=1)
    for stage in refined.rounds[0].stages:
        assert stage.predicted_ms == pytest.approx(stage.measured_ms, rel=0.15)
