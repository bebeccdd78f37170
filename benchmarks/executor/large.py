"""A model that is too large for one device: weights, gradients and Adam's state alone are more than it has.

On GPUs a GPT of 10 billion float32 parameters: 16 bytes a parameter are 159 GB. Stand-ins get a limit that a tiny one
exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from placer import Cluster, Constraints, DataFlow, Placement, PlacementRequest, Profile, profile, solve, zoo

from . import cases, memory, ours, timing
from .sample import Sample, attempt

CASE = "large"
STEPS = 3


def measure() -> Iterator[Sample]:
    """Ours on two devices and on all, then eager PyTorch on one, which must run out of memory."""
    cases.prepare()
    for count in sorted(cases.counts()):
        chunks = 2 * count
        yield attempt(CASE, "ours", count, chunks, partial(_ours, count, chunks))
    if not cases.is_small():
        yield attempt(CASE, "eager", 1, 1, lambda: _train(_model(cases.home()), _batch(4)))


def _model(place: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with place:
        return zoo.gpt(2, 32, 2, 16, 64) if cases.is_small() else zoo.gpt(30, 5120, 40, 1024, 50304)


def _batch(chunks: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with cases.home():
        tokens = torch.randint(64, (chunks, 16)) if cases.is_small() else torch.randint(50304, (2 * chunks, 1024))
    return tokens, tokens.roll(-1, dims=1)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused on GPUs, where it makes no copies of the weights; a wide model learns in small steps."""
    return torch.optim.Adam(model.parameters(), lr=1e-4 if cases.is_small() else 1e-5, fused=cases.on_gpus())


def _train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    optimizer = _optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        cases.token_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timing.steps(step, [cases.home()])


def _ours(count: int, chunks: int) -> dict[str, list[float]]:
    inputs, target = _batch(chunks)
    places = [str(place) for place in cases.places(count)]
    part = inputs[: len(inputs) // chunks].cpu()
    found = profile(
        _model(torch.device("meta")),
        part,
        places,
        training=True,
        optimizer="adam",
        progress=False,
        loss_fn=cases.token_loss,
        target=target[: len(part)].cpu(),
    )
    placement = _placed(found, chunks)
    used = memory.Meter(cases.places(count))
    model = _model(cases.home())
    flow = DataFlow(model, places)
    flow.update_flow(placement)
    step = flow.train_step(cases.token_loss, _optimizer(model))
    losses = [step(inputs, target).item() for _ in range(STEPS)]
    used.forget_peak()
    values = timing.steps(lambda: step(inputs, target), cases.places(count), timing.FEWEST)
    counted = {"parameters": [float(sum(parameter.numel() for parameter in model.parameters()))], "loss": losses}
    return values | counted | used.against(placement)


def _placed(found: Profile, chunks: int) -> Placement:
    """The placement; stand-ins get three quarters of what the model needs on one."""
    assert found.cluster is not None
    cluster = found.cluster
    if cases.is_small():
        request = PlacementRequest(profile=found, objective="memory", constraints=Constraints(max_devices=1))
        alone = solve(request).devices[0].memory.total_bytes
        limited = [d.model_copy(update={"memory_bytes": 3 * alone // 4, "reserve_bytes": 0}) for d in cluster.devices]
        cluster = Cluster(devices=tuple(limited), links=cluster.links)
    placement = solve(
        PlacementRequest(
            profile=found,
            cluster=cluster,
            constraints=Constraints(contiguous=True),
            chunks=chunks,
            schedule="1f1b",
            transfers="overlapped",
            time_limit_s=ours.SOLVER_S,
        )
    )
    if placement.single_device is None or placement.single_device.fits:
        raise RuntimeError("the model fits on one device")
    return placement
