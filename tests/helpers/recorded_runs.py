"""What ``tests/gpu.py`` and ``tests/integrations.py`` share: they run test folders one after
another and count what became of the tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COUNTS = ("passed", "failed", "skipped")


@dataclass
class Outcome:
    """What became of the tests of one folder.

    Attributes:
        passed: number of tests.
        failed: number of tests; a process that ended early counts as one.
        skipped: number of tests.
        failures: the failed tests by name, each with the last line of what it raised.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def parser(program: str, description: str, workers: int) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have.

    Args:
        program: the command, for its help.
        description: of the program.
        workers: processes at the same time, if the caller names no number.
    """
    made = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help="test folders, with those in them; all if omitted",
    )
    made.add_argument(
        "--check", action="store_true", help="run nothing; exit with 1 where the record is outdated"
    )
    made.add_argument(
        "--workers",
        type=int,
        default=workers,
        help="processes at the same time (%(default)s here)",
    )
    return made


def chosen(
    root: Path, folders: Sequence[str], known: Mapping[str, list[Path]]
) -> dict[str, list[Path]]:
    """Return the test files to run, by folder.

    Args:
        root: of the project.
        folders: that the caller names; all if there are none.
        known: all test files that may run, by folder.

    Raises:
        LookupError: a folder has no such tests; it is the only argument of the error.
    """
    wanted = [Path(os.path.relpath(Path(folder).resolve(), root)) for folder in folders]
    for name, path in zip(folders, wanted, strict=True):
        if not any(Path(folder).is_relative_to(path) for folder in known):
            raise LookupError(name)
    return {
        folder: tests
        for folder, tests in known.items()
        if not wanted or any(Path(folder).is_relative_to(path) for path in wanted)
    }


def run_pytest(
    root: Path,
    tests: Sequence[Path],
    marked: str,
    workers: int,
    outcome: Outcome,
    environment: Mapping[str, str],
) -> None:
    """Run the tests with these markers in a process of its own, and add up what became of them.

    Args:
        root: of the project.
        tests: files.
        marked: an expression of markers, as pytest's ``-m`` takes it.
        workers: processes at the same time.
        outcome: to add to.
        environment: variables that hold unless the caller's environment has others.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "--import-mode=importlib",
            "-q",
            "-m",
            marked,
        ]
        command += ["-p", "no:cacheprovider", "-p", "no:schemathesis", f"--junitxml={report}"]
        if workers > 1:
            command += ["-n", str(workers), "--dist", "loadgroup"]
        status = subprocess.run(
            [*command, *map(str, tests)], cwd=root, env={**environment, **os.environ}, check=False
        ).returncode
        if report.exists():
            _count(report, outcome)
    # 1: tests failed, which are counted. 5: no test has these markers.
    if status not in (0, 1, 5):
        outcome.failed += 1
        outcome.failures[" ".join(path.name for path in tests)] = f"pytest ended with {status}"


def print_summary(
    rows: Iterable[tuple[str, Mapping[str, Any]]], failures: Mapping[str, str], where: str
) -> None:
    """Print the failures, and a table of what became of the tests of each folder.

    Args:
        rows: folders with their entries.
        failures: as in ``Outcome``.
        where: the devices and versions, for the line above the table.
    """
    print()
    for name, why in failures.items():
        print(f"FAILED {name}: {why}")
    print(where)
    print(f"{'folder':40} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for folder, entry in rows:
        counts = " ".join(f"{entry[name]:7}" for name in COUNTS)
        print(f"{folder:40} {counts} {entry['seconds']:8}")


def _count(report: Path, outcome: Outcome) -> None:
    """Add up a report in JUnit's form."""
    for case in ElementTree.parse(report).iter("testcase"):
        broken = [entry for entry in case if entry.tag in ("failure", "error")]
        if broken:
            outcome.failed += 1
            lines = (broken[0].get("message") or "").strip().splitlines() or [""]
            outcome.failures[f"{case.get('classname')}::{case.get('name')}"] = lines[0][:200]
        elif any(entry.tag == "skipped" for entry in case):
            outcome.skipped += 1
        else:
            outcome.passed += 1
