"""The samples of every job, kept next to the results.

Rows are made from all samples, so jobs can run one by one. The first line of a file holds the
machine, every other line a sample:

    results/executor-4xH100.samples.jsonl
        {"machine": ..., "versions": ...}
        {"job": ..., "sample": ...}

Samples of another machine or of other versions are left out.
"""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from getpass import getuser
from pathlib import Path
from typing import Any

from .. import record
from .sample import Sample

ENDING = ".samples.jsonl"


def file_name() -> str:
    """Return the name of this machine's file."""
    return record.file_name("executor") + ENDING


def read(path: Path) -> tuple[Any, dict[str, list[Sample]]]:
    """Return a file's machine and versions, and the samples of each job, whatever the machine."""
    conditions, *entries = map(json.loads, path.read_text().splitlines())
    jobs: dict[str, list[Sample]] = {}
    for entry in entries:
        jobs.setdefault(entry["job"], []).append(Sample(**entry["sample"]))
    return conditions, jobs


class Store:
    """The samples of this machine and these versions; several processes may add samples.

    Args:
        folder: the folder of the results; None keeps nothing.

    Attributes:
        jobs: job -> its samples.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / file_name()
        self._conditions = {"machine": record.machine(), "versions": record.versions()}
        self._mine: dict[str, list[Sample]] = {}
        self.jobs = self._known()
        if not self.jobs and self._path is not None and self._path.exists():
            print("the existing samples come from another machine or other versions: none is kept")

    def add(self, job: str, sample: Sample) -> None:
        """Keep a sample.

        The first sample of a job replaces all its earlier samples, unless the job was not run at
        all.
        """
        if sample.was_not_run and self.jobs.get(job):
            return
        self._mine.setdefault(job, []).append(sample)
        with self._alone():
            self.jobs = self._known() | self._mine
            self._write()

    def samples(self) -> list[Sample]:
        """Return the samples of all jobs."""
        return [sample for samples in self.jobs.values() for sample in samples]

    def _known(self) -> dict[str, list[Sample]]:
        """Return the file's samples if they are of this machine and these versions."""
        if self._path is None or not self._path.exists():
            return {}
        conditions, jobs = read(self._path)
        return jobs if conditions == self._conditions else {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file against other processes."""
        if self._path is None:
            yield
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with Path(tempfile.gettempdir(), f"placer{ENDING}.{getuser()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self) -> None:
        if self._path is None:
            return
        entries: list[Any] = [self._conditions]
        entries += [
            {"job": job, "sample": asdict(sample)}
            for job, found in self.jobs.items()
            for sample in found
        ]
        part = self._path.with_suffix(".part")
        part.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        part.replace(self._path)
