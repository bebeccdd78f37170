"""What one run of a benchmark gave, as it passes between processes: one line of JSON."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

NOT_RUN = "not run, "
"""How the reason of a sample begins of which nothing was run."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        case: what was run.
        engine: by whom: ``ours``, ``eager`` or a peer.
        devices: how many it had.
        chunks: micro-batches, or what else was swept.
        values: measure -> what was measured, once a repetition; ``step_ms`` of a run that timed
            steps.
        failed: why there are no values; empty where there are.
        beside: the number of devices in whose contest it was measured, where a case has several;
            else 0.
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
        """Whether nothing was even tried."""
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
    """An error whose message is a reason already, from another process."""


def attempt(
    case: str, engine: str, devices: int, chunks: int, run: Callable[[], dict[str, list[float]]]
) -> Sample:
    """Run it, and keep the reason where that fails; the memory is free again afterwards."""
    try:
        sample = Sample(case, engine, devices, chunks, run())
    except torch.OutOfMemoryError:
        sample = Sample(case, engine, devices, chunks, failed="out of memory")
    except Exception as error:
        sample = Sample(case, engine, devices, chunks, failed=reason(error))
    release()
    return sample


def reason(error: BaseException) -> str:
    """An error in one short line."""
    if isinstance(error, Told):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError) or "OutOfMemoryError" in str(error):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:200]


def release() -> None:
    """Give back all device memory that nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def append(sample: Sample, path: Path) -> None:
    """Add a line to the file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(sample)) + "\n")


def read(path: Path) -> Iterator[Sample]:
    """The samples of a file; one that was cut off in the middle of a line is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Sample(**json.loads(line))
