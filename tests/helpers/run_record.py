"""What the records of test runs have in common: a JSON file with the test folders and their
entries, each of which belongs to the code that it holds the ``hash`` of, see ``module_hashes``.

``text`` is a hash of this hash and of the text of all source files as it was: while no file has
changed, none needs to be parsed. This module needs no package besides Python."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from module_hashes import Sources

Entry = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """Return what a record says of each test folder; nothing if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def change(path: Path, changed: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Write what a function makes of a record, while no other process changes it."""
    with _locked(path.parent):
        record = changed(read(path))
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
        # in one step, so that a run which is killed leaves a whole record
        part.replace(path)


def code(folder: str, sources: Sources) -> Entry:
    """Return the part of an entry that says which code it belongs to."""
    now = sources.hash_of(folder)
    return {"hash": now, "text": _text(now, sources)}


def is_of_present_code(folder: str, entry: Entry, sources: Sources) -> bool:
    """Return whether an entry belongs to the present code."""
    return has_same_text(entry, sources) or bool(entry["hash"] == sources.hash_of(folder))


def has_same_text(entry: Entry, sources: Sources) -> bool:
    """Return whether no source file has changed since an entry was made."""
    return bool(entry["text"] == _text(entry["hash"], sources))


def _text(folder_hash: str, sources: Sources) -> str:
    return hashlib.sha256(f"{folder_hash} {sources.text_hash}".encode()).hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no other process write a record meanwhile: runs of other folders may end at the same
    time."""
    import fcntl

    # the folder itself, so that no lock file is left behind
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
