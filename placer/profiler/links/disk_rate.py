"""The rate at which weights are read from the disk of a folder.

The file is not in the system's cache of files, where the system allows to drop it from there.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from placer import devices as hardware
from placer.errors import InputError, ProfilingError
from placer.profiler.cache.file_cache import Cache, key_of
from placer.profiler.links.link_probe import fit, pattern
from placer.profiler.progress import Step
from placer.schema import Rate

SIZES = (2**20, 8 * 2**20, 32 * 2**20, 128 * 2**20)
"""Bytes that are read at once."""

_REPEATS = 3


def known_rate(folder: Path, cache: Cache | None) -> Rate | None:
    """Return the rate of a folder's disk from the cache; None if it is not known."""
    content = None if cache is None else cache.read("links", _key(folder))
    try:
        return Rate(**content) if content else None
    except (InputError, TypeError):
        return None


def disk_rate(folder: Path, step: Step, cache: Cache | None = None) -> Rate:
    """Measure how fast weights are read from the disk of a folder.

    Args:
        folder: whose largest file is read; one of 128 MiB is written if all are smaller.
        step: called with a description when the measurement begins.
        cache: supplies and stores the rates of disks that were measured since the machine started.

    Raises:
        ProfilingError: no file can be read or written there.
    """
    if (known := known_rate(folder, cache)) is not None:
        return known
    step(f"disk of {folder}")
    try:
        with _large_file(folder) as file:
            reader = hardware.FileReader()
            times = [
                statistics.median(_read_s(file, size, reader) for _ in range(_REPEATS))
                for size in SIZES
            ]
    except OSError as error:
        raise ProfilingError(
            f"the disk of {folder} cannot be measured: {error.strerror or error}; give another "
            "disk_folder"
        ) from error
    latency_s, bandwidth = fit(SIZES, times)
    measured = Rate(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    if cache is not None:
        cache.write("links", _key(folder), measured.model_dump())
    return measured


def _key(folder: Path) -> str:
    disk = folder.stat().st_dev
    return key_of(disk=disk, host=hardware.host_name(), boot=hardware.boot_id())


@contextmanager
def _large_file(folder: Path) -> Iterator[Path]:
    """Provide a file of the folder that is large enough to be read."""
    files = [one for one in folder.iterdir() if one.is_file() and os.access(one, os.R_OK)]
    largest = max(files, key=lambda one: one.stat().st_size, default=None)
    if largest is not None and largest.stat().st_size >= SIZES[-1]:
        yield largest
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix="placer-disk-") as written:
        written.write(pattern(SIZES[-1]).numpy().data)
        written.flush()
        os.fsync(written.fileno())
        yield Path(written.name)


def _read_s(file: Path, size_bytes: int, reader: hardware.FileReader) -> float:
    """Return the seconds to read the first bytes of a file as copies of weights read them."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = hardware.mapped_bytes(file, size_bytes)
    began = perf_counter()
    reader.expect(mapped, str(file))
    for _ in reader.parts(mapped, str(file)):
        pass
    return perf_counter() - began
