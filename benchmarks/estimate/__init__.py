"""The error of memory estimates that need no GPU, against memory that was measured on GPUs.

The profiler's 24 cases were measured on one H200, so their split is known: all layers are on one
device (``benchmarks/results/profiler-1xH200.json``). The estimate of each case sees only shapes.
Two peers estimate the same cases in the same run: ``accelerate estimate-memory``, and the
``MemTracker`` of torch under a ``FakeTensorMode``. A model of 10 billion parameters follows, split
over devices as ``benchmarks/results/executor-4xH200.json`` recorded its memory, and the time that
the estimate of a model of 7 billion parameters takes, imports included.

``PLACER_ESTIMATE_CASES=resnet101,gpt`` runs only these models (of the profiler's, ``large`` and
``time``).
"""

from __future__ import annotations

import os
from typing import Any

Row = dict[str, Any]


def run() -> list[Row]:
    """Return all rows."""
    from . import cases, large, rows, seconds

    chosen = {name for name in os.environ.get("PLACER_ESTIMATE_CASES", "").split(",") if name}
    found = cases.measured(chosen)
    made = rows.rows(found)
    if not chosen or "large" in chosen:
        made += large.rows()
    if not chosen or "time" in chosen:
        made.append(seconds.row())
    return made
