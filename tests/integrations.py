"""Runs the tests that ``make test`` leaves out and records the result; or tells whether the record
speaks for the present code.

    python tests/integrations.py [--workers N] [FOLDER ...]     run, and write the record
    python tests/integrations.py --check                        compare the record with the code

These tests have the marker ``integration`` (they start browsers, databases, services or programs of
the documentation) or ``exhaustive`` (further cases of tests that ``make test`` runs). The record is
``tests/integration-record.json``; see ``run_record`` for its hashes:

    {"tests/docker": {"hash": "...", "text": "...", "python": "3.12.3", "torch": "2.11.0",
                      "passed": 12, "failed": 0, "skipped": 0, "seconds": 8.1,
                      "date": "2026-11-26"}}

A run records each folder as soon as it has ended, so that a run which is killed loses one folder;
naming folders splits a run into several. The hashes cover Python code, as those of GPU tests do,
and no page of the documentation."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import recorded_runs  # noqa: E402
import run_record  # noqa: E402
from module_hashes import Sources  # noqa: E402

FILE = "tests/integration-record.json"
MARKERS = ("integration", "exhaustive", "covering")
"""Of the tests in question. ``covering`` marks some cases of a test ``exhaustive``."""

SELECTED = "(integration or exhaustive) and not gpu"
AGAIN = "Run these tests again: make test-integrations, for some FOLDERS='...'"


def main() -> int:
    """Run or check; the exit code."""
    parser = recorded_runs.parser(
        "python tests/integrations.py", __doc__ or "", os.cpu_count() or 1
    )
    asked = parser.parse_args()
    sources = Sources(ROOT, MARKERS)
    if asked.check:
        lines = outdated(run_record.read(ROOT / FILE), sources)
        if lines:
            print(*lines, AGAIN, sep="\n")
        return int(bool(lines))
    try:
        files = recorded_runs.chosen(ROOT, asked.folders, sources.marked_tests)
    except LookupError as error:
        known = ", ".join(sources.marked_tests)
        parser.error(f"{error.args[0]!r} has no such tests; folders that have some: {known}")
    return run(sources, files, asked.workers)


def run(sources: Sources, files: Mapping[str, list[Path]], workers: int) -> int:
    """Run the test files of each folder and record them; 1 if any test failed."""
    rows, failures = [], {}
    versions = {"python": platform.python_version(), "torch": version("torch")}
    for folder, tests in files.items():
        # the code as it is before the tests run
        entry: run_record.Entry = {**run_record.code(folder, sources), **versions}
        began = perf_counter()
        outcome = recorded_runs.Outcome()
        environment = {"OMP_NUM_THREADS": "1"}
        recorded_runs.run_pytest(sources.root, tests, SELECTED, workers, outcome, environment)
        entry |= {name: getattr(outcome, name) for name in recorded_runs.COUNTS}
        entry["seconds"] = round(perf_counter() - began, 1)
        entry["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
        record_folder(sources.root, folder, entry)
        failures |= outcome.failures
        rows.append((folder, entry))
    where = f"Python {versions['python']}, torch {versions['torch']}"
    recorded_runs.print_summary(rows, failures, where)
    return int(bool(failures))


def record_folder(root: Path, folder: str, entry: run_record.Entry) -> None:
    """Write a folder's entry into the record, in place of the earlier one."""
    run_record.change(root / FILE, lambda record: {**record, folder: entry})


def outdated(record: Mapping[str, run_record.Entry], sources: Sources) -> list[str]:
    """Return a line for every folder whose entry does not speak for the present code."""
    if not all(run_record.has_same_text(entry, sources) for entry in record.values()):
        sources.load()
    lines = []
    for folder in sorted({*sources.marked_tests, *record}):
        if folder not in sources.marked_tests:
            lines.append(f"{folder}: has a record, but no such tests; remove it from {FILE}")
        elif folder not in record:
            lines.append(f"{folder}: has no record")
        elif not run_record.is_of_present_code(folder, record[folder], sources):
            lines.append(f"{folder}: belongs to other code")
        elif failed := record[folder]["failed"]:
            lines.append(f"{folder}: has {failed} failure{'s' * (failed != 1)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
