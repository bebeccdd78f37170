"""The service under load, on loopback: what a request, a start and a stop cost."""

from __future__ import annotations

from statistics import median
from typing import Any

from . import measure

ROWS = [
    # case, measure, unit, samples, target, whether a row is met above its target
    (
        "200-layer request, stored",
        "cache hits per second of processor time",
        "1/s",
        measure.cache_hits_per_s,
        4000,
        True,
    ),
    (
        "200-layer request, new",
        "checked and queued per second of processor time",
        "1/s",
        measure.posts_per_s,
        500,
        True,
    ),
    ("every worker busy, requests coming in", "/healthz, 99th percentile", "ms", measure.health_ms, 20, False),
    ("solve under way", "DELETE to the best placement so far", "ms", measure.stop_ms, 100, False),
    ("200-layer request, new", "answer, less the solver's own time", "ms", measure.solve_overhead_ms, None, False),
    ("placer serve", "start to ready", "s", measure.cold_start_s, 1.5, False),
]


def run() -> list[dict[str, Any]]:
    """Measure every row: the median of its samples, and the smallest and the largest as its spread."""
    return [_row(*row) for row in ROWS]


def _row(case: str, name: str, unit: str, samples: Any, target: float | None, above: bool) -> dict[str, Any]:
    values = sorted(samples())
    value = median(values)
    met = None if target is None else (value >= target if above else value <= target)
    return {
        "case": case,
        "measure": name,
        "unit": unit,
        "value": round(value, 3),
        "spread": [round(values[0], 3), round(values[-1], 3)],
        "target": target,
        "met": met,
        "peers": {},
    }
