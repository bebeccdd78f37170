"""The host's cost of a new map where the weights are on every device already; it needs no GPU.

The executor's benchmark measures the same on GPUs, and what moving the weights costs.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from .. import record

LAYERS, WIDTH, TARGET_MS = 100, 32, 1.0


def run() -> list[dict[str, Any]]:
    """Time ``update_flow`` of a 100-layer model with ``enable_clone``, on stand-ins or GPUs."""
    from ..executor import cases, switching

    values = switching.clones(LAYERS, WIDTH)
    case = f"{LAYERS}-layer model, enable_clone, {len(cases.places())} devices"
    return [
        _row(
            case,
            "update_flow and what the first call after it takes longer",
            values["switch_ms"],
            TARGET_MS,
        ),
        _row(case, "update_flow alone", values["update_flow_ms"], None),
    ]


def _row(case: str, measure: str, times: list[float], target: float | None) -> dict[str, Any]:
    value = float(f"{median(times):.4g}")
    return record.row(case, measure, "ms", value, spread=[min(times), max(times)], target=target)
