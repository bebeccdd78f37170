"""The service under load, on loopback: what a request, a start and a stop cost."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.record import row

from . import measure


class Asked(NamedTuple):
    """One row to be measured."""

    case: str
    measure: str
    unit: str
    samples: Callable[[], list[float]]
    target: float | None = None
    smaller_is_better: bool = True


PER_CORE = "per second of processor time"
STORED, NEW = "200-layer request, stored", "200-layer request, new"

ROWS = [
    Asked(STORED, f"answered {PER_CORE}", "1/s", measure.cache_hits_per_s, 4000, smaller_is_better=False),
    Asked(NEW, f"checked and queued {PER_CORE}", "1/s", measure.posts_per_s, 500, smaller_is_better=False),
    Asked("every worker computes, requests come in", "/healthz, 99th percentile", "ms", measure.health_ms, 20),
    Asked("solve under way", "DELETE to the best placement so far", "ms", measure.stop_ms, 100),
    Asked(NEW, "answer, less the solver's own time", "ms", measure.solve_overhead_ms),
    Asked("placer serve", "start to ready", "s", measure.cold_start_s, 1.5),
]


def run() -> list[dict[str, Any]]:
    """Measure every row: the median of its samples, and the smallest and the largest as its spread."""
    return [_measured(asked) for asked in ROWS]


def _measured(asked: Asked) -> dict[str, Any]:
    values = [round(value, 3) for value in asked.samples()]
    return row(
        asked.case,
        asked.measure,
        asked.unit,
        median(values),
        spread=(min(values), max(values)),
        target=asked.target,
        smaller_is_better=asked.smaller_is_better,
    )
