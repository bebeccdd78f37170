"""The jobs in the order of importance.

On GPUs each job has a process of its own, so that a crash or a hang loses only that job.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from .. import record
from . import (
    cases,
    compiling,
    contest,
    large,
    overhead,
    replicas,
    sharded,
    stream,
    switching,
    training,
    tutorial_resnet50,
)
from .sample import NOT_RUN, Sample, append, read, reason

ROOT = Path(__file__).parents[2]
BUDGET_S = 7200.0
CONTEST_S, OTHER_S = 900.0, 420.0
OURS = ("ours",)
LIMIT = "PLACER_EXECUTOR_LIMIT_S"
"""Tells a process how long it has."""
RESERVE_S = 20.0
"""What a process keeps of its time to end in."""


@dataclass(frozen=True)
class Job:
    """A case on a number of devices, with all engines that take turns in it.

    Attributes:
        case: the name of the case.
        devices: the number of devices; 0 for a case with only one possible number.
        engines: the engines that take part.
        limit_s: the time after which its process is killed; the samples until then count.
        run: measures it with these engines.
    """

    case: str
    devices: int
    engines: tuple[str, ...]
    limit_s: float
    run: Callable[[Sequence[str]], Iterator[Sample]]

    @property
    def contest(self) -> str:
        """Return the job's name without its engines."""
        return f"{self.case}@{self.devices}" if self.devices else self.case

    @property
    def name(self) -> str:
        """Return the name that selects the job in its process."""
        return f"{self.contest}:{'+'.join(self.engines)}"

    @property
    def engine(self) -> str:
        """Return the first engine, for a sample that concerns the whole job."""
        return self.engines[0]

    def measure(self) -> Iterator[Sample]:
        """Yield its samples."""
        return self.run(self.engines)


def every() -> list[Job]:
    """Return all jobs, the most important first."""
    counts = cases.counts()
    return [
        *(_training(name, count) for count in counts for name in cases.FULL),
        *(_large(count) for count in counts),
        *(_stream(name, count) for count in counts for name in stream.NAMES),
        *(_sharded(name, count) for count in counts for name in sharded.NAMES),
        Job(switching.CASE, 0, OURS, OTHER_S, lambda _: switching.measure()),
        Job(overhead.CASE, 0, OURS, OTHER_S, lambda _: overhead.measure()),
        Job(tutorial_resnet50.CASE, 0, OURS, OTHER_S, lambda _: tutorial_resnet50.measure()),
        *(_compiled(name) for name in compiling.NAMES),
        *(_compiled_stream(name) for name in stream.NAMES),
    ]


def _training(name: str, count: int) -> Job:
    def run(engines: Sequence[str]) -> Iterator[Sample]:
        return training.measure(cases.training(name), count, engines)

    return Job(name, count, training.ENGINES, CONTEST_S, run)


def _large(count: int) -> Job:
    return Job(
        large.CASE, count, large.ENGINES, CONTEST_S, lambda engines: large.measure(count, engines)
    )


def _stream(name: str, count: int) -> Job:
    def run(engines: Sequence[str]) -> Iterator[Sample]:
        return stream.measure(cases.training(name), count, engines)

    return Job(stream.PREFIX + name, count, stream.ENGINES, CONTEST_S, run)


def _sharded(name: str, count: int) -> Job:
    def run(engines: Sequence[str]) -> Iterator[Sample]:
        return sharded.measure(cases.training(name), count)

    return Job(sharded.PREFIX + name, count, (replicas.FSDP2,), OTHER_S, run)


def _compiled(name: str) -> Job:
    run = compiling.measure
    return Job(compiling.PREFIX + name, 0, OURS, CONTEST_S, lambda _: run(compiling.training(name)))


def _compiled_stream(name: str) -> Job:
    run = compiling.measure_stream
    return Job(stream.COMPILED + name, 0, OURS, OTHER_S, lambda _: run(cases.training(name)))


def run(chosen: Sequence[str] = (), budget_s: float = BUDGET_S) -> Iterator[tuple[Job, Sample]]:
    """Run jobs, and yield and print their samples as they come.

    Args:
        chosen: ``CASE``, ``CASE@DEVICES``, or either with ``:ENGINE`` for one engine, in the order
            in which they run; all if empty. Several engines of a case take part together.
        budget_s: the time in seconds after which no job starts and every job ends.

    Raises:
        ValueError: a name is neither a case nor a job.
    """
    began = perf_counter()
    for job in _chosen(chosen):
        for found in _samples(job, budget_s - (perf_counter() - began)):
            sample = replace(found, beside=job.devices)
            print(f"[{perf_counter() - began:5.0f} s] {sample}", flush=True)
            yield job, sample
        print(f"[{perf_counter() - began:5.0f} s] {job.name} has ended", flush=True)


def _chosen(names: Sequence[str]) -> list[Job]:
    jobs = every()
    if not names:
        return jobs
    found: dict[str, Job] = {}
    for name in names:
        contest, _, engine = name.partition(":")
        mine = [
            job
            for job in jobs
            if contest in (job.case, job.contest) and engine in ("", *job.engines)
        ]
        if not mine:
            there = ", ".join(dict.fromkeys(job.case for job in jobs))
            raise ValueError(
                f"{name!r} is not a case; there are {there}, CASE@DEVICES, "
                "and CASE:ENGINE for one engine"
            )
        for job in mine:
            asked = (
                (*found[job.contest].engines, engine)
                if engine and job.contest in found
                else (engine,)
            )
            wanted = (
                job.engines if not engine else tuple(one for one in job.engines if one in asked)
            )
            found[job.contest] = replace(job, engines=wanted)
    return list(found.values())


def _samples(job: Job, left_s: float) -> Iterator[Sample]:
    if left_s <= 0:
        yield Sample(
            job.case, job.engine, 0, 0, failed=f"{NOT_RUN}the time of the benchmark was up"
        )
    elif cases.is_small():
        yield from guarded(job)
    else:
        yield from apart(job, min(job.limit_s, left_s))


def guarded(job: Job) -> Iterator[Sample]:
    """Yield the samples of a job that runs here; the last one reports a failure."""
    try:
        yield from job.measure()
    except Exception as error:
        yield Sample(job.case, job.engine, 0, 0, failed=reason(error))


def apart(job: Job, limit_s: float, package: str = "benchmarks.executor") -> Iterator[Sample]:
    """Yield the samples of a job as they come from ``python -m package JOB PATH``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        command = [sys.executable, "-m", package, job.name, str(path)]
        environment = {**os.environ, LIMIT: str(limit_s)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        began, handed_on = perf_counter(), 0
        try:
            while True:
                status = process.poll()
                late = perf_counter() - began > limit_s
                samples = list(read(path))
                yield from samples[handed_on:]
                handed_on = len(samples)
                if status is None and not late:
                    _pause(process)
                    continue
                if late and status is None:
                    yield Sample(
                        job.case, job.engine, 0, 0, failed=f"no end within {limit_s:.0f} s"
                    )
                elif status:
                    yield Sample(
                        job.case, job.engine, 0, 0, failed=f"its process ended with {status}"
                    )
                return
        finally:
            _end(process)


def _pause(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def work(name: str, path: Path) -> None:
    """Run one job in this process, and write its samples to a file or print them for ``-``."""
    contest.until(record.seconds(LIMIT, math.inf) - RESERVE_S)
    (job,) = _chosen(
        [f"{name.partition(':')[0]}:{engine}" for engine in name.partition(":")[2].split("+")]
    )
    for sample in guarded(job):
        if str(path) == "-":
            print(sample, flush=True)
        else:
            append(sample, path)
