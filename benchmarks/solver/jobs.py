"""Each case in a process of its own, so that its memory is its own and a crash loses one row."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import record
from . import cases, peers

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
"""After this a process is killed: no case is given more than a fifth of it."""

Row = dict[str, Any]


def run(chosen: Sequence[str]) -> list[Row]:
    """Run the selected cases, or all, one after another.

    Args:
        chosen: groups, or starts of case names.

    Raises:
        ValueError: an entry selects nothing.
    """
    for line in peers.skipped():
        print(line, file=sys.stderr)
    return [_run(case.name) for case in select(chosen)]


def select(chosen: Sequence[str]) -> list[cases.Case]:
    """Return the cases of these groups or with these starts of names; all without any."""
    known = list(cases.every().values())
    for part in chosen:
        if not any(_belongs(case, part) for case in known):
            raise ValueError(
                f"no case of the solver's benchmark is {part!r}; groups are {cases.groups()}"
            )
    return [case for case in known if not chosen or any(_belongs(case, part) for part in chosen)]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of existing cases, in the cases' order."""
    by_case = {row["case"]: row for row in rows}
    return [by_case[name] for name in cases.every() if name in by_case]


def _belongs(case: cases.Case, part: str) -> bool:
    return case.group == part or case.name.startswith(part)


def _run(name: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.solver", name]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    except subprocess.TimeoutExpired:
        return _none(name, f"killed after {LIMIT_S:g} s")
    except subprocess.CalledProcessError as error:
        return _none(
            name, (error.stderr.strip().splitlines() or [f"ended with {error.returncode}"])[-1]
        )
    row: Row = json.loads(answer.stdout.splitlines()[-1])
    print(f"{name}: {row['value']} {row['unit']}, {row.get('figures')}", file=sys.stderr)
    return row


def _none(name: str, why: str) -> Row:
    print(f"{name}: {why}", file=sys.stderr)
    return record.row(name, "none: " + why[:200], "", None, met=False)
