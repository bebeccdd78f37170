"""Measured and predicted memory of training steps, for every cut of a model in two.

The cuts include bad cuts that no solver would choose. CPU stand-ins have no memory of their own:
without GPUs, tiny models only show that the benchmark runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import record

SCHEDULES = ("1f1b", "zero-bubble")
CHUNKS, CUTS, TARGET_PERCENT = 4, 5, 5.0


def progress(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows so far, each time that a row is added.

    Args:
        folder: the folder of the results; nothing else is kept there.
    """
    from ..executor import cases

    cases.prepare()
    rows: list[dict[str, Any]] = []
    for case in _cases():
        for row in _rows(case):
            rows.append(row)
            yield rows


def _cases() -> list[Any]:
    """Return models that are cut many times in a minute; a micro-batch is a quarter of a batch."""
    import torch
    from torch.nn import functional

    from placer import zoo

    from ..executor import cases
    from ..profiler import models

    if cases.is_small():
        return [cases.training("gpt")]

    def images(size: int, classes: int, *shape: int) -> Any:
        return lambda: (
            torch.randn(CHUNKS * size, 3, 192, 192),
            torch.randint(classes, (CHUNKS * size, *shape)),
        )

    def gpt() -> Any:
        return zoo.gpt(layers=12, width=1024, heads=16, context=512, vocabulary=8192)

    def tokens() -> Any:
        return torch.randint(8192, (CHUNKS * 8, 512)), torch.randint(8192, (CHUNKS * 8, 512))

    each = functional.cross_entropy
    return [
        cases.Training(
            "resnet50", "ResNet-50, 192 px, 4 x 32, TF32", zoo.resnet50, images(32, 1000), each, ()
        ),
        cases.Training(
            "gpt",
            "GPT, 12 layers, d=1024, 4 x 8 x 512 tokens",
            gpt,
            tokens,
            cases.token_loss,
            (),
            "fine",
        ),
        cases.Training(
            "unet",
            "U-Net, width 32, 192 px, 4 x 16, TF32",
            lambda: zoo.unet(width=32),
            images(16, 2, 192, 192),
            each,
            (),
        ),
        cases.Training(
            "inception",
            "Inception-v3, 192 px, 4 x 32, TF32",
            models.inception,
            images(32, 1000),
            each,
            (),
        ),
    ]


def _rows(case: Any) -> Iterator[dict[str, Any]]:
    """Yield one row per schedule: the worst prediction over all cuts and both devices."""
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
    count = len(measured.layers)
    cuts = sorted({max(1, count * number // (CUTS + 1)) for number in range(1, CUTS + 1)})
    for schedule in SCHEDULES:
        found = [
            pair
            for cut in cuts
            for pair in _memory(case, _request(measured, schedule, cut), batch, target)
        ]
        off = [100 * (said / used - 1) for said, used in found]
        beside = [(said - used) / 2**20 for said, used in found]
        yield record.row(
            f"{case.label}, {schedule}, {len(cuts)} cuts of {count} layers, 2 devices",
            "memory of a device in a step, prediction over use, the farthest off",
            "%",
            float(f"{max(map(abs, off)):.4g}") if off else None,
            spread=(min(off), max(off)) if off else None,
            target=TARGET_PERCENT if off else None,
            figures={"most below, MiB": min(beside), "most above, MiB": max(beside)}
            if off
            else None,
        )


def _request(measured: Any, schedule: str, cut: int) -> Any:
    """Return a request with the layers before the cut on the first device, others on the second."""
    from placer import Constraints, PlacementRequest

    first, second = measured.cluster.devices
    pinned = {
        layer.name: (first if at < cut else second).name for at, layer in enumerate(measured.layers)
    }
    rules = Constraints(contiguous=True, pinned=pinned)
    return PlacementRequest(profile=measured, schedule=schedule, chunks=CHUNKS, constraints=rules)


def _memory(case: Any, request: Any, batch: Any, target: Any) -> Sequence[tuple[float, float]]:
    """Return, by device, the predicted and measured peak of a third step, in bytes.

    The result is empty on CPU stand-ins.
    """
    import torch

    from placer import DataFlow, solve

    from ..executor import cases
    from ..executor.memory import Meter

    placement = solve(request)
    model = case.model(torch.device("cpu"))
    meter = Meter(cases.places(2))
    flow = DataFlow(model, cases.places(2))
    flow.update_flow(placement)
    step = flow.train_step(
        case.loss, torch.optim.SGD(model.parameters(), lr=1e-4), request.schedule
    )
    for number in range(3):
        if number == 2:
            meter.forget_peak()
        step(batch, target, chunks=CHUNKS)
    found = meter.against(placement)
    flow.undo()
    return list(zip(found["predicted_bytes"], found["peak_bytes"], strict=True))
