"""The tables of selected results for README and for the page of measured results."""

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
    (
        "executor",
        "inference stream, GPT, 24 layers, d=2048, 32 x 1024 tokens, bf16, 4 devices",
        STREAMED,
    ),
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
"""The benchmark, the case and the measure of each row of the page; of several machines, the latest
result is shown."""
IF_MEASURED = (
    (
        "executor",
        "large, GPT of 9.96 billion parameters, Adam, 16 x 1024 tokens, TF32, 4 devices",
        OVER_PEERS,
    ),
    (
        "generation",
        "Llama of 6.7 billion parameters, bf16, 1 x 512 tokens and 64 more, 2 devices",
        "a token of each text, in the loop",
    ),
    (
        "generation",
        "Llama of 6.7 billion parameters, bf16, 7.81 GB of the weights on the host, 1 x 512 tokens"
        " and 32 more, one device",
        "a token of each text, weights copied from the host",
    ),
    (
        "generation",
        "Llama of 6.7 billion parameters, bf16, 7.81 GB of the weights on the disk, 1 x 512 tokens"
        " and 8 more, one device",
        "a token of each text, weights copied from the disk",
    ),
)
"""Rows that appear on the page once a machine has measured them."""
SHORT_ROWS = (
    ("Training, ResNet-101, 4 GPUs", ROWS[0]),
    ("Training, GPT, 4 GPUs", ROWS[1]),
    ("Stream, ResNet-101, 4 GPUs", ROWS[3]),
    ("Training, compiled, ResNet-101, 2 GPUs", ROWS[5]),
    ("A token of a Llama, 2 GPUs", IF_MEASURED[1]),
    ("A token, 7.8 GB of the weights on the host, 1 GPU", IF_MEASURED[2]),
    ("Bottleneck, BERT-12 operator graph", ROWS[9]),
)
"""The rows of README, each with a short name; README says that the training and stream rows are
speed-ups."""
OWN = "ours"
"""With this begin the names of peers that are Placer in another way."""
LARGER_IS_BETTER = ("x", "1/s")
"""Units for which larger values are better."""
BEGIN, END = "<!-- highlights -->", "<!-- end highlights -->"


def page(text: str, folder: Path = record.RESULTS) -> str:
    """Return the page of measured results with its tables made again."""
    return renewed(text, tables(folder))


def readme(text: str, folder: Path = record.RESULTS) -> str:
    """Return README with its table made again."""
    return renewed(text, short_table(folder))


def renewed(text: str, made: str) -> str:
    """Return a text with other tables between the two markers.

    Args:
        text: The text, with both markers once.
        made: The tables.

    Raises:
        ValueError: A marker is missing, or is there twice.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must have {BEGIN} and then {END}, once each")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def tables(folder: Path = record.RESULTS) -> str:
    """Return the rows of the page, and the number of targets met, as a Markdown table each."""
    head = [
        "case",
        "measure",
        "Placer",
        "target",
        "bound",
        "best alternative",
        "machine",
        "measured",
    ]
    targets = [["results", "machine", "targets met", "measured"], *_targets(folder)]
    return "\n\n".join(map(_markdown, ([head, *_rows(folder)], targets)))


def short_table(folder: Path = record.RESULTS) -> str:
    """Return the rows of README as a Markdown table.

    Raises:
        ValueError: No machine has measured a row.
    """
    rows = [["case", "Placer", "best alternative", "measured on"]]
    for label, (name, case, measure) in SHORT_ROWS:
        found = _latest(folder, name, case, measure)
        if found is None:
            raise _missing("SHORT_ROWS", name, case, measure)
        _, where, row = found
        rows.append([label, record.shown(row["value"], row["unit"]), _best_peer(row), where])
    return _markdown(rows)


def _missing(rows: str, name: str, case: str, measure: str) -> ValueError:
    return ValueError(
        f"no {name}*.json has a row {case!r}, {measure!r}; "
        f"correct {rows} in benchmarks/highlights.py"
    )


def _rows(folder: Path) -> Iterator[list[str]]:
    for name, case, measure in (*ROWS, *IF_MEASURED):
        found = _latest(folder, name, case, measure)
        if found is None:
            if (name, case, measure) in IF_MEASURED:
                continue
            raise _missing("ROWS", name, case, measure)
        date, where, row = found
        unit, bound = row["unit"], row.get(record.FIGURES, {}).get("bound")
        asked = "" if row["target"] is None else record.shown(row["target"], unit)
        proven = "" if bound is None else record.shown(bound, unit)
        case = f"{name}, {case}" if case == "all cases" else case
        yield [
            case,
            measure,
            record.shown(row["value"], unit),
            asked,
            proven,
            _best_peer(row),
            where,
            date,
        ]


def _latest(
    folder: Path, name: str, case: str, measure: str
) -> tuple[str, str, Mapping[str, Any]] | None:
    """Return the date, the machine and the row of the latest run that has it."""
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
    peers = {
        name: value
        for name, value in row["peers"].items()
        if value is not None and not name.startswith(OWN)
    }
    if not peers:
        return ""
    best = (max if row["unit"] in LARGER_IS_BETTER else min)(peers, key=peers.__getitem__)
    return f"{record.shown(peers[best], row['unit'])} ({best})"


def _targets(folder: Path) -> Iterator[list[str]]:
    for path in sorted(folder.glob("*.json")):
        content = record.read(path.stem, folder)
        asked = [row["met"] for row in content["rows"] if row["met"] is not None]
        if asked:
            dates = {
                row.get(record.FIGURES, {}).get(record.MEASURED, content["date"])
                for row in content["rows"]
            }
            measured = " to ".join(sorted({min(dates), max(dates)}))
            yield [path.stem, _machine(content), f"{sum(asked)} of {len(asked)}", measured]


def _markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
