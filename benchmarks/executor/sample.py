"""The result of one run of a benchmark, which processes exchange as one line of JSON."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from placer.devices import release_cache

NOT_RUN = "not run, "
"""How the reason of a sample begins of which nothing was run."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        case: the case that ran.
        engine: ``ours``, ``eager`` or the name of a peer.
        devices: the number of devices.
        chunks: the number of micro-batches, or another swept number.
        values: measure -> one value per repetition; ``step_ms`` for a run that timed steps.
        failed: the reason for missing values; empty if there are values.
        beside: the number of devices of the contest that measured it, if a case has several
            contests; otherwise 0.
    """

    case: str
    engine: str
    devices: int = 1
    chunks: int = 1
    values: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""
    beside: int = 0

    @property
    def was_not_run(self) -> bool:
        """Return whether the run was not even tried."""
        return self.failed.startswith(NOT_RUN)

    def __str__(self) -> str:
        where = f"{self.case}, {self.engine}, {self.devices} devices, {self.chunks} chunks"
        medians = (
            f"{name} {sorted(times)[len(times) // 2]:.4g}"
            for name, times in self.values.items()
            if times
        )
        return f"{where}: {self.failed or ', '.join(medians)}"


class Told(RuntimeError):
    """An error from another process, whose message is already a short reason."""


def attempt(
    case: str, engine: str, devices: int, chunks: int, run: Callable[[], dict[str, list[float]]]
) -> Sample:
    """Run a case and return its sample, with the reason if it fails; free memory afterwards."""
    try:
        sample = Sample(case, engine, devices, chunks, run())
    except torch.OutOfMemoryError:
        sample = Sample(case, engine, devices, chunks, failed="out of memory")
    except Exception as error:
        sample = Sample(case, engine, devices, chunks, failed=reason(error))
    release()
    return sample


def reason(error: BaseException) -> str:
    """Return an error as one short line."""
    if isinstance(error, Told):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError) or "OutOfMemoryError" in str(error):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    # behind the first line of an error of CUDA there is only general advice
    line = lines[0] if lines[0].startswith("CUDA error") else lines[-1]
    return f"{type(error).__name__}: {line}"[:200]


def release() -> None:
    """Free all cached device memory."""
    gc.collect()
    release_cache()


def append(sample: Sample, path: Path) -> None:
    """Add a line to the file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(sample)) + "\n")


def read(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file, without a last line that was cut off."""
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Sample(**json.loads(line))
