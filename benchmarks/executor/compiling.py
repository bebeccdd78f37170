"""What ``train_step(compile=True)`` gains over the same step without it, on two devices, both under zero-bubble."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, Placement

from . import cases, ours, timing
from .cases import Training
from .sample import Sample, attempt, release

PREFIX = "compile-"
NAMES = ("resnet101", "unet", "gpt")
DEVICES = 2
CHUNKS = 4


def measure(case: Training) -> Iterator[Sample]:
    """The step on two devices without and with the compiler, by the same placement."""
    cases.prepare()
    name = PREFIX + case.name
    if len(cases.places()) < DEVICES:
        yield Sample(name, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    model, batch = case.model(cases.home()), case.batch(cases.home())
    placements: list[Placement] = []

    def prepare() -> dict[str, list[float]]:
        placements.append(ours.placed(ours.measured(model, batch[0], CHUNKS), DEVICES, CHUNKS))
        release()
        return {}

    prepared = attempt(name, "ours", 0, 0, prepare)
    if prepared.failed:
        yield prepared
        return
    for engine in ("ours", "compiled"):
        run = partial(_steps, case, model, batch, placements[0], engine == "compiled")
        yield attempt(name, engine, DEVICES, CHUNKS, run)
        release()


def _steps(
    case: Training, model: nn.Module, batch: tuple[Tensor, Tensor], placement: Placement, compiles: bool
) -> dict[str, list[float]]:
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places(DEVICES)])
    flow.update_flow(placement)
    backend: Any = (True if cases.on_gpus() else "aot_eager") if compiles else False
    step = flow.train_step(
        case.loss, torch.optim.SGD(flow.parameters(), lr=1e-3), schedule="zero-bubble", compile=backend
    )
    inputs, target = batch
    losses = [step(inputs, target, chunks=CHUNKS).item()]
    for place, why in step.not_compiled_because.items():
        print(f"{place} is not compiled: {why}", flush=True)
    for place, gain in step.compiled.items():
        print(f"{place} is compiled: {gain}", flush=True)
    values = timing.in_a_row(lambda: step(inputs, target, chunks=CHUNKS), cases.places(DEVICES))
    return values | {"compiled_segments": [float(len(step.compiled))], "loss": losses}
