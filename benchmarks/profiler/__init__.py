"""Whether what the profiler predicts is what happens: times of stages and steps, and peaks of
memory, in 24 cases.

Six models, each in four ways: precision, training or inference, 2 or 4 devices, and the size of the
micro-batch. Beside it, in the same run, what else one would go by: torchgpipe's ``balance_by_time``
(in training alone, as it times both passes together), PyTorch's FLOP counts with a roofline, and
accelerate's estimate of sizes. Then a Llama of 70 billion parameters is profiled on one device.
Without GPUs, tiny sizes on CPU stand-ins: those show that it runs.

``PLACER_PROFILER_CASES=resnet101,gpt`` runs these models alone (of ``resnet101``, ``gpt``,
``unet``, ``inception``, ``llama``, ``t5``, ``llama-70b``). Rows that the results of the same
machine and versions have of other cases are kept, so that all can be run in parts; also in parts at
the same time, each on GPUs of its own (``CUDA_VISIBLE_DEVICES``). ``PLACER_PROFILER_BUDGET_S`` is
the time that all may take, 460 if left out; what it leaves undone is named in a row. Results are
written after each case: whatever ends a run, what it found until then stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import record

Row = dict[str, Any]


def run(chosen: Sequence[str] = ()) -> list[Row]:
    """Measure every row; no file is touched.

    Args:
        chosen: models; those of the environment, or all, if empty.
    """
    *_, made = progress(chosen)
    return made


def progress(chosen: Sequence[str] = (), folder: Path | None = None) -> Iterator[list[Row]]:
    """All rows, again after every case.

    Args:
        chosen: as for ``run``.
        folder: of the results whose rows of other cases are kept; None for none.
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
    """The rows that were made, those of other cases as the results now have them, and those over
    all of them.

    Args:
        made: in this run.
        ended: models whose end, if they had none, is another one now.
        folder: of the results, or None.
    """
    from . import rows

    renewed = {row["case"] for row in made} | set(ended)
    known = record.known("profiler", folder) if folder is not None else []
    order = rows.cases_in_order()
    kept = [row for row in known if row["case"] in order and row["case"] not in renewed]
    every = sorted([*kept, *made], key=lambda row: order.index(row["case"]))
    return [*rows.over_all(every), *every]
