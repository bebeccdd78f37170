"""What ``train_step(compile=True)`` gains over the same step without it, on two devices, both under zero-bubble.

Beside both: eager PyTorch on one device, and there ``torch.compile`` of the whole model; and the compiled step by the
placement that ``refine(compile=True)`` finds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, Placement, Profile, refine, solve

from . import cases, ours, stream, timing, tutorial_resnet50
from .cases import Training
from .sample import Sample, attempt, release
from .stream import ALONE

PREFIX = "compile-"
NAMES = ("resnet101", "unet", "gpt", tutorial_resnet50.CASE)
DEVICES = 2
CHUNKS = {tutorial_resnet50.CASE: tutorial_resnet50.FASTEST}
"""Numbers of micro-batches that are tried, where it is not 4 alone."""
SPEEDUPS = {tutorial_resnet50.CASE: 1.7}
"""Over eager PyTorch on one device, what is asked for without the compiler too, where it is not 1.85."""

REFINED = "compiled, refined"
"""The engine whose placement is one for compiled stages."""


def training(name: str) -> Training:
    """What is trained, by one of ``NAMES``."""
    return tutorial_resnet50.TRAINING if name == tutorial_resnet50.CASE else cases.training(name)


def measure(case: Training) -> Iterator[Sample]:
    """The step on two devices without and with the compiler, by the same placement; then one device."""
    cases.prepare()
    name = PREFIX + case.name
    if len(cases.places()) < DEVICES:
        yield Sample(name, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    model, batch = case.model(cases.home()), case.batch(cases.home())
    profiles: dict[int, Profile] = {}
    for chunks in CHUNKS.get(case.name, (4,)):
        prepared = attempt(name, "ours", 0, 0, partial(_profile, profiles, model, batch, chunks))
        if prepared.failed:
            yield prepared
            continue
        placement = ours.placed(profiles[chunks], DEVICES, chunks)
        for engine in ("ours", "compiled"):
            run = partial(_steps, case, model, batch, placement, engine == "compiled")
            yield attempt(name, engine, DEVICES, chunks, run)
            release()
    yield attempt(name, "eager", 1, 1, lambda: ours.eager(copy.deepcopy(model), batch, case.loss))
    yield attempt(name, ALONE, 1, 1, partial(_alone, case, model, batch))
    for chunks, profile in list(profiles.items())[:1]:
        yield attempt(name, REFINED, DEVICES, chunks, partial(_refined, case, model, batch, profile))


def measure_stream(case: Training) -> Iterator[Sample]:
    """An inference stream with ``compile=True`` beside the same without it, on two devices; then one device."""
    if len(cases.places()) < DEVICES:
        yield Sample(stream.COMPILED + case.name, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    yield from stream.compiled(case, DEVICES, _backend())


def _profile(
    profiles: dict[int, Profile], model: nn.Module, batch: tuple[Tensor, Tensor], chunks: int
) -> dict[str, list[float]]:
    """Puts that of so many micro-batches there."""
    profiles[chunks] = ours.measured(model, batch[0], chunks)
    return {}


def _refined(
    case: Training, model: nn.Module, batch: tuple[Tensor, Tensor], profile: Profile
) -> dict[str, list[float]]:
    asked = ours.question([profile], DEVICES, len(batch[0]))
    part, goal = (tensor[: profile.batch_size] for tensor in batch)
    given: Any = {"request": asked, "loss_fn": case.loss, "target": goal}
    found = refine(solve(asked), copy.deepcopy(model), part, rounds=2, compile=_backend(), **given)
    release()
    return _steps(case, model, batch, found.placement, compiles=True)


def _alone(case: Training, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    compiled: Any = torch.compile(copy.deepcopy(model), backend=_backend())
    return ours.eager(compiled, batch, case.loss)


def _backend() -> str:
    return "inductor" if cases.on_gpus() else "aot_eager"


def _steps(
    case: Training,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    placement: Placement,
    compiles: bool,
) -> dict[str, list[float]]:
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places(DEVICES)])
    flow.update_flow(placement)
    backend = _backend() if compiles else False
    step = flow.train_step(
        case.loss, torch.optim.SGD(flow.parameters(), lr=1e-3), schedule="zero-bubble", compile=backend
    )
    inputs, target = batch
    losses = [step(inputs, target, chunks=placement.chunks).item()]
    for place, why in step.not_compiled_because.items():
        print(f"{place} is not compiled: {why}", flush=True)
    for place, gain in step.compiled.items():
        print(f"{place} is compiled: {gain}", flush=True)
    values = timing.in_a_row(lambda: step(inputs, target, chunks=placement.chunks), cases.places(DEVICES))
    return values | {"compiled_segments": [float(len(step.compiled))], "loss": losses}
