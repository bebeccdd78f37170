"""The one form of results, and the tables that are made of them.

Results are in ``benchmarks/results/NAME.json``; on GPUs the file is named after the machine,
``NAME-4xH100.json``, so that no machine's results take the place of another's.

    {"machine": {...}, "versions": {...}, "command": "...", "date": "...", "rows": [{"case",
     "measure", "unit", "value", "spread", "target", "met", "peers": {name: value}}]}

``value`` is None where there is none (a run that timed out); ``spread`` is [smallest, largest] or
None; ``target`` is what was asked for, also where it is missed, or None; ``met`` says which, or
None without a target. A row may have ``figures`` too: what else belongs to it, by name, as numbers
or words. Where a run renewed a part of the rows, all of them have the figure ``measured``, their
date.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

from placer.errors import InputError

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch-placer", "ortools", "torch", "numpy", "pydantic", "fastapi", "uvicorn")
FIELDS = ("case", "measure", "unit", "value", "spread", "target", "met", "peers")
FIGURES = "figures"
MEASURED = "measured"
"""The figure with a row's date, where a file has rows of several."""
AND_THEN = "; "
"""Between the commands of runs that each made a part of the rows."""

Row = Mapping[str, Any]


def seconds(variable: str, default: float) -> float:
    """A number of seconds from a variable of the environment.

    Raises:
        InputError: it has another value.
    """
    given = os.environ.get(variable, "")
    try:
        return float(given) if given else default
    except ValueError:
        raise InputError(f"{variable} is {given!r}; give a number of seconds") from None


def row(
    case: str,
    measure: str,
    unit: str,
    value: float | None,
    *,
    spread: tuple[float, float] | None = None,
    target: float | None = None,
    smaller_is_better: bool = True,
    met: bool | None = None,
    peers: Mapping[str, float | None] | None = None,
    figures: Mapping[str, float | str | None] | None = None,
) -> dict[str, Any]:
    """One result.

    Args:
        case: what was run.
        measure: what was measured of it.
        unit: of the value, its spread, target and peers.
        value: the result, the median of several; None if there is none.
        spread: the smallest and the largest.
        target: what was asked for.
        smaller_is_better: whether the target is met from below.
        met: whether it is met, where that is not a matter of smaller or larger.
        peers: the same measure of what one would use instead, by name.
        figures: what else belongs to it, by name with its unit.
    """
    if target is not None and met is None:
        met = value is not None and (value <= target if smaller_is_better else value >= target)
    found: dict[str, Any] = {
        "case": case,
        "measure": measure,
        "unit": unit,
        "value": value,
        "spread": list(spread) if spread else None,
        "target": target,
        "met": met,
        "peers": dict(peers or {}),
    }
    return found if figures is None else found | {FIGURES: dict(figures)}


def write(name: str, rows: Iterable[Row], folder: Path = RESULTS) -> Path:
    """Write the results of one benchmark.

    Args:
        name: of the benchmark.
        rows: its results, with the fields that ``row`` gives.
        folder: where to.

    Raises:
        ValueError: a row lacks a field, or has another.
    """
    rows = [dict(entry) for entry in rows]
    for entry in rows:
        if set(entry) - {FIGURES} != set(FIELDS):
            raise ValueError(
                f"row {entry.get('case')!r} has the fields {sorted(entry)}; wanted are {sorted(FIELDS)}"
            )
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    content = {
        "machine": machine(),
        "versions": versions(),
        "command": AND_THEN.join(_commands(name, rows, folder)),
        "date": today,
        "rows": _dated(rows, today),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name(name)}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)  # in one step: another run may be reading it
    return path


def _dated(rows: Sequence[Row], today: str) -> list[Row]:
    """The rows, each with its date where these differ; rows of earlier runs come with theirs, see
    ``known``.
    """
    dates = [entry.get(FIGURES, {}).get(MEASURED, today) for entry in rows]
    if set(dates) <= {today}:
        return [_undated(entry) for entry in rows]
    return [
        {**row, FIGURES: {**row.get(FIGURES, {}), MEASURED: date}}
        for row, date in zip(rows, dates, strict=True)
    ]


def _undated(entry: Row) -> Row:
    others = {name: value for name, value in entry.get(FIGURES, {}).items() if name != MEASURED}
    rest = {name: value for name, value in entry.items() if name != FIGURES}
    return {**rest, FIGURES: others} if others else rest


def file_name(name: str) -> str:
    """The name of a benchmark's results here, without its ending: with the machine's GPUs, if it
    has any.
    """
    gpus = machine()["gpus"]
    if not gpus:
        return name
    words = [word for word in re.split(r"[^A-Za-z0-9]+", gpus[0]) if re.search(r"\d", word)]
    kind = next((word for word in words if not re.fullmatch(r"\d+GB|HBM\d\w*|SXM\d*", word)), "GPU")
    return f"{name}-{len(gpus)}x{kind}"


