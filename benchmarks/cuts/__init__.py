"""Memory of training steps beside its prediction, wherever a model is cut in two: also where no solver would cut it.

The models are those of the executor's benchmark, with a quarter of a batch a micro-batch. Stand-ins have no memory of
their own: without GPUs tiny models show that it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import record

MODELS, SCHEDULES = ("resnet101", "gpt", "unet"), ("1f1b", "zero-bubble")
CHUNKS, CUTS, TARGET_PERCENT = 4, 5, 5.0


def run() -> list[dict[str, Any]]:
    """A row for each model and schedule: of all cuts and both devices, the prediction that is the farthest off."""
    from ..executor import cases

    cases.prepare()
    return [row for name in MODELS for row in _rows(cases.training(name))]


def _rows(case: Any) -> Iterator[dict[str, Any]]:
    from placer import profile

    from ..executor import cases

    batch, target = case.batch(cases.home())
    part = len(batch) // CHUNKS
    measured = profile(
        case.model(cases.home()),
        batch[:part],
        devices=cases.places(2),
        granularity=case.granularity,
        optimizer="sgd",
        loss_fn=case.loss,
        target=target[:part],
        progress=False,
    )
    names = [layer.name for layer in measured.layers]
    cuts = sorted({max(1, len(names) * number // (CUTS + 1)) for number in range(1, CUTS + 1)})
    for schedule in SCHEDULES:
        asked = [_request(measured, schedule, cut) for cut in cuts]
        off = [error for request in asked for error in _errors(case, request, batch, target)]
        farthest = max(map(abs, off), default=None)
        yield record.row(
            f"{case.label}, {CHUNKS} micro-batches, {schedule}, {len(cuts)} cuts of {len(names)} layers",
            "memory of a device in a step, prediction over use, the farthest off",
            "%",
            None if farthest is None else float(f"{farthest:.4g}"),
            spread=(min(off), max(off)) if off else None,
            target=TARGET_PERCENT if off else None,
        )


def _request(measured: Any, schedule: str, cut: int) -> Any:
    """All layers before the cut on the first device, all others on the second."""
    from placer import Constraints, PlacementRequest

    first, second = measured.cluster.devices
    pinned = {layer.name: (first if at < cut else second).name for at, layer in enumerate(measured.layers)}
    rules = Constraints(contiguous=True, pinned=pinned)
    return PlacementRequest(profile=measured, schedule=schedule, chunks=CHUNKS, constraints=rules)


def _errors(case: Any, request: Any, batch: Any, target: Any) -> Sequence[float]:
    """By device, the prediction over what a third step takes at its peak, in percent; none of stand-ins."""
    import torch

    from placer import DataFlow, solve

    from ..executor import cases
    from ..executor.memory import Meter

    placement = solve(request)
    model = case.model(torch.device("cpu"))
    meter = Meter(cases.places(2))
    flow = DataFlow(model, cases.places(2))
    flow.update_flow(placement)
    step = flow.train_step(case.loss, torch.optim.SGD(model.parameters(), lr=1e-4), request.schedule)
    for number in range(3):
        if number == 2:
            meter.forget_peak()
        step(batch, target, chunks=CHUNKS)
    found = meter.against(placement)
    flow.undo()
    return [100 * (said / used - 1) for said, used in zip(found["predicted_bytes"], found["peak_bytes"], strict=True)]
