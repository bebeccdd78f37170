"""On real GPUs: the memory that a training step takes is what its placement predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Literal, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import Constraints, DataFlow, Placement, PlacementRequest, profile, solve
from placer.zoo import gpt, resnet50, unet

Schedule: TypeAlias = Literal["fill-drain", "1f1b", "zero-bubble"]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet50": (resnet50, lambda: torch.randn(32, 3, 224, 224)),
    "unet": (lambda: unet(width=32), lambda: torch.randn(16, 3, 192, 192)),
    "gpt": (
        lambda: gpt(layers=12, width=1024, heads=16, context=512, vocabulary=8192),
        lambda: torch.randint(8192, (8, 512)),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_calls_and_autograds_backward_pass_is_below_what_is_predicted_for_steps(
    name: str,
) -> None:
    make, data = MODELS[name]
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    model, inputs = make(), data()
    measured = profile(model, inputs, training=True, optimizer="adam", progress=False)
    placement = solve(
        PlacementRequest(
            profile=measured, schedule="fill-drain", constraints=Constraints(contiguous=True)
        )
    )
    for index in range(count):
        _warm_libraries(index)
    before = [torch.cuda.memory_allocated(index) for index in range(count)]
    flow = DataFlow(model)
    flow.update_flow(placement)
    # The loss is no layer: what it holds is kept small, and the result where it was made.
    last = placement.layer_devices[measured.layers[-1].name]
    flow.output_device = torch.device(last)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):  # the first step makes gradients and the optimizer's state
        flow(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for index in range(count):
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
    flow(inputs).mean().backward()
    # Recorded steps keep places for what crosses, and freed memory serves no other pass: a call
    # needs less.
    for load in placement.devices:
        index = torch.device(load.device).index
        torch.cuda.synchronize(index)
        used = torch.cuda.max_memory_allocated(index) - before[index]
        assert 0.5 * load.memory.total_bytes <= used <= 1.02 * load.memory.total_bytes, (load, used)
    flow.undo()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Compute cross entropy; classes are a language model's last dimension, else the second."""
    logits = output.flatten(0, 1) if output.dim() == 3 else output
    return functional.cross_entropy(
        logits.float(), target.flatten() if output.dim() == 3 else target
    )


TARGETS: dict[str, Callable[[int], Tensor]] = {
    "resnet50": lambda size: torch.randint(1000, (size,)),
    "unet": lambda size: torch.randint(2, (size, 192, 192)),
    "gpt": lambda size: torch.randint(8192, (size, 512)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_passes_and_their_loss_reserve_what_is_predicted_within_a_tenth(
    name: str, schedule: Schedule
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    make, data = MODELS[name]
    model, part, chunks = make(), data(), 4
    target = TARGETS[name](len(part))
    measured = profile(
        model, part, 2, optimizer="sgd", progress=False, loss_fn=_loss, target=target
    )
    asked = PlacementRequest(
        profile=measured,
        schedule=schedule,
        chunks=chunks,
        constraints=Constraints(contiguous=True, min_devices=2),
    )
    placement = solve(asked)
    _assert_reserved(
        model,
        placement,
        schedule,
        torch.cat([part] * chunks),
        torch.cat([target] * chunks),
        share=0.1,
    )


@pytest.mark.gpu
def test_wherever_a_unet_is_cut_its_steps_reserve_what_is_predicted_within_four_percent() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    make, data = MODELS["unet"]
    part, chunks = data(), 4
    target = TARGETS["unet"](len(part))
    batch, goal = torch.cat([part] * chunks), torch.cat([target] * chunks)
    measured = profile(
        make(), part, 2, optimizer="sgd", progress=False, loss_fn=_loss, target=target
    )
    for cut in range(12, len(measured.layers), 12):
        pinned = {layer.name: f"cuda:{int(at >= cut)}" for at, layer in enumerate(measured.layers)}
        rules = Constraints(contiguous=True, pinned=pinned)
        placement = solve(
            PlacementRequest(profile=measured, schedule="1f1b", chunks=chunks, constraints=rules)
        )
        _assert_reserved(make(), placement, "1f1b", batch, goal, share=0.04)


def _assert_reserved(
    model: nn.Module,
    placement: Placement,
    schedule: Schedule,
    batch: Tensor,
    target: Tensor,
    share: float,
) -> None:
    """Check that a third step's reserved peak is within a share of the prediction."""
    gc.collect()  # what earlier tests left would be freed meanwhile
    torch.cuda.empty_cache()
    before = [torch.cuda.memory_reserved(index) for index in range(2)]
    flow = unverified(DataFlow(model))
    flow.update_flow(placement)
    step = flow.train_step(_loss, torch.optim.SGD(model.parameters(), lr=1e-3), schedule)
    for _ in range(2):
        step(batch, target, chunks=placement.chunks)
    torch.cuda.empty_cache()
    for index in range(2):
        torch.cuda.reset_peak_memory_stats(index)
    step(batch, target, chunks=placement.chunks)
    for load in placement.devices:
        index = torch.device(load.device).index
        torch.cuda.synchronize(index)
        used = torch.cuda.max_memory_reserved(index) - before[index]
        assert abs(load.memory.total_bytes / used - 1) <= share, (load, used)
    flow.undo()


def _warm_libraries(index: int) -> None:
    """Let cuBLAS take its workspaces, forwards and backwards: the device's reserve holds them, not
    the placement."""
    square = torch.ones(256, 256, device=f"cuda:{index}", requires_grad=True)
    (square @ square).sum().backward()
    torch.cuda.synchronize(index)
