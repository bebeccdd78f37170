"""The two pictures of the tutorial's experiment, with Placer's results in them.

``python -m benchmarks.executor.pictures`` draws them from the latest samples of the experiment,
whatever machine measured them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

from .. import record
from . import tutorial_resnet50
from .sample import Sample
from .store import ENDING, read

matplotlib.use("Agg")
from matplotlib import pyplot

NAME = "executor.tutorial.svg"
COLORS = {"tutorial": "#e69f00", "ours": "#0072b2", "eager": "#8c8c8c"}
LABELS = {"tutorial": "the tutorial's pipeline", "ours": "Placer"}


def main(folder: Path = record.RESULTS) -> int:
    """Draw the pictures, and return the exit code."""
    for path in sorted(folder.glob(f"executor*{ENDING}"), key=_date, reverse=True):
        samples = [sample for found in read(path)[1].values() for sample in found]
        found = [
            sample
            for sample in samples
            if sample.case == tutorial_resnet50.CASE and not sample.failed
        ]
        if any(sample.engine == "eager" for sample in found):
            print(draw(found, folder / NAME))
            return 0
    print(
        f"{folder} has no samples of the case {tutorial_resnet50.CASE!r} to draw", file=sys.stderr
    )
    return 2


def _date(path: Path) -> str:
    """Return the date of the results that belong to the samples."""
    results = path.with_name(path.name.removesuffix(ENDING) + ".json")
    return str(json.loads(results.read_text())["date"]) if results.exists() else ""


def draw(samples: Sequence[Sample], path: Path) -> Path:
    """Draw both pictures in one file.

    Args:
        samples: samples of the tutorial's case, all with values; one must be of one GPU.
        path: the path of the SVG file.
    """
    matplotlib.rcParams["svg.hashsalt"] = NAME  # the same picture is the same file
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    _bars(left, samples)
    _curves(right, samples)
    for axes in (left, right):
        axes.set_ylabel("ResNet-50, a training step (ms)")
        axes.set_ylim(bottom=0)
        axes.yaxis.grid(True, alpha=0.4)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _bars(axes: Any, samples: Sequence[Sample]) -> None:
    """Draw one device, the split model without a pipeline, and each pipeline at its best size."""
    (one,) = _of(samples, "eager")
    shown = [("one device", one)]
    whole = [sample for sample in _of(samples, "tutorial") if sample.chunks == one.chunks]
    shown += [("split", sample) for sample in whole]
    for engine, label in LABELS.items():
        swept = [sample for sample in _of(samples, engine) if sample.chunks < one.chunks]
        if swept:
            best = min(swept, key=lambda sample: mean(_times(sample)))
            shown.append((f"{label},\n{best.chunks} at a time", best))
    names, means, spreads = zip(
        *((name, mean(_times(s)), _spread(s)) for name, s in shown), strict=True
    )
    colors = [COLORS[sample.engine] for _, sample in shown]
    axes.bar(names, means, yerr=spreads, capsize=6, color=colors, alpha=0.8)
    axes.tick_params(axis="x", labelsize=8)


def _curves(axes: Any, samples: Sequence[Sample]) -> None:
    """Draw the time of a step by split size."""
    (one,) = _of(samples, "eager")
    axes.axhline(
        mean(_times(one)), color=COLORS["eager"], linestyle="--", label="one device, whole batch"
    )
    for engine, label in LABELS.items():
        swept = sorted(_of(samples, engine), key=lambda sample: sample.chunks)
        sizes, means = (
            [sample.chunks for sample in swept],
            [mean(_times(sample)) for sample in swept],
        )
        spreads = [_spread(sample) for sample in swept]
        axes.errorbar(
            sizes, means, yerr=spreads, marker="o", capsize=4, color=COLORS[engine], label=label
        )
    axes.set_xlabel("split size (images)")
    axes.legend(fontsize=8)


def _of(samples: Sequence[Sample], engine: str) -> list[Sample]:
    return [sample for sample in samples if sample.engine == engine]


def _times(sample: Sample) -> list[float]:
    return sample.values["step_ms"]


def _spread(sample: Sample) -> float:
    times = _times(sample)
    return stdev(times) if len(times) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
