"""The jobs, the most important first.

On GPUs each model has a process of its own, so that a crash or a hang loses only that job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

from ..executor.jobs import Job, apart, guarded
from ..executor.sample import Sample, append
from . import cases, large, ours

BUDGET_S = 460.0
LAST = ours.LAST
MODEL_S = 300.0
"""For the four ways of a model; what it had found by then counts."""
LARGE_S = 240.0
"""For the model that no device could hold, whose target is 180."""


def every() -> list[Job]:
    """Return a job for each model, and a job for the model that no device could hold."""
    return [
        *map(_job, cases.known().values()),
        Job(large.CASE, 0, (large.ENGINE,), LARGE_S, lambda _: large.measure()),
    ]


def names() -> list[str]:
    """Return the names that select the jobs."""
    return [job.case for job in every()]


def _job(model: cases.Model) -> Job:
    return Job(model.name, 0, (ours.ENGINE,), MODEL_S, lambda _: ours.measure(model))


def run(chosen: Sequence[str] = (), budget_s: float = BUDGET_S) -> Iterator[Sample]:
    """Run jobs, and yield and print their samples as they come.

    Args:
        chosen: names of jobs; all if empty.
        budget_s: the time in seconds after which no job starts and every job ends.

    Raises:
        ValueError: a name is not a model.
    """
    if wrong := [name for name in chosen if name not in names()]:
        raise ValueError(f"{wrong[0]!r} is not a case; there are {', '.join(names())}")
    began = perf_counter()
    for job in every():
        if chosen and job.case not in chosen:
            continue
        for sample in _samples(job, budget_s - (perf_counter() - began)):
            print(f"[{perf_counter() - began:5.0f} s] {sample}", flush=True)
            yield sample


def _samples(job: Job, left_s: float) -> Iterator[Sample]:
    if left_s <= 0:
        yield Sample(job.case, job.engine, 0, 0, failed="not run, the time of the benchmark was up")
    elif cases.is_small():
        yield from guarded(job)
    else:
        yield from apart(job, min(job.limit_s, left_s), "benchmarks.profiler")


def work(name: str, path: Path) -> None:
    """Run one job in this process, and write its samples to a file or print them for ``-``."""
    job = next(job for job in every() if name in (job.case, job.name))
    for sample in guarded(job):
        if str(path) == "-":
            print(sample, flush=True)
        else:
            append(sample, path)
