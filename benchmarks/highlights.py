"""A few results for README: the rows that say the most, beside the best of what else one could take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import record

SPEEDUP = "training step, speed-up over eager PyTorch on one device"
STREAMED = "a batch in a stream, speed-up over eager PyTorch on one device"

OVER_PEERS = "training step, over the best peer"
ROWS = (
    ("executor", "ResNet-101, 224 px, batch 256, TF32, 4 devices", SPEEDUP),
    ("executor", "GPT, 24 layers, d=2048, 32 x 1024 tokens, bf16, 4 devices", SPEEDUP),
    ("executor", "U-Net, width 64, 192 px, batch 256, TF32, 4 devices", SPEEDUP),
    ("executor", "inference stream, ResNet-101, 224 px, batch 256, TF32, 4 devices", STREAMED),
    ("executor", "inference stream, GPT, 24 layers, d=2048, 32 x 1024 tokens, bf16, 4 devices", STREAMED),
    ("executor", "compile=True, ResNet-101, 224 px, batch 256, TF32, 2 devices", SPEEDUP),
    ("profiler", "all cases", "stage time, largest error of the prediction: the worst of 18 cases"),
    ("profiler", "all cases", "step time, error of the prediction: the worst of 18 cases"),
    (
        "profiler",
        "all cases",
        "steps, memory that a device reserves, most predicted below it: the worst of 9 cases",
    ),
    ("solver", "neurips20 operator_bert12_training, free", "bottleneck"),
    ("solver", "model llama, 8 unlike devices, training", "bottleneck"),
    ("service", "200-layer request, stored", "answered per second of processor time"),
)
"""The benchmark, the case and the measure of each; of several machines, the latest that measured it is shown."""
IF_MEASURED = (
    ("executor", "large, GPT of 9.96 billion parameters, Adam, 16 x 1024 tokens, TF32, 4 devices", OVER_PEERS),
    (
        "generation",
        "Llama of 6.7 billion parameters, bf16, 1 x 512 tokens and 64 more, 2 devices",
        "a token of each text, in the loop",
    ),
)
"""Rows that are shown as soon as some machine has measured them."""
LARGER_IS_BETTER = ("x", "1/s")
"""Units."""
BEGIN, END = "<!-- highlights -->", "<!-- end highlights -->"


def renewed(text: str, folder: Path = record.RESULTS) -> str:
    """A text in which what is between the two markers is made anew."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must have {BEGIN} and then {END}, once each")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(folder)}\n{END}{after}"


def tables(folder: Path = record.RESULTS) -> str:
    """The rows, and how many of all targets are met, as a markdown table each."""
    head = ["case", "measure", "here", "asked", "bound", "the best of others", "machine", "measured"]
    targets = [["results", "machine", "targets met", "measured"], *_targets(folder)]
    return "\n\n".join(map(_markdown, ([head, *_rows(folder)], targets)))


def _rows(folder: Path) -> Iterator[list[str]]:
    for name, case, measure in (*ROWS, *IF_MEASURED):
        found = _latest(folder, name, case, measure)
        if found is None:
            if (name, case, measure) in IF_MEASURED:
                continue
            raise ValueError(f"no {name}*.json has a row {case!r}, {measure!r}; mend ROWS in benchmarks/highlights.py")
        date, where, row = found
        unit, bound = row["unit"], row.get(record.FIGURES, {}).get("bound")
        asked = "" if row["target"] is None else record.shown(row["target"], unit)
        proven = "" if bound is None else record.shown(bound, unit)
        case = f"{name}, {case}" if case == "all cases" else case
        yield [case, measure, record.shown(row["value"], unit), asked, proven, _best_peer(row), where, date]


def _latest(folder: Path, name: str, case: str, measure: str) -> tuple[str, str, Mapping[str, Any]] | None:
    """The date, the machine and the row of the latest run of a benchmark that has it."""
    found = []
    for path in sorted(folder.glob(f"{name}*.json")):
        content = record.read(path.stem, folder)
        for row in content["rows"]:
            if (row["case"], row["measure"]) == (case, measure):
                date = row.get(record.FIGURES, {}).get(record.MEASURED, content["date"])
                found.append((date, _machine(content), row))
    return max(found, key=lambda entry: entry[0], default=None)


def _machine(content: Mapping[str, Any]) -> str:
    gpus = content["machine"]["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{content['machine']['cores']} cores"


def _best_peer(row: Mapping[str, Any]) -> str:
    peers = {name: value for name, value in row["peers"].items() if value is not None}
    if not peers:
        return ""
    best = (max if row["unit"] in LARGER_IS_BETTER else min)(peers, key=peers.__getitem__)
    return f"{record.shown(peers[best], row['unit'])} ({best})"


def _targets(folder: Path) -> Iterator[list[str]]:
    for path in sorted(folder.glob("*.json")):
        content = record.read(path.stem, folder)
        asked = [row["met"] for row in content["rows"] if row["met"] is not None]
        if asked:
            dates = {row.get(record.FIGURES, {}).get(record.MEASURED, content["date"]) for row in content["rows"]}
            measured = " to ".join(sorted({min(dates), max(dates)}))
            yield [path.stem, _machine(content), f"{sum(asked)} of {len(asked)}", measured]


def _markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
