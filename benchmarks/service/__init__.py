"""The service on loopback: the cost of a request, a start and a stop, and its robustness.

``PLACER_SERVICE_CASES=rates,soak`` runs only these parts (of ``rates``, ``postgres``, ``faults``,
``network``, ``hostile``, ``fuzz``, ``contract``, ``soak``) and keeps the rows of the others if
machine and versions are the same. Results are written after each part. ``PLACER_SERVICE_SOAK_S``,
``PLACER_SERVICE_BODIES`` and ``PLACER_SERVICE_CONTRACT_S`` extend the soak, the hostile bodies of
both kinds, and the run of schemathesis.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.record import row

from . import faults, hostile, measure, network, postgres, soak


class Asked(NamedTuple):
    """One row to measure."""

    case: str
    measure: str
    unit: str
    samples: Callable[[], list[float]]
    target: float | None = None
    smaller_is_better: bool = True


PER_CORE = "per second of processor time"
STORED, NEW = "200-layer request, stored", "200-layer request, new"

ROWS = [
    Asked(
        STORED,
        f"answered {PER_CORE}",
        "1/s",
        measure.cache_hits_per_s,
        4000,
        smaller_is_better=False,
    ),
    Asked(
        NEW,
        f"checked and queued {PER_CORE}",
        "1/s",
        measure.posts_per_s,
        500,
        smaller_is_better=False,
    ),
    Asked(
        "every worker computes, requests come in",
        "/healthz, 99th percentile",
        "ms",
        measure.health_ms,
        20,
    ),
    Asked("solve under way", "DELETE to the best placement so far", "ms", measure.stop_ms, 100),
    Asked(NEW, "answer, less the solver's own time", "ms", measure.solve_overhead_ms),
    Asked("placer serve", "start to ready", "s", measure.cold_start_s, 1.5),
]


def run() -> list[dict[str, Any]]:
    """Return the rows of every part, or of the parts that the environment names."""
    made: list[dict[str, Any]] = []
    for rows in progress():
        made = rows
    return made


def progress(folder: Path | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows, again after each part.

    Args:
        folder: the folder of the results, whose other rows are kept; None keeps none.

    Raises:
        ValueError: a part does not exist.
    """
    chosen = [
        name for name in os.environ.get("PLACER_SERVICE_CASES", "").split(",") if name
    ] or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        raise ValueError(
            f"PLACER_SERVICE_CASES: there is no {sorted(unknown)}; there are {', '.join(PARTS)}"
        )
    old = record.known("service", folder) if folder is not None else []
    rows = {part: [one for one in old if part_of(one["case"]) == part] for part in PARTS}
    for part in chosen:
        rows[part] = PARTS[part]()
        yield [one for part in PARTS for one in rows[part]]


def part_of(case: str) -> str:
    """Return the part that a row belongs to, by its case."""
    return next((part for mark, part in MARKS.items() if mark in case), "rates")


def _rate_rows() -> list[dict[str, Any]]:
    return [*map(_measured, ROWS)]


def _postgres_rows() -> list[dict[str, Any]]:
    with postgres.postgres() as database:
        found = [
            _measured(
                asked._replace(
                    case=f"{asked.case}, on PostgreSQL",
                    samples=partial(asked.samples, database=url),
                )
            )
            for asked in ROWS[:2]
            if (url := database.new_database())
        ]
    taken_over, twice = faults.replica_killed()
    case = f"two replicas on PostgreSQL, {taken_over.accepted} jobs, one replica killed"
    return [
        *found,
        row(
            "two replicas on PostgreSQL, the same jobs asked of both",
            "solved more than once",
            "",
            twice,
            target=0,
        ),
        row(case, "accepted and not answered once", "", taken_over.unanswered, target=0),
        row(
            case,
            f"kill to all answered, with a lease of {faults.LEASE_S} s",
            "s",
            round(taken_over.seconds, 2),
        ),
    ]


def _fault_rows() -> list[dict[str, Any]]:
    found = {
        "kill -9 of workers": faults.worker_killed(),
        "kill -9 of the service, twice": faults.server_killed(),
        "kill -9 of PostgreSQL": faults.postgres_killed(),
        "a disk that is full for a while": faults.disk_full(),
        "a clock that jumps a day ahead and two back": faults.clock_jumped(),
    }
    return [
        row(
            f"{what}, {how.accepted} jobs",
            "accepted and not answered once",
            "",
            how.unanswered,
            target=0,
        )
        for what, how in found.items()
    ]


def _network_rows() -> list[dict[str, Any]]:
    found = network.through_faults()
    case = (
        f"{found.calls} calls of the client through timeouts, resets, 429, 502, 503, 504 "
        "and half answers"
    )
    return [
        row(
            case,
            "answered",
            "%",
            round(100 * found.answered / found.calls, 1),
            smaller_is_better=False,
        ),
        row(case, "neither the answer nor a clear error", "", found.unclear, target=0),
        row(case, "sent twice although that is not safe", "", found.twice, target=0),
    ]


def _hostile_rows() -> list[dict[str, Any]]:
    sent = hostile.send()
    case = f"{sent.sent:,} hostile bodies"
    return [
        row(case, "answered with a 5xx", "", sent.failures, target=0),
        row(case, "largest problem", "B", sent.largest_bytes, target=4096),
        row(
            case,
            "memory, after all against after a fifth",
            "%",
            round(sent.growth_percent, 2),
            target=5,
        ),
    ]


def _fuzz_rows() -> list[dict[str, Any]]:
    runs, findings = hostile.fuzz()
    return [row(f"{runs:,} bodies of a coverage-guided fuzzer", "findings", "", findings, target=0)]


def _contract_rows() -> list[dict[str, Any]]:
    found = hostile.contract_findings()
    return [
        row(
            f"schemathesis, all checks, {found.cases:,} cases",
            "findings",
            "",
            found.findings,
            target=0,
        )
    ]


def _soak_rows() -> list[dict[str, Any]]:
    found = soak.soak()
    case = f"{soak.SECONDS:g} s of mixed load, {found.requests:,} requests"
    return [
        row(case, "answered with a 5xx", "", found.failures, target=0),
        row(
            case,
            f"of {found.accepted:,} accepted jobs, not answered once",
            "",
            found.unanswered,
            target=0,
        ),
        row(
            case,
            "memory, at the end against a quarter through",
            "%",
            round(found.growth_percent, 2),
            target=5,
        ),
    ]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "rates": _rate_rows,
    "postgres": _postgres_rows,
    "faults": _fault_rows,
    "network": _network_rows,
    "hostile": _hostile_rows,
    "fuzz": _fuzz_rows,
    "contract": _contract_rows,
    "soak": _soak_rows,
}
MARKS = {
    "kill -9 of": "faults",
    "a disk that": "faults",
    "a clock that": "faults",
    "calls of the client": "network",
    "hostile bodies": "hostile",
    "coverage-guided": "fuzz",
    "schemathesis": "contract",
    "mixed load": "soak",
    "on PostgreSQL": "postgres",
}
"""By these words in its case a row is known to be of a part; one without any is of ``rates``."""


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
