"""Limits of memory of both versions of cgroups are seen: that of the process's own cgroup, and
those above it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from placer import devices
from placer.utils import host_memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED_V1 = "9223372036854771712\n"
MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /sys/fs/cgroup; ``own`` in it stands for /proc/self/cgroup."""
    monkeypatch.setattr(host_memory, "MOUNT", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        (
            "4:memory:/docker/abc\n0::/\n",
            {"memory/memory.limit_in_bytes": f"{64 * MIB}\n"},
            64 * MIB,
        ),
        ("4:cpu,memory:/a/b\n", {"memory/a/b/memory.limit_in_bytes": f"{64 * MIB}\n"}, 64 * MIB),
        ("4:memory:/a/b\n", {"memory/a/memory.limit_in_bytes": f"{64 * MIB}\n"}, 64 * MIB),
        (
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/memory.limit_in_bytes": UNLIMITED_V1,
            },
            PHYSICAL,
        ),
        ("0::/\n", {"memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        (
            "0::/system.slice/placer.service\n",
            {"system.slice/placer.service/memory.max": f"{64 * MIB}\n"},
            64 * MIB,
        ),
        (
            "0::/system.slice/placer.service\n",
            {
                "system.slice/placer.service/memory.max": "max\n",
                "system.slice/memory.max": f"{64 * MIB}\n",
            },
            64 * MIB,
        ),
        ("0::/other\n", {"memory/memory.limit_in_bytes": f"{64 * MIB}\n"}, PHYSICAL),
        ("1:cpu:/\n", {"memory/memory.limit_in_bytes": f"{64 * MIB}\n"}, PHYSICAL),
        ("", {}, PHYSICAL),
    ],
    ids=[
        "version 1 in a container",
        "version 1, several controllers",
        "version 1, the cgroup above",
        "version 1, no limit",
        "version 2 in a container",
        "version 2, a unit of systemd",
        "version 2, the cgroup above",
        "another controller's",
        "no memory controller",
        "none",
    ],
)
def test_the_smallest_limit_counts(
    machine: Path, own: str, limits: dict[str, str], expected: int
) -> None:
    write(machine / "own", own)
    for name, text in limits.items():
        write(machine / name, text)
    assert host_memory.total_bytes(machine / "memory.max") == expected


def test_where_there_are_no_cgroups_it_is_the_machines_memory(machine: Path) -> None:
    assert host_memory.total_bytes(machine / "memory.max") == PHYSICAL


def test_stand_ins_share_what_the_container_may_take(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A profile made in a container gave its CPU devices the whole machine's memory.
    write(machine / "own", "4:memory:/docker/abc\n")
    write(machine / "memory/memory.limit_in_bytes", f"{64 * MIB}\n")
    free, total = devices.memory_bytes(torch.device("cpu", 0))
    assert total == 64 * MIB and free <= total
