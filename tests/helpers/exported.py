"""Placements of small models for exports, and the layers that formats are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import placer
from placer import Placement


def placed(layers: dict[str, str] | None = None, /, **more: Any) -> Placement:
    """Return a placement of layers on devices; fields of the placement may follow."""
    return Placement(
        **{"status": "feasible", "objective": "throughput", "layer_devices": layers or {}} | more
    )


def layer_names(model: nn.Module, example: Any, granularity: Any = "fine") -> list[str]:
    """Return the names of a model's layers, in execution order."""
    return [
        layer.name for layer in placer.capture_graph(model, example, granularity=granularity).layers
    ]


def cut(layers: Sequence[str], *firsts: str, **more: Any) -> Placement:
    """Place layers on ``cuda:0`` and so on; each layer of ``firsts`` is the first on its device."""
    found, device = {}, 0
    for layer in layers:
        device += layer in firsts
        found[layer] = f"cuda:{device}"
    return placed(found, **more)
