"""Whether what the profiler predicts is what happens: times of stages and steps, and peaks of memory, in 24 cases.

Six models, each in four ways: precision, training or inference, 2 or 4 devices, and the size of the micro-batch. Beside
it, in the same run, what else one would go by: torchgpipe's ``balance_by_time``, PyTorch's FLOP counts with a roofline,
and accelerate's estimate of sizes. Without GPUs, tiny sizes on CPU stand-ins: those show that it runs.

``PLACER_PROFILER_CASES=resnet101,gpt`` runs these models alone (of ``resnet101``, ``gpt``, ``unet``, ``inception``,
``llama``, ``t5``), and keeps the rows that the results of the same machine and versions have of others, so that all can
be run in parts. ``PLACER_PROFILER_BUDGET_S`` is the time that all may take, 460 if left out; what it leaves undone is
named in a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import record


def run(chosen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure every row.

    Args:
        chosen: models; those of the environment, or all, if empty.
    """
    from . import jobs, rows

    names = chosen or [name for name in os.environ.get("PLACER_PROFILER_CASES", "").split(",") if name]
    budget_s = float(os.environ.get("PLACER_PROFILER_BUDGET_S", jobs.BUDGET_S))
    made = rows.rows(jobs.run(names, budget_s))
    if names:
        kept = [row for row in record.known("profiler") if row["case"] != rows.OVERALL]
        made = [*(row for row in kept if not any(rows.belongs(row["case"], name) for name in names)), *made]
    return [*rows.over_all(made), *made]
