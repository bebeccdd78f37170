"""The samples of every job, kept beside the results: rows are made of all of them, so jobs can be run one by one.

    results/executor.samples.jsonl     {"machine": ..., "versions": ...}, then {"job": ..., "sample": {...}} a line

Samples of another machine, or of other versions, are not mixed with these: they are left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import record
from .sample import Sample

FILE = "executor.samples.jsonl"


def read(path: Path) -> tuple[Any, dict[str, list[Sample]]]:
    """Machine and versions of a file, and the samples of each job, whatever the machine."""
    conditions, *entries = map(json.loads, path.read_text().splitlines())
    jobs: dict[str, list[Sample]] = {}
    for entry in entries:
        jobs.setdefault(entry["job"], []).append(Sample(**entry["sample"]))
    return conditions, jobs


class Store:
    """What the jobs of this machine and these versions gave.

    Args:
        folder: of the results; None keeps nothing.

    Attributes:
        jobs: job -> its samples.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._conditions = {"machine": record.machine(), "versions": record.versions()}
        self._renewed: set[str] = set()
        self.jobs: dict[str, list[Sample]] = {}
        if self._path is not None and self._path.exists():
            conditions, jobs = read(self._path)
            if conditions == self._conditions:
                self.jobs = jobs
            else:
                print("the samples that are there come from another machine or other versions: none is kept")

    def add(self, job: str, sample: Sample) -> None:
        """Keep a sample; the first one of a job takes the place of all that it had, unless it was not run at all."""
        if sample.was_not_run and self.jobs.get(job):
            return
        if job not in self._renewed:
            self._renewed.add(job)
            self.jobs[job] = []
        self.jobs[job].append(sample)
        self._write()

    def samples(self) -> list[Sample]:
        """Of all jobs."""
        return [sample for samples in self.jobs.values() for sample in samples]

    def _write(self) -> None:
        if self._path is None:
            return
        entries: list[Any] = [self._conditions]
        entries += [{"job": job, "sample": asdict(sample)} for job, found in self.jobs.items() for sample in found]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        part.replace(self._path)
