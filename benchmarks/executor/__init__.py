"""How fast placements run, beside what else a user could take, in turns on the same machine.

Training steps of three models over all devices and over two, inference streams of two models, a
model that no single device holds, switching maps, the overhead on one device, and the experiment of
PyTorch's model-parallel tutorial. All engines of a case take turns, seven each, with the same
batch. Without GPUs, tiny sizes on CPU stand-ins: those show that it runs.

``PLACER_EXECUTOR_CASES=resnet101@4,gpt:ours,gpt:FSDP2`` runs these cases alone, in this order:
``CASE`` on all devices and on two, ``CASE@DEVICES`` on that number; with ``:ENGINE`` only the
engines that are named take part, beside eager PyTorch. Cases are ``resnet101``, ``gpt``, ``unet``,
``large``, ``stream-resnet101`` and ``stream-gpt``, and, without a number of devices, ``switching``,
``overhead``, ``tutorial``, ``compile-resnet101``, ``compile-unet``, ``compile-gpt``,
``compile-tutorial``, ``compile-stream-resnet101`` and ``compile-stream-gpt``. Engines of training
steps are ``ours``, ``DDP``, ``DDP-compiled``, ``FSDP2``, ``torch.distributed``, ``torch.distributed
interleaved``, ``torch.distributed zero-bubble``, ``placer.distributed``, ``tutorial`` and
``torchgpipe``; of ``large`` ``ours`` and ``FSDP2``; of streams ``ours``, ``tutorial`` and
``accelerate``. A case that is run again takes the place of all that it gave before, so that a row
and its peers are always of one run. ``PLACER_EXECUTOR_BUDGET_S`` is the time that all may take,
7200 if left out; what it leaves undone is named in a row. ``PLACER_EXECUTOR_TINY=1 python -m
benchmarks.executor CASE@DEVICES:ENGINE+ENGINE -`` shows that a job runs on GPUs, at tiny sizes.
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
        folder: of the results: what was found before is read there, and samples are kept there.
            None does neither.
    """
    from . import jobs, rows
    from .store import Store

    names = chosen or [
        name for name in os.environ.get("PLACER_EXECUTOR_CASES", "").split(",") if name
    ]
    budget_s = record.seconds("PLACER_EXECUTOR_BUDGET_S", jobs.BUDGET_S)
    before = record.known("executor", folder) if folder is not None else []
    store = Store(folder)
    for job, sample in jobs.run(names, budget_s):
        store.add(job.contest, sample)
        kept = [
            row
            for row in before
            if not any(rows.belongs(row["case"], contest) for contest in store.jobs)
        ]
        yield [*kept, *rows.rows(store.samples())]
