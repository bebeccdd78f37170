"""The service under load, on loopback: what a request, a start and a stop cost; and what becomes of it under attack.

``PLACER_SERVICE_SOAK_S``, ``PLACER_SERVICE_BODIES`` and ``PLACER_SERVICE_CONTRACT_S`` make the soak, the hostile bodies
and the run of schemathesis longer.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.record import row

from . import hostile, measure, soak


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
    return [*map(_measured, ROWS), *_hostile_rows(), *_soak_rows()]


def _hostile_rows() -> list[dict[str, Any]]:
    sent, (runs, findings) = hostile.send(), hostile.fuzz()
    contract = hostile.contract_findings()
    case = f"{sent.sent:,} hostile bodies"
    return [
        row(case, "answered with a 5xx", "", sent.failures, target=0),
        row(case, "largest problem", "B", sent.largest_bytes, target=4096),
        row(case, "memory, after all against after a fifth", "%", round(sent.growth_percent, 2), target=5),
        row(f"{runs:,} bodies of a coverage-guided fuzzer", "findings", "", findings, target=0),
        row(f"schemathesis, all checks, {contract.cases:,} cases", "findings", "", contract.findings, target=0),
    ]


def _soak_rows() -> list[dict[str, Any]]:
    found = soak.soak()
    case = f"{soak.SECONDS:g} s of mixed load, {found.requests:,} requests"
    return [
        row(case, "answered with a 5xx", "", found.failures, target=0),
        row(case, f"of {found.accepted:,} accepted jobs, not answered once", "", found.unanswered, target=0),
        row(case, "memory, at the end against a quarter through", "%", round(found.growth_percent, 2), target=5),
    ]


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
