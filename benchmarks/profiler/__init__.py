"""The error of the profiler's predictions of stage times, step times and peak memory in 24 cases.

Six models run in four ways each, which differ in precision, training or inference, 2 or 4 devices,
and the micro-batch size. The same run measures the alternatives: torchgpipe's ``balance_by_time``
(only in training, as it times both passes together), PyTorch's FLOP counts with a roofline, and
accelerate's estimate of sizes. Then a Llama of 70 billion parameters is profiled on one device.
Without GPUs, tiny sizes run on CPU stand-ins; they only show that the code runs.

``PLACER_PROFILER_CASES=resnet101,gpt`` runs only these models (of ``resnet101``, ``gpt``, ``unet``,
``inception``, ``llama``, ``t5``, ``llama-70b``). Rows of other cases stay if machine and versions
are the same, so the benchmark can run in parts, also at the same time on different GPUs
(``CUDA_VISIBLE_DEVICES``). ``PLACER_PROFILER_BUDGET_S`` limits the total time (default: 460); a row
names what was left out. Results are written after each case, so an aborted run keeps what it
measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import record

Row = dict[str, Any]


def run(chosen: Sequence[str] = ()) -> list[Row]:
    """Return all measured rows without touching a file.

    Args:
        chosen: models; if empty, the ones that the environment names, or all.
    """
    *_, made = progress(chosen)
    return made


def progress(chosen: Sequence[str] = (), folder: Path | None = None) -> Iterator[list[Row]]:
    """Yield all rows, again after every case.

    Args:
        chosen: as for ``run``.
        folder: the folder of the results, whose rows of other cases are kept; None keeps none.
    """
    from . import jobs, rows

    names = chosen or [
        name for name in os.environ.get("PLACER_PROFILER_CASES", "").split(",") if name
    ]
    budget_s = record.seconds("PLACER_PROFILER_BUDGET_S", jobs.BUDGET_S)
    samples = []
    for sample in jobs.run(names, budget_s):
        samples.append(sample)
        if sample.engine == jobs.LAST:
            yield _with_known(rows.rows(samples), [], folder)
    yield _with_known(rows.rows(samples), names or jobs.names(), folder)


def _with_known(made: Sequence[Row], ended: Sequence[str], folder: Path | None) -> list[Row]:
    """Return the new rows, the stored rows of other cases, and the rows over all cases.

    Args:
        made: the rows of this run.
        ended: the models for which this run replaces stored failures.
        folder: the folder of the results, or None.
    """
    from . import rows

    renewed = {row["case"] for row in made} | set(ended)
    known = record.known("profiler", folder) if folder is not None else []
    order = rows.cases_in_order()
    kept = [row for row in known if row["case"] in order and row["case"] not in renewed]
    every = sorted([*kept, *made], key=lambda row: order.index(row["case"]))
    return [*rows.over_all(every), *every]
