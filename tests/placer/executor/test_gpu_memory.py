"""On real GPUs: the memory that a training step takes is what its placement predicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from placer import Constraints, DataFlow, PlacementRequest, profile, solve
from placer.zoo import gpt, resnet50, unet

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
def test_the_peak_of_a_training_step_is_the_predicted_one_within_a_tenth(name: str) -> None:
    make, data = MODELS[name]
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    model, inputs = make(), data()
    measured = profile(model, inputs, training=True, optimizer="adam", progress=False)
    placement = solve(
        PlacementRequest(profile=measured, schedule="fill-drain", constraints=Constraints(contiguous=True))
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
    for load in placement.devices:
        index = torch.device(load.device).index
        torch.cuda.synchronize(index)
        used = torch.cuda.max_memory_allocated(index) - before[index]
        assert 0.9 <= load.memory.total_bytes / used <= 1.1, (load, used)
    flow.undo()


def _warm_libraries(index: int) -> None:
    """Let cuBLAS take its workspaces, forwards and backwards: the device's reserve holds them, not the placement."""
    square = torch.ones(256, 256, device=f"cuda:{index}", requires_grad=True)
    (square @ square).sum().backward()
    torch.cuda.synchronize(index)
