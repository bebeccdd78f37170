"""The record of GPU test runs: ``tests/gpu-record.json``, by test folder.

    {"tests/placer/devices": [{"run": "full", "gpu_count": 2, "gpus": ["NVIDIA H100 80GB HBM3",
    ...],
                               "hash": "...", "text": "...", "python": "3.12.3", "torch": "2.11.0",
                               "cuda": "13.0", "passed": 12, "failed": 0, "skipped": 0, "seconds":
                               8.1, "date": "2026-11-26"}]}

A folder has one entry for each kind of run (``full`` or ``quick``) and each number of GPUs. An
entry belongs to the code whose ``hash`` it holds, see ``module_hashes``. ``text`` is a hash of this
hash and of the text of all source files as it was: while no file has changed, none needs to be
parsed. This module needs no package besides Python."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from module_hashes import Sources

FILE = "tests/gpu-record.json"
FULL, QUICK = "full", "quick"
ENOUGH_GPUS = 2
"""A run on fewer GPUs sends nothing between devices, so it does not count."""

Entry = dict[str, Any]


def read(root: Path) -> dict[str, list[Entry]]:
    """Return the entries of each test folder; none without a record."""
    path = root / FILE
    return json.loads(path.read_text()) if path.exists() else {}


def add(root: Path, folder: str, entry: Entry) -> None:
    """Write an entry into the record, in place of the earlier one of the same kind and number of
    GPUs.

    A full run contains the quick one, so it also takes the place of a quick entry of other code.
    """
    with _alone(root):
        record = read(root)

        def stays(known: Entry) -> bool:
            if known["gpu_count"] != entry["gpu_count"]:
                return True
            return known["run"] != entry["run"] and (
                entry["run"] == QUICK or known["hash"] == entry["hash"]
            )

        entries = [*filter(stays, record.get(folder, [])), entry]
        record[folder] = sorted(entries, key=lambda item: (item["run"], item["gpu_count"]))
        part = root / f"{FILE}.part"
        part.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
        # in one step, so that a run which is killed leaves a whole record
        part.replace(root / FILE)


def outdated(record: Mapping[str, list[Entry]], sources: Sources) -> list[str]:
    """Return a line for everything in the record that does not speak for the present code.

    Args:
        record: as ``read`` returns it.
        sources: the present code.
    """
    if not all(_has_same_text(entry, sources) for entries in record.values() for entry in entries):
        sources.load()
    lines = []
    for folder in sorted({*sources.gpu_tests, *record}):
        if folder not in sources.gpu_tests:
            lines.append(f"{folder}: has a record, but no GPU tests; remove it from {FILE}")
            continue
        for entry in record.get(folder, []):
            gpus = f"{entry['gpu_count']} GPU{'s' * (entry['gpu_count'] != 1)}"
            what = f"the {entry['run']} run on {gpus}"
            if not _has_same_text(entry, sources) and entry["hash"] != sources.hash_of(folder):
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


def code(folder: str, sources: Sources) -> Entry:
    """Return the part of an entry that says which code it belongs to."""
    now = sources.hash_of(folder)
    return {"hash": now, "text": _text(now, sources)}


def _text(folder_hash: str, sources: Sources) -> str:
    return hashlib.sha256(f"{folder_hash} {sources.text_hash}".encode()).hexdigest()


def _has_same_text(entry: Entry, sources: Sources) -> bool:
    return bool(entry["text"] == _text(entry["hash"], sources))


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let no other process write the record meanwhile: runs of other folders may end at the same
    time."""
    import fcntl

    # the folder itself, so that no lock file is left behind
    lock = os.open(root / "tests", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
