"""The memory of this machine, or of the container or unit that limits this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines of ``number:controllers:path``; cgroups version 2 has one line, without controllers."""

MOUNT = Path("/sys/fs/cgroup")


def total_bytes(container_limit: Path = MOUNT / "memory.max") -> int:
    """Return the bytes that this process and others of its container may use together.

    Args:
        container_limit: the limit file that a container sees (cgroups version 2).

    Returns:
        The smallest of the machine's memory and the limits of this process's cgroup and its
        parents, of version 1 or 2; 0 if unknown.
    """
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return 0
    files = [container_limit, *_limit_files()]
    return min([physical, *filter(None, map(_read, files))])


def _limit_files() -> Iterator[Path]:
    """Yield the files that may hold a limit, whether they exist or not.

    In a container of version 1, the paths are the host's, and only the root of the mount exists.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
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
    """Return the limit in a file, or None; version 1 writes a number near 2**63 for "no limit"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None
