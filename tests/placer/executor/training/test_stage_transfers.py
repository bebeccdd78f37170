"""What passes between the stages of a pipeline, held against the edges of the model's profile."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, profile
from placer.executor.training.stage_transfers import Copies, crossings, found
from placer.testing import logical_devices


class Skips(nn.Module):
    """Four linear layers; all others read the first result, and the last also a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        mask = first > 0
        y = first
        for layer in self.layers[1:]:
            y = layer(y) + first
        return y * mask


def _bytes(copies: Copies) -> float:
    assert all(source.shape == target.shape for source, target in copies)
    return float(sum(target.nbytes for _, target in copies))


def test_they_are_those_of_the_profile() -> None:
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    with logical_devices(3) as places:
        model = Skips()
        flow = DataFlow(model, places, fine_grained=True)
        where = {"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 2}
        flow.layer_gpus.update(where)
        flow.update_flow()
        step = flow.train_step(
            functional.mse_loss, torch.optim.SGD(model.parameters()), "zero-bubble"
        )
        step(x, target, chunks=2)
        stages = step.pipelines[0].stages
        measured = found(stages, _bytes)
        assert crossings(stages) == []  # stand-ins have no times
        options = {"granularity": "fine", "repeats": 1, "cache": False, "progress": False}
        edges = profile(model, x[:3], places, **options).edges
    there: Counter[tuple[int, int]] = Counter()
    back: Counter[tuple[int, int]] = Counter()
    for edge in edges:
        for reader in {where[name] for name in edge.targets} - {where[edge.source]}:
            there[where[edge.source], reader] += edge.bytes
            back[where[edge.source], reader] += edge.gradient_bytes
    assert {(one.source, one.target): (one.forward_ms, one.gradient_ms) for one in measured} == {
        pair: (there[pair], back[pair] or None) for pair in there
    }
    assert len(measured) == 3