def _commands(name: str, rows: Sequence[Row], folder: Path) -> list[str]:
    """This run's command, as a shell takes it; of a part that keeps rows of earlier runs, theirs
    before it.
    """
    given = {
        key: value for key, value in os.environ.items() if key.startswith(f"PLACER_{name.upper()}_")
    }
    part = [
        f"{key}={quote(value)}"
        for key, value in sorted(given.items())
        if not key.endswith("_BUDGET_S")
    ]
    command = " ".join([*part, f"python -m benchmarks {name}"])
    earlier = _here(name, folder) if part else None
    now = [_undated(entry) for entry in rows]
    if earlier is None or not any(_undated(entry) in now for entry in earlier["rows"]):
        return [command]
    return [one for one in earlier["command"].split(AND_THEN) if one != command] + [command]


def known(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows that the results have already, if they come from this machine and these versions,
    with their dates.
    """
    old = _here(name, folder)
    if old is None and (folder / f"{file_name(name)}.json").exists():
        print(
            "the results that are there come from another machine or other versions: none of their rows is kept"
        )
    if old is None:
        return []
    return [
        {**row, FIGURES: {MEASURED: old["date"], **row.get(FIGURES, {})}} for row in old["rows"]
    ]


def _here(name: str, folder: Path) -> dict[str, Any] | None:
    """The results that there are, if they come from this machine and these versions."""
    try:
        old = read(file_name(name), folder)
    except OSError:
        return None
    return old if (old["machine"], old["versions"]) == (machine(), versions()) else None


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The results in a file, which is named without its ending."""
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def machine() -> dict[str, Any]:
    """The processor, the cores that this process may use, and the GPUs, if any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu(), "cores": cores, "gpus": _gpus()}


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


@cache
def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split("\n")[:-1]


def versions() -> dict[str, str]:
    """Of python and the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(name: str, folder: Path = RESULTS, *, whole: bool = False) -> str:
    """The results in a file as a markdown table, with the machine below.

    Args:
        name: of the file, without its ending.
        folder: where its results are.
        whole: whether rows are shown for which nothing was asked.
    """
    content = read(name, folder)
    rows = [entry for entry in content["rows"] if whole or entry["met"] is not None]
    others = len(content["rows"]) - len(rows)
    peers = list(dict.fromkeys(peer for entry in rows for peer in entry["peers"]))
    figures = list(dict.fromkeys(name for entry in rows for name in entry.get(FIGURES, {})))
    head = ["case", "measure", "value", *figures, "target", "met", *peers]
    lines = [head, ["---"] * len(head), *(_cells(entry, figures, peers) for entry in rows)]
    where, commands = content["machine"], content["command"].split(AND_THEN)
    # not by the file's name, which may be another
    program = commands[0][commands[0].index("python -m ") :]
    ran = f"`{commands[0]}`" if len(commands) == 1 else f"`{program}`, in {len(commands)} parts"
    gpus = f", {len(where['gpus'])} x {where['gpus'][0]}" if where["gpus"] else ""
    made = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    return "\n".join(
        [
            *("| " + " | ".join(line) + " |" for line in lines),
            "",
            f"{where['cpu']}, {where['cores']} cores{gpus}; {made}; {content['date']}; {ran}."
            + (
                f" Without a target, in `benchmarks/results/{name}.json`: {others} more."
                if others
                else ""
            ),
        ]
    )


def _cells(entry: Row, figures: Iterable[str], peers: Iterable[str]) -> list[str]:
    unit = entry["unit"]
    met = {True: "yes", False: "no", None: ""}[entry["met"]]
    value = shown(entry["value"], unit)
    if entry["spread"]:
        value += f" ({shown(entry['spread'][0])}-{shown(entry['spread'][1])})"
    target = shown(entry["target"], unit) if entry["target"] is not None else ""
    others = [shown(entry["peers"][peer], unit) if peer in entry["peers"] else "" for peer in peers]
    given = entry.get(FIGURES, {})
    also = [shown(given[name]) if name in given else "" for name in figures]
    return [entry["case"], entry["measure"], value, *also, target, met, *others]


def shown(value: float | str | None, unit: str = "") -> str:
    """A value for people: four digits, with its unit."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def with_tables(text: str, folder: Path = RESULTS) -> str:
    """A text in which every table between its two markers is made anew; without results, what is
    there stays.

    The markers are ``<!-- table NAME -->`` and ``<!-- end table NAME -->``.
    """

    def renewed(found: re.Match[str]) -> str:
        name = found.group(1)
        if not (folder / f"{name}.json").exists():
            return found.group(0)
        return f"<!-- table {name} -->\n{table(name, folder)}\n<!-- end table {name} -->"

    return re.sub(
        r"<!-- table ([\w-]+) -->\n.*?<!-- end table \1 -->", renewed, text, flags=re.DOTALL
    )
