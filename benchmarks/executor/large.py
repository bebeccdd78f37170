"""A model that is too large for one device: weights, gradients and Adam's state alone are more than it has.

On GPUs a GPT of 10 billion float32 parameters: 16 bytes a parameter are 159 GB. Stand-ins get a limit that a tiny one
exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from placer import Cluster, Constraints, DataFlow, Placement, PlacementRequest, Profile, profile, solve, zoo

from . import cases, timing
from .sample import Sample, attempt

CASE = "large"
STEPS = 4


def measure() -> Iterator[Sample]:
    """Eager PyTorch on one device, which must run out of memory, then ours on two devices and on all."""
    cases.prepare()
    if not cases.is_small():
        yield attempt(CASE, "eager", 1, 1, lambda: _train(_model(cases.home()), _batch(4)))
    for count in sorted(cases.counts()):
        chunks = 2 * count
        yield attempt(CASE, "ours", count, chunks, lambda count=count, chunks=chunks: _ours(count, chunks))


def _model(place: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with place:
        return zoo.gpt(2, 32, 2, 16, 64) if cases.is_small() else zoo.gpt(30, 5120, 40, 1024, 50304)


def _batch(chunks: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with cases.home():
        tokens = torch.randint(64, (chunks, 16)) if cases.is_small() else torch.randint(50304, (2 * chunks, 1024))
    return tokens, tokens.roll(-1, dims=1)


def _train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        cases.token_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timing.steps(step, [cases.home()])


def _ours(count: int, chunks: int) -> dict[str, list[float]]:
    inputs, target = _batch(chunks)
    places = [str(place) for place in cases.places(count)]
    found = profile(
        _model(torch.device("meta")),
        inputs[: len(inputs) // chunks].cpu(),
        places,
        training=True,
        optimizer="adam",
        progress=False,
    )
    placement = _placed(found, chunks)
    for place in cases.places(count):
        _forget_peak(place)
    model = _model(cases.home())
    flow = DataFlow(model, places)
    flow.update_flow(placement)
    step = flow.train_step(cases.token_loss, torch.optim.Adam(model.parameters(), lr=1e-4))
    losses = [step(inputs, target).item() for _ in range(STEPS)]
    values = timing.steps(lambda: step(inputs, target), cases.places(count))
    on_gpus = [place for place in cases.places(count) if place.type == "cuda"]
    return values | {
        "parameters": [float(sum(parameter.numel() for parameter in model.parameters()))],
        "loss": losses,
        "peak_bytes": [float(torch.cuda.max_memory_allocated(place)) for place in on_gpus],
        "predicted_bytes": [float(load.memory.total_bytes) for load in placement.devices],
    }


def _forget_peak(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)


def _placed(found: Profile, chunks: int) -> Placement:
    """The placement; stand-ins get three quarters of what the model needs on one."""
    assert found.cluster is not None
    cluster = found.cluster
    if cases.is_small():
        request = PlacementRequest(profile=found, objective="memory", constraints=Constraints(max_devices=1))
        alone = solve(request).devices[0].memory.total_bytes
        limited = [d.model_copy(update={"memory_bytes": 3 * alone // 4, "reserve_bytes": 0}) for d in cluster.devices]
        cluster = Cluster(devices=tuple(limited), links=cluster.links)
    constraints = Constraints(contiguous=True)
    placement = solve(
        PlacementRequest(profile=found, cluster=cluster, constraints=constraints, chunks=chunks, transfers="overlapped")
    )
    if placement.single_device is None or placement.single_device.fits:
        raise RuntimeError("the model fits on one device")
    return placement
