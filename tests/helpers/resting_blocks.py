"""A model of alike blocks, and placements in which the parameters of some rest on the host."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, Placement

BLOCKS = 7


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make() -> nn.Sequential:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).eval()


def placement(host: str = "", disk: str = "", first: int = BLOCKS, **fields: Any) -> Placement:
    """Return a placement with the first blocks on one stand-in and the rest on another.

    Args:
        host: the digits of the blocks whose parameters rest in the host's memory.
        disk: the same for its disk.
        first: the number of blocks on the first stand-in.
        fields: further fields of the placement.
    """
    return Placement(
        status="feasible",
        objective="latency",
        layer_devices={str(n): "cpu:0" if n < first else "cpu:1" for n in range(BLOCKS)},
        resting=dict.fromkeys(host, "host") | dict.fromkeys(disk, "disk"),
        **fields,
    )


def placed(
    host: str = "", disk: str = "", first: int = BLOCKS, folder: Any = None
) -> tuple[DataFlow, nn.Sequential, nn.Sequential]:
    """Return a flow with the model on such a placement, the model, and an unsplit copy.

    Args:
        host: see ``placement``.
        disk: see ``placement``.
        first: see ``placement``.
        folder: for files; None for the usual one.
    """
    model = make()
    reference = copy.deepcopy(model)
    flow = DataFlow(model, inference_only=True, disk_folder=folder)
    flow.update_flow(placement(host, disk, first))
    return flow, model, reference
