"""The memory of this machine, or of the container or unit that this process is limited to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["total_bytes"]

OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines of ``number:controllers:path``; version 2 of cgroups has one, with no controllers."""

MOUNT = Path("/sys/fs/cgroup")


def total_bytes(container_limit: Path = MOUNT / "memory.max") -> int:
    """Return the bytes that this process and all others of its container may take together.

    Args:
        container_limit: the file that has the limit of a container which sees itself alone (cgroup version 2).

    Returns:
        The smallest of the machine's memory and the limits of this process's cgroup and those above it, of version 1 or
        2; 0 if the system does not say.
    """
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return 0
    files = [container_limit, *_limit_files()]
    return min([physical, *filter(None, map(_read, files))])


def _limit_files() -> Iterator[Path]:
    """The files that may have a limit, whether they are there or not.

    In a container the paths of version 1 are those of the host, and only the mount's own folder is there.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = MOUNT, "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = MOUNT / "memory", "memory.limit_in_bytes"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield mount / folder / name


def _read(file: Path) -> int | None:
    """The limit in a file; None if there is none. Version 1 writes the largest number of pages instead."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None
