"""The gain of ``train_step(compile=True)`` on two devices, with and without under zero-bubble.

The same contest measures eager PyTorch on one device, ``torch.compile`` of the whole model there,
and the compiled step with the placement that ``refine(compile=True)`` finds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, Placement, Profile, refine, solve

from . import cases, contest, ours, stream, tutorial_resnet50
from .cases import Training
from .contest import Contender
from .sample import Sample, attempt, reason, release
from .stream import ALONE

PREFIX = "compile-"
NAMES = ("resnet101", "unet", "gpt", tutorial_resnet50.CASE)
DEVICES = 2
SPEEDUPS = {tutorial_resnet50.CASE: 1.7}
"""Over eager PyTorch on one device, what is asked for without the compiler too, where it is not
1.85."""

COMPILED = "compiled"
REFINED = "compiled, refined"
"""The engine whose placement is one for compiled stages."""


def training(name: str) -> Training:
    """Return the case with one of ``NAMES``."""
    return tutorial_resnet50.training() if name == tutorial_resnet50.CASE else cases.training(name)


def measure(case: Training) -> Iterator[Sample]:
    """Yield samples of a step without and with the compiler on two devices, then on one.

    They run one after another: recorded and compiled passes stay in memory, which does not hold
    several sets.
    """
    cases.prepare()
    name = PREFIX + case.name
    if len(cases.places()) < DEVICES:
        yield Sample(name, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    model, batch = case.model(cases.home()), case.batch(cases.home())
    profiles: dict[int, Profile] = {}
    contenders = []
    for chunks in case.chunks if case.name == tutorial_resnet50.CASE else (4,):
        prepared = attempt(name, "ours", 0, 0, partial(_profile, profiles, model, batch, chunks))
        if prepared.failed:
            yield prepared
            continue
        placement = ours.placed(profiles[chunks], DEVICES, chunks)
        contenders += [
            _contender(engine, case, model, batch, placement) for engine in ("ours", COMPILED)
        ]
    one = cases.places(1)
    eager = contest.kept(lambda: ours.eager(copy.deepcopy(model), batch, case.loss))
    alone = contest.kept(lambda: ours.eager(_compiled(model), batch, case.loss))
    contenders += [contest.here("eager", one, 1, eager), contest.here(ALONE, one, 1, alone)]
    for found in list(profiles.values())[:1]:
        try:
            contenders.append(
                _contender(REFINED, case, model, batch, _refined(case, model, batch, found))
            )
        except Exception as error:
            yield Sample(name, REFINED, DEVICES, found.batch_size, failed=reason(error))
    yield from contest.one_by_one(name, contenders)


def measure_stream(case: Training) -> Iterator[Sample]:
    """Yield samples of a stream with and without ``compile=True`` on two devices, then on one."""
    if len(cases.places()) < DEVICES:
        yield Sample(
            stream.COMPILED + case.name,
            "ours",
            DEVICES,
            0,
            failed=f"there are fewer than {DEVICES} devices",
        )
        return
    yield from stream.compiled(case, DEVICES, _backend())


def _profile(
    profiles: dict[int, Profile], model: nn.Module, batch: tuple[Tensor, Tensor], chunks: int
) -> dict[str, list[float]]:
    """Add the profile for ``chunks`` micro-batches to ``profiles``."""
    profiles[chunks] = ours.measured(model, batch[0], chunks)
    return {}


def _refined(
    case: Training, model: nn.Module, batch: tuple[Tensor, Tensor], profile: Profile
) -> Placement:
    """Return the placement that is refined for compiled stages."""
    # refine measures no replicas
    asked = ours.question([profile], DEVICES, len(batch[0])).model_copy(
        update={"replicas": "never"}
    )
    part, goal = (tensor[: profile.batch_size] for tensor in batch)
    given: Any = {"request": asked, "loss_fn": case.loss, "target": goal}
    found = refine(solve(asked), copy.deepcopy(model), part, rounds=2, compile=_backend(), **given)
    release()
    return found.placement


def _compiled(model: nn.Module) -> Any:
    return torch.compile(copy.deepcopy(model), backend=_backend())


def _backend() -> str:
    return "inductor" if cases.on_gpus() else "aot_eager"


def _contender(
    engine: str,
    case: Training,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    placement: Placement,
) -> Contender:
    """Return a pipeline on two devices; its stages are compiled unless the engine is ``ours``."""
    values: dict[str, list[float]] = {}

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places(DEVICES)])
        flow.update_flow(placement)
        backend = False if engine == "ours" else _backend()
        optimizer = cases.sgd(flow.parameters())
        step = flow.train_step(case.loss, optimizer, schedule="zero-bubble", compile=backend)
        inputs, target = batch
        values["loss"] = [step(inputs, target, chunks=placement.chunks).item()]
        for place, why in step.not_compiled_because.items():
            print(f"{place} is not compiled: {why}", flush=True)
        for place, gain in step.compiled.items():
            print(f"{place} is compiled: {gain}", flush=True)
        values["compiled_segments"] = [float(len(step.compiled))]
        return lambda: step(inputs, target, chunks=placement.chunks), optimizer.zero_grad

    made = contest.here(engine, cases.places(DEVICES), placement.chunks, contest.kept(make))
    made.values = values
    return made
