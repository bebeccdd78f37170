"""A small model with a skip connection, batch normalisation and dropout, its inputs, and a flow of
it by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placer import DataFlow

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)

CPU = [torch.device("cpu", index) for index in range(4)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.body(x))


def placed(model: nn.Module, **places: int | str | torch.device) -> DataFlow:
    flow = DataFlow(model)
    flow.layer_gpus.update(places)
    flow.update_flow()
    return flow
