"""How fast placements run, beside what else a user could take, in the same run on the same machine.

Training steps of three models over all devices and over two, inference streams of two models, switching maps, the
overhead on one device, and the experiment of PyTorch's model-parallel tutorial. Without GPUs, tiny sizes on CPU
stand-ins: those show that it runs.

``PLACER_EXECUTOR_CASES=resnet101,gpt:torchgpipe`` runs these cases, or these jobs of theirs (``CASE:ENGINE``), alone,
in this order. Cases are ``resnet101``, ``gpt``, ``unet``, ``stream-resnet101``, ``stream-gpt``, ``switching``,
``overhead``, ``large``, ``tutorial``, ``compile-resnet101``, ``compile-unet``, ``compile-gpt``, ``compile-tutorial``,
``compile-stream-resnet101`` and ``compile-stream-gpt``; engines ``ours``, ``torch.distributed``,
``placer.distributed``, ``tutorial``, ``torchgpipe`` and ``accelerate``. Rows are made anew, from what every job of the
same machine and versions last found.
``PLACER_EXECUTOR_BUDGET_S`` is the time that all may take, 460 if left out; what it leaves undone is named in a row.
``PLACER_EXECUTOR_TINY=1 python -m benchmarks.executor CASE:ENGINE -`` shows that a job runs on GPUs, at tiny sizes.
Results are written after each sample: whatever ends a run, what it found until then stays.
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
        chosen: cases or jobs; those of the environment, or all, if empty.
    """
    made: list[Row] = []
    for rows in progress(chosen):
        made = rows
    return made


def progress(chosen: Sequence[str] = (), folder: Path | None = None) -> Iterator[list[Row]]:
    """All rows, again after every sample.

    Args:
        chosen: as for ``run``.
        folder: of the results: what was found before is read there, and samples are kept there. None does neither.
    """
    from . import jobs, rows
    from .store import Store

    names = chosen or [name for name in os.environ.get("PLACER_EXECUTOR_CASES", "").split(",") if name]
    budget_s = record.seconds("PLACER_EXECUTOR_BUDGET_S", jobs.BUDGET_S)
    before = record.known("executor", folder) if folder is not None else []
    store = Store(folder)
    for job, sample in jobs.run(names, budget_s):
        store.add(job.name, sample)
        ours = {name.partition(":")[0] for name in store.jobs if name.endswith(":ours")}
        # Rows that are there without samples go when there are samples of ours, not of a peer alone.
        kept = [row for row in before if not any(rows.belongs(row["case"], case) for case in ours)]
        old = {known.case for known in store.samples() if any(rows.belongs(row["case"], known.case) for row in kept)}
        yield [*kept, *rows.rows([known for known in store.samples() if known.case not in old])]
