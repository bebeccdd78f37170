"""The one form of results, and the tables that are made of them.

Results are in ``benchmarks/results/NAME.json``. On GPUs the file is named after the machine, as in
``NAME-4xH100.json``, so that results of different machines do not replace one another.

    {"machine": {...}, "versions": {...}, "command": "...", "date": "...", "rows": [{"case",
     "measure", "unit", "value", "spread", "target", "met", "peers": {name: value}}]}

``value`` is None if there is no value (a run that timed out). ``spread`` is [smallest, largest] or
None. ``target`` is the requested value, also where it is missed, or None. ``met`` says whether it
is met, or None without a target. A row may also have ``figures``: further numbers or words by name.
If a run renewed only a part of the rows, all rows have the figure ``measured``, their date.
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
"""The separator between commands of runs that each made a part of the rows."""

Row = Mapping[str, Any]


def seconds(variable: str, default: float) -> float:
    """Return a number of seconds from an environment variable.

    Raises:
        InputError: the variable is not a number of seconds.
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
    """Return one result.

    Args:
        case: the case that ran.
        measure: the measured quantity.
        unit: the unit of the value, its spread, target and peers.
        value: the result, the median of several; None if there is none.
        spread: the smallest and the largest.
        target: the requested value.
        smaller_is_better: whether smaller values meet the target.
        met: whether the target is met, where comparing values cannot decide it.
        peers: the same measure of the alternatives, by name.
        figures: further values, by name with unit.
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
        name: the name of the benchmark.
        rows: its results, with the fields that ``row`` gives.
        folder: the folder to write to.

    Raises:
        ValueError: a row lacks a field or has an unknown field.
    """
    rows = [dict(entry) for entry in rows]
    for entry in rows:
        if set(entry) - {FIGURES} != set(FIELDS):
            raise ValueError(
                f"row {entry.get('case')!r} has the fields {sorted(entry)}; "
                f"expected are {sorted(FIELDS)}"
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
    part.replace(path)  # atomically, as another run may read it
    return path


def _dated(rows: Sequence[Row], today: str) -> list[Row]:
    """Return the rows, with their dates if these differ.

    Rows of earlier runs come with theirs, see ``known``.
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
    """Return the name of a benchmark's results here, without ending, with the GPUs if any."""
    gpus = machine()["gpus"]
    if not gpus:
        return name
    words = [word for word in re.split(r"[^A-Za-z0-9]+", gpus[0]) if re.search(r"\d", word)]
    kind = next((word for word in words if not re.fullmatch(r"\d+GB|HBM\d\w*|SXM\d*", word)), "GPU")
    return f"{name}-{len(gpus)}x{kind}"


def _commands(name: str, rows: Sequence[Row], folder: Path) -> list[str]:
    """Return the shell commands of the kept rows' runs, then this run's command."""
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
    """Return the stored rows with their dates, if machine and versions are the same."""
    old = _here(name, folder)
    if old is None and (folder / f"{file_name(name)}.json").exists():
        print(
            "the existing results come from another machine or other versions: "
            "none of their rows is kept"
        )
    if old is None:
        return []
    return [
        {**row, FIGURES: {MEASURED: old["date"], **row.get(FIGURES, {})}} for row in old["rows"]
    ]


def _here(name: str, folder: Path) -> dict[str, Any] | None:
    """Return the stored results, if machine and versions are the same."""
    try:
        old = read(file_name(name), folder)
    except OSError:
        return None
    return old if (old["machine"], old["versions"]) == (machine(), versions()) else None


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the results in a file, given its name without ending."""
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def machine() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, and the GPUs, if any."""
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
    """Return the versions of Python and of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(name: str, folder: Path = RESULTS, *, whole: bool = False) -> str:
    """Return the results in a file as a Markdown table, with the machine below.

    Args:
        name: the name of the file, without ending.
        folder: the folder of its results.
        whole: whether to show rows without a target.
    """
    content = read(name, folder)
    rows = [entry for entry in content["rows"] if whole or entry["met"] is not None]
    others = len(content["rows"]) - len(rows)
    peers = list(dict.fromkeys(peer for entry in rows for peer in entry["peers"]))
    figures = list(dict.fromkeys(name for entry in rows for name in entry.get(FIGURES, {})))
    head = ["case", "measure", "value", *figures, "target", "met", *peers]
    lines = [head, ["---"] * len(head), *(_cells(entry, figures, peers) for entry in rows)]
    where, commands = content["machine"], content["command"].split(AND_THEN)
    # the file's name may differ from the benchmark's
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
    """Return a value for people: four digits, with its unit."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def with_tables(text: str, folder: Path = RESULTS) -> str:
    """Return a text with every table between two markers made again.

    The markers are ``<!-- table NAME -->`` and ``<!-- end table NAME -->``. Without results the old
    table stays.
    """

    def renewed(found: re.Match[str]) -> str:
        name = found.group(1)
        if not (folder / f"{name}.json").exists():
            return found.group(0)
        return f"<!-- table {name} -->\n{table(name, folder)}\n<!-- end table {name} -->"

    return re.sub(
        r"<!-- table ([\w-]+) -->\n.*?<!-- end table \1 -->", renewed, text, flags=re.DOTALL
    )
