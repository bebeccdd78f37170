"""The record of GPU test runs: ``tests/gpu-record.json``, by test folder.

    {"tests/placer/devices": [{"run": "full", "gpu_count": 2, "gpus": ["NVIDIA H100 80GB HBM3",
    ...],
                               "hash": "...", "text": "...", "python": "3.12.3", "torch": "2.11.0",
                               "cuda": "13.0", "passed": 12, "failed": 0, "skipped": 0, "seconds":
                               8.1, "date": "2026-11-26"}]}

A folder has one entry for each kind of run (``full`` or ``quick``) and each number of GPUs. See
``run_record`` for ``hash`` and ``text``. This module needs no package besides Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import run_record
from module_hashes import Sources
from run_record import Entry

FILE = "tests/gpu-record.json"
FULL, QUICK = "full", "quick"
ENOUGH_GPUS = 2
"""A run on fewer GPUs sends nothing between devices, so it does not count."""


def read(root: Path) -> dict[str, list[Entry]]:
    """Return the entries of each test folder; none without a record."""
    return run_record.read(root / FILE)


def add(root: Path, folder: str, entry: Entry) -> None:
    """Write an entry into the record, in place of the earlier one of the same kind and number of
    GPUs.

    A full run contains the quick one, so it also takes the place of a quick entry of other code.
    """

    def stays(known: Entry) -> bool:
        if known["gpu_count"] != entry["gpu_count"]:
            return True
        return known["run"] != entry["run"] and (
            entry["run"] == QUICK or known["hash"] == entry["hash"]
        )

    def changed(record: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        entries = [*filter(stays, record.get(folder, [])), entry]
        ordered = sorted(entries, key=lambda item: (item["run"], item["gpu_count"]))
        return {**record, folder: ordered}

    run_record.change(root / FILE, changed)


def outdated(record: Mapping[str, list[Entry]], sources: Sources) -> list[str]:
    """Return a line for everything in the record that does not speak for the present code.

    Args:
        record: as ``read`` returns it.
        sources: the present code.
    """
    known = [entry for entries in record.values() for entry in entries]
    if not all(run_record.has_same_text(entry, sources) for entry in known):
        sources.load()
    lines = []
    for folder in sorted({*sources.marked_tests, *record}):
        if folder not in sources.marked_tests:
            lines.append(f"{folder}: has a record, but no GPU tests; remove it from {FILE}")
            continue
        for entry in record.get(folder, []):
            gpus = f"{entry['gpu_count']} GPU{'s' * (entry['gpu_count'] != 1)}"
            what = f"the {entry['run']} run on {gpus}"
            if not run_record.is_of_present_code(folder, entry, sources):
                lines.append(f"{folder}: {what} belongs to other code")
            elif entry["failed"]:
                lines.append(
                    f"{folder}: {what} has {entry['failed']} failure{'s' * (entry['failed'] != 1)}"
                )
        if not any(
            entry["run"] == FULL and entry["gpu_count"] >= ENOUGH_GPUS
            for entry in record.get(folder, [])
        ):
            lines.append(f"{folder}: no full run on {ENOUGH_GPUS} or more GPUs")
    return lines
