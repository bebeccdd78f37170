"""A cache of measurements, one small file each, so that nothing is measured twice.

    <folder>/layers/3f/3f09...c1.json      one layer on one type of device
    <folder>/links/a0/a07b...22.json       one link of one machine
    <folder>/graphs/7e/7e10...5d.json      the layers of one model at one batch size

A key is a hash of everything that the measurement depends on. So an entry never becomes stale: a
changed condition gives another key. Entries are written atomically; an unreadable entry is measured
and written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from placer.errors import InputError
from placer.utils.atomic_files import write_whole

CacheLike = bool | str | os.PathLike[str]
"""True (the folder in ``PLACER_CACHE``, else the user's cache folder), False (no cache), or a
folder."""

_KINDS = ("layers", "links", "graphs")
_OFF = ("", "0", "off", "no", "false")
_log = logging.getLogger(__name__)


class Cache:
    """A folder of measurements.

    Args:
        folder: created when the first entry is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writable = True

    def read(self, kind: str, key: str) -> Any:
        """Return the content of an entry; None if it is missing or damaged."""
        try:
            # the digest detects truncated and edited files
            entry = json.loads(self._path(kind, key).read_text())
            content = entry["content"]
            return content if entry["digest"] == _digest(content) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, kind: str, key: str, content: Any) -> None:
        """Store an entry; warn once if the folder is not writable.

        Without a cache, the next run only has to measure again.

        Args:
            kind: ``layers``, ``links`` or ``graphs``.
            key: from ``key_of``.
            content: JSON-serialisable data.
        """
        if not self._writable:
            return
        path = self._path(kind, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"digest": _digest(content), "content": content}))
        except OSError as error:
            # do not try, and warn, again for every layer
            self._writable = False
            _log.warning(
                "nothing is cached: cannot write to %s: %s", self.folder, error.strerror or error
            )

    def entries(self) -> Iterator[Path]:
        """Yield the files of all entries."""
        for kind in _KINDS:
            yield from (self.folder / kind).glob("??/*.json")

    def size(self) -> tuple[int, int]:
        """Return the number of entries and their total bytes."""
        sizes = [path.stat().st_size for path in self.entries()]
        return len(sizes), sum(sizes)

    def clear(self, older_than_days: float = 0.0) -> int:
        """Remove entries; other files in the folder stay.

        Args:
            older_than_days: keep entries that are younger than this.

        Returns:
            The number of removed entries.
        """
        latest = time.time() - 86_400 * older_than_days
        removed = 0
        for path in list(self.entries()):
            if not older_than_days or path.stat().st_mtime < latest:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / f"{key}.json"


def open_cache(cache: CacheLike = True) -> Cache | None:
    """Return the cache that a user selected, or None.

    Args:
        cache: see ``CacheLike``; ``PLACER_CACHE=off`` disables the default cache.

    Raises:
        InputError: if ``cache`` is not a folder.
    """
    if cache is False:
        return None
    if cache is not True:
        if not isinstance(cache, str | os.PathLike):
            raise InputError(
                f"cache={cache!r}: give a folder, True for the usual one, or False for none"
            )
        folder = Path(cache).expanduser()
    elif (named := os.environ.get("PLACER_CACHE")) is not None:
        if named.strip().lower() in _OFF:
            return None
        folder = Path(named).expanduser()
    else:
        folder = platformdirs.user_cache_path("placer", appauthor=False)
    if folder.is_file():
        raise InputError(
            f"the cache {folder} is a file; name a folder, or turn the cache off (cache=False, "
            "--no-cache)"
        )
    return Cache(folder)


def key_of(**facts: Any) -> str:
    """Return a hash of facts, independent of their order: 64 hexadecimal digits.

    Args:
        **facts: JSON-serialisable values.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
