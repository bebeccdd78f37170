"""What is run, in the order of importance; on GPUs each job has a process of its own, which may die or hang alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from . import (
    cases,
    compiling,
    distributed,
    gpipe,
    large,
    ours,
    overhead,
    stream,
    switching,
    tutorial,
    tutorial_resnet50,
)
from .sample import NOT_RUN, Sample, append, read, reason

ROOT = Path(__file__).parents[2]
BUDGET_S = 460.0
PEER_S = 60.0
_PACKAGES = {gpipe.ENGINE: "torchgpipe", stream.DISPATCH: "accelerate"}


@dataclass(frozen=True)
class Job:
    """A case as one engine runs it.

    Attributes:
        case: what is run.
        engine: by whom.
        limit_s: after this its process is killed; what it had found by then counts.
        measure: runs it.
    """

    case: str
    engine: str
    limit_s: float
    measure: Callable[[], Iterator[Sample]]

    @property
    def name(self) -> str:
        """The one by which a process is told what to do."""
        return f"{self.case}:{self.engine}"


def every() -> list[Job]:
    """All jobs, the most important first."""
    names = list(cases.FULL)
    return [
        *(_training(name, "ours", 150.0) for name in names),
        *(_stream(name, "ours", 3 * PEER_S) for name in stream.NAMES),
        Job(switching.CASE, "ours", PEER_S, switching.measure),
        Job(overhead.CASE, "ours", PEER_S, overhead.measure),
        Job(large.CASE, "ours", 4 * PEER_S, large.measure),
        *(_training(name, distributed.ENGINE, 2 * PEER_S) for name in names),
        Job(tutorial_resnet50.CASE, "ours", 4 * PEER_S, tutorial_resnet50.measure),
        *(_compiled(name) for name in compiling.NAMES),
        *(_compiled_stream(name) for name in stream.NAMES),
        *(_training(name, tutorial.ENGINE, PEER_S) for name in names),
        *(_stream(name, engine, PEER_S) for engine in (tutorial.ENGINE, stream.DISPATCH) for name in stream.NAMES),
        *(_training(name, gpipe.ENGINE, 2 * PEER_S) for name in names),
        *(_training(name, distributed.PLACED, 2 * PEER_S) for name in names),
    ]


def _training(name: str, engine: str, limit_s: float) -> Job:
    run = {
        "ours": ours.train,
        distributed.ENGINE: distributed.train,
        distributed.PLACED: distributed.placed,
        tutorial.ENGINE: tutorial.train,
        gpipe.ENGINE: gpipe.train,
    }[engine]
    return Job(name, engine, limit_s, lambda: run(cases.training(name)))


def _compiled(name: str) -> Job:
    return Job(compiling.PREFIX + name, "ours", 7 * PEER_S, lambda: compiling.measure(compiling.training(name)))


def _compiled_stream(name: str) -> Job:
    run = compiling.measure_stream
    return Job(stream.COMPILED + name, "ours", 3 * PEER_S, lambda: run(cases.training(name)))


def _stream(name: str, engine: str, limit_s: float) -> Job:
    run = {
        "ours": stream.stream,
        tutorial.ENGINE: stream.tutorial_split,
        stream.DISPATCH: stream.dispatched,
    }[engine]
    return Job(stream.PREFIX + name, engine, limit_s, lambda: run(cases.training(name)))


def run(chosen: Sequence[str] = (), budget_s: float = BUDGET_S) -> Iterator[tuple[Job, Sample]]:
    """Run jobs; what they find comes, and is printed, as they go.

    Args:
        chosen: cases, or ``CASE:ENGINE`` for one of their jobs, in the order in which they are run; all if empty.
        budget_s: no job begins after so many seconds, and none lasts longer.

    Raises:
        ValueError: a name is no case and no job.
    """
    began = perf_counter()
    for job in _chosen(chosen):
        for sample in _samples(job, budget_s - (perf_counter() - began)):
            print(f"[{perf_counter() - began:5.0f} s] {sample}", flush=True)
            yield job, sample
        print(f"[{perf_counter() - began:5.0f} s] {job.name} has ended", flush=True)


def _chosen(names: Sequence[str]) -> list[Job]:
    jobs = every()
    known = {job.case for job in jobs} | {job.name for job in jobs}
    if wrong := [name for name in names if name not in known]:
        cases_there = ", ".join(dict.fromkeys(job.case for job in jobs))
        raise ValueError(f"{wrong[0]!r} is no case; there are {cases_there}, and CASE:ENGINE for one job of them")
    if not names:
        return jobs
    found = [job for name in names for job in jobs if name in (job.case, job.name)]
    return list({job.name: job for job in found}.values())


def _samples(job: Job, left_s: float) -> Iterator[Sample]:
    if left_s <= 0:
        yield Sample(job.case, job.engine, 0, 0, failed=f"{NOT_RUN}the time of the benchmark was up")
    elif job.engine in _PACKAGES and find_spec(_PACKAGES[job.engine]) is None:
        yield Sample(job.case, job.engine, 0, 0, failed=f"{NOT_RUN}it is not installed")
    elif cases.is_small():
        yield from guarded(job)
    else:
        yield from apart(job, min(job.limit_s, left_s))


def guarded(job: Job) -> Iterator[Sample]:
    """The samples of a job, here; its last one says so if it breaks down."""
    try:
        yield from job.measure()
    except Exception as error:
        yield Sample(job.case, job.engine, 0, 0, failed=reason(error))


def apart(job: Job, limit_s: float, package: str = "benchmarks.executor") -> Iterator[Sample]:
    """The samples of a job in a process of its own, ``python -m package JOB PATH``, handed on as they come."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        command = [sys.executable, "-m", package, job.name, str(path)]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
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
                    yield Sample(job.case, job.engine, 0, 0, failed=f"no end within {limit_s:.0f} s")
                elif status:
                    yield Sample(job.case, job.engine, 0, 0, failed=f"its process ended with {status}")
                return
        finally:
            _end(process)


def _pause(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def work(name: str, path: Path) -> None:
    """Run one job and write its samples to a file, or print them for ``-``: what a process of its own does."""
    job = next(job for job in every() if job.name == name)
    for sample in guarded(job):
        if str(path) == "-":
            print(sample, flush=True)
        else:
            append(sample, path)
