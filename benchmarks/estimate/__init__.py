"""The error of memory estimates that need no GPU, against memory that was measured on GPUs.

The profiler's 24 cases were measured on one H200, so their split is known: all layers are on one
device (``benchmarks/results/profiler-1xH200.json``). The estimate of each case sees only shapes.
Two peers estimate the same cases in the same run: ``accelerate estimate-memory``, and the
``MemTracker`` of torch under a ``FakeTensorMode``. A model of 10 billion parameters follows, split
over devices as ``benchmarks/results/executor-4xH200.json`` recorded its memory, and the time that
the estimate of a model of 7 billion parameters takes, imports included.

``PLACER_ESTIMATE_CASES=large,time`` runs only these parts (of ``cases``, ``large`` and ``time``).
Rows of other parts stay if machine and versions are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import record

Row = dict[str, Any]
CASES, LARGE, TIME = "cases", "large", "time"


def progress(folder: Path) -> Iterator[list[Row]]:
    """Yield all rows so far, each time that a part has ended.

    Args:
        folder: the folder of the results, whose rows of other parts are kept.

    Raises:
        ValueError: the environment names no part.
    """
    from . import cases, large, rows, seconds

    parts = {
        CASES: lambda: rows.rows(cases.measured()),
        LARGE: large.rows,
        TIME: lambda: [seconds.row()],
    }
    chosen = [name for name in os.environ.get("PLACER_ESTIMATE_CASES", "").split(",") if name]
    if wrong := [name for name in chosen if name not in parts]:
        raise ValueError(f"{wrong[0]!r} is not a part; there are {', '.join(parts)}")
    found: dict[str, list[Row]] = {name: [] for name in parts}
    for row in record.known("estimate", folder) if chosen else []:
        found[_part(row)].append(row)
    for name in chosen or parts:
        found[name] = parts[name]()
        yield [row for name in parts for row in found[name]]


def _part(row: Row) -> str:
    """Return the part that a row belongs to."""
    from . import large, seconds

    if row["case"] == seconds.CASE:
        return TIME
    return LARGE if row["case"].startswith(large.LABEL) else CASES
