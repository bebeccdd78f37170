"""Placements in which blocks stay on a device, rest on the host, or are computed by its CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from resting_models import LAYERS, blocks

from placer import DataFlow, Placement


def mixed(
    model: Any, device: str, cpu: str, on_cpu: Collection[int], resting: Collection[int]
) -> DataFlow:
    """Return a flow with the model on a device, but for some blocks.

    Args:
        model: of ``resting_models``.
        device: of all other layers.
        cpu: computes some blocks.
        on_cpu: the numbers of these blocks.
        resting: the numbers of the blocks of the device that rest on the host.
    """
    where = {"model.embed_tokens": device}
    where |= {name: cpu if n in on_cpu else device for n, name in enumerate(blocks(range(LAYERS)))}
    where |= {"model.norm": device, "lm_head": device}
    flow = DataFlow(model, inference_only=True)
    flow.update_flow(
        Placement(
            status="feasible",
            objective="generation",
            contiguous=False,
            layer_devices=where,
            resting=dict.fromkeys(blocks(resting), "host"),
        )
    )
    return flow
