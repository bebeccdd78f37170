"""How fast placements run, beside what else a user could take, in the same run on the same machine.

Training steps of three models over all devices and over two, inference streams of two models, switching maps, the
overhead on one device, and the experiment of PyTorch's model-parallel tutorial. Without GPUs, tiny sizes on CPU
stand-ins: those show that it runs.

``PLACER_EXECUTOR_CASES=resnet101,gpt`` runs these cases alone (of ``resnet101``, ``gpt``, ``unet``,
``stream-resnet101``, ``stream-gpt``, ``switching``, ``overhead``, ``large``, ``tutorial``), and keeps the rows that the
results of the same machine and versions have of others.
``PLACER_EXECUTOR_BUDGET_S`` is the time that all may take, 460 if left out; what it leaves undone is named in a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import record


def run(chosen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure every row.

    Args:
        chosen: cases; those of the environment, or all, if empty.
    """
    from . import jobs, rows

    names = chosen or [name for name in os.environ.get("PLACER_EXECUTOR_CASES", "").split(",") if name]
    budget_s = float(os.environ.get("PLACER_EXECUTOR_BUDGET_S", jobs.BUDGET_S))
    made = rows.rows(jobs.run(names, budget_s))
    if not names:
        return made
    kept = (row for row in record.known("executor") if not any(rows.belongs(row["case"], name) for name in names))
    return [*kept, *made]
