"""The speed of placements and of their alternatives, measured in turns on the same machine.

Measured are training steps of three models over all devices and over two, inference streams of two
models, a model that no single device holds, FSDP2's steps against their predictions, map switches,
the overhead on one device, and the experiment of PyTorch's model-parallel tutorial. All engines of
a case take seven turns each with the same batch. Without GPUs, tiny sizes run on CPU stand-ins;
they only show that the code runs.

``PLACER_EXECUTOR_CASES=resnet101@4,gpt:ours,gpt:FSDP2`` runs only these cases, in this order.
``CASE`` runs on all devices and on two, ``CASE@DEVICES`` on that number. With ``:ENGINE``, only the
named engines take part, in addition to eager PyTorch. Cases are ``resnet101``, ``gpt``, ``unet``,
``large``, ``stream-resnet101``, ``stream-gpt``, ``sharded-gpt`` and ``sharded-resnet101``, and,
without a number of devices, ``switching``, ``overhead``, ``tutorial``, ``compile-resnet101``,
``compile-unet``, ``compile-gpt``, ``compile-tutorial``, ``compile-stream-resnet101`` and
``compile-stream-gpt``. Engines of training steps are ``ours``, ``DDP``, ``DDP-compiled``,
``FSDP2``, ``torch.distributed``, ``torch.distributed interleaved``, ``torch.distributed
zero-bubble``, ``placer.distributed``, ``tutorial`` and ``torchgpipe``. Engines of ``large`` are
``ours`` and ``FSDP2``; engines of streams are ``ours``, ``tutorial`` and ``accelerate``.

A case that runs again replaces all its earlier results, so that a row and its peers always come
from one run. ``PLACER_EXECUTOR_BUDGET_S`` limits the total time (default: 7200); a row names what
was left out. ``PLACER_EXECUTOR_TINY=1 python -m benchmarks.executor CASE@DEVICES:ENGINE+ENGINE -``
shows at tiny sizes that a job runs on GPUs. Results are written after each sample, so an aborted
run keeps what it measured.
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
        chosen: cases or jobs; if empty, the ones that the environment names, or all.
    """
    made: list[Row] = []
    for rows in progress(chosen):
        made = rows
    return made


def progress(chosen: Sequence[str] = (), folder: Path | None = None) -> Iterator[list[Row]]:
    """Yield all rows, again after every sample.

    Args:
        chosen: as for ``run``.
        folder: the folder of the results, from which earlier results are read and where samples are
            kept. None does neither.
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
