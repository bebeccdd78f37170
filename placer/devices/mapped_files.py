"""Host tensors whose memory is mapped from files, and their copies to devices.

Such a tensor takes memory only for the pages that were read lately, which the system gives up when
memory is short. Changes in place stay in memory; files never change.

    file ──reads──▶ staging buffer 0, 1, 0, ... ──link──▶ device
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import torch
from torch import Tensor

from placer.devices.lanes import Lane, Mark
from placer.devices.pinned_memory import is_dense, views
from placer.devices.routes import HOST
from placer.devices.tensor_moves import copy
from placer.errors import InputError, PlacementError
from placer.utils.units import bytes_text

STAGING_BYTES = 32 << 20
"""Bytes of a staging buffer, which one read fills."""

_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14 and later: read pages, and report what cannot be read."""

_IN_MEMORY = ("/dev/", "/memfd:", "/SYSV")
"""Beginnings of the paths of mappings that are no files on a disk."""


class MappedFile(NamedTuple):
    """The file that a tensor's memory is mapped from.

    Attributes:
        path: of the file when it was mapped.
        inode: of the file.
        end: the byte of the file behind the tensor.
    """

    path: str
    inode: int
    end: int

    def refuse_truncated(self) -> None:
        """Raise a PlacementError if the file is shorter than when it was mapped.

        A file that was deleted, or replaced by another one, keeps its content while it is mapped.
        """
        try:
            found = os.stat(self.path)
        except OSError:
            return
        if found.st_ino == self.inode and found.st_size < self.end:
            raise PlacementError(
                f"{self.path} has {found.st_size} bytes, but weights that rest on the disk reach "
                f"to its byte {self.end}: it was truncated; restore it, and load the model again"
            )


class MappedFiles:
    """The files that this process has mapped into its memory, as of now.

    Without ``/proc``, as on other systems than Linux, no file is known.
    """

    def __init__(self) -> None:
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            lines = []
        # by mapping: first and last address, offset in the file, inode and path; in their order
        self._ranges: list[tuple[int, int, int, int, str]] = []
        for line in lines:
            addresses, _, offset, _, inode, *path = line.split(None, 5)
            if path and path[0].startswith("/") and not path[0].startswith(_IN_MEMORY):
                first, last = (int(one, 16) for one in addresses.split("-"))
                self._ranges.append((first, last, int(offset, 16), int(inode), path[0]))

    def of(self, tensor: Tensor) -> MappedFile | None:
        """Return the file that a plain tensor is mapped from; None if it has ordinary memory."""
        if tensor.device.type != HOST.type or not is_dense(tensor) or not tensor.numel():
            return None
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        place = bisect_right(self._ranges, start, key=itemgetter(0)) - 1
        if place < 0:
            return None
        first, last, offset, inode, path = self._ranges[place]
        end = start + size
        return MappedFile(path, inode, offset + end - first) if end <= last else None


def disk_folder(given: Any = None) -> Path:
    """Return the folder for weights that rest on the disk; it is created if it is missing.

    Args:
        given: the folder; None for the one that ``PLACER_DISK`` names, or one in the user's cache.

    Raises:
        InputError: it is not a folder, or cannot be created.
    """
    if given is None:
        named = os.environ.get("PLACER_DISK")
        given = named or platformdirs.user_cache_path("placer", appauthor=False) / "weights"
    if not isinstance(given, str | os.PathLike):
        raise InputError(f"disk_folder is {given!r}; give the path of a folder")
    folder = Path(given).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"disk_folder is {folder}, which cannot be created: {error.strerror or error}; give "
            "another folder"
        ) from error
    return folder


def stored(tensor: Tensor, folder: Path) -> Tensor:
    """Return a copy of a tensor that is mapped from a new file.

    The file has no name. So it goes when its last tensor does, however the process ends.

    Args:
        tensor: plain, on any device.
        folder: for the file.

    Raises:
        PlacementError: the file cannot be written.
    """
    source = copy(tensor, HOST)
    source = source if is_dense(source) else source.contiguous()
    size = source.numel() * source.element_size()
    if not size:
        return source
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="placer-weights-") as file:
            file.write(_as_bytes(source).numpy().data)
            file.flush()
            memory = mapped_bytes(Path(file.name), size)
    except (OSError, RuntimeError) as error:
        raise PlacementError(
            f"weights of {bytes_text(size)} cannot be written to {folder}: {error}; give another "
            "disk_folder, or a smaller disk_bytes"
        ) from error
    return views(memory, [source])[0]


def mapped_bytes(file: Path, size_bytes: int) -> Tensor:
    """Return the first bytes of a file, mapped into memory; changes in place stay there.

    Args:
        file: any file.
        size_bytes: at most its size.
    """
    storage: Any = torch.UntypedStorage.from_file(str(file), False, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=HOST).set_(storage)


class FileReader:
    """A thread that copies weights from mapped files to a device, in the order of its tasks."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="placer-disk")
        self._staging: list[Tensor] = []
        # by staging buffer, after which it may be overwritten
        self._marks: list[Mark] = [None, None]
        self._turn = 0

    def submit(self, work: Callable[[], Mark]) -> Future[Mark]:
        """Let the thread do something after everything before; return its future result."""
        return self._thread.submit(work)

    def drain(self) -> None:
        """Wait until the thread has nothing to do; errors stay in its results."""
        self._thread.submit(int).result()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor, MappedFile]], lane: Lane) -> None:
        """Copy tensors to a device, in the thread and in a lane that it has entered.

        Args:
            pairs: by tensor, the memory on the device that it is copied to, and its file.
            lane: of the copies.

        Raises:
            PlacementError: a file was truncated, or cannot be read.
        """
        # The disk reads all of them, while the first ones are copied.
        for source, _, file in pairs:
            file.refuse_truncated()
            self.expect(source, file.path)
        for source, target, file in pairs:
            places = _in_parts(_as_bytes(target))
            for place, part in zip(places, self.parts(source, file.path), strict=True):
                place.copy_(part, non_blocking=True)
                self._marks[self._turn] = lane.mark()

    def expect(self, source: Tensor, path: str) -> None:
        """Let the system begin to read a mapped tensor; see ``parts`` for the arguments."""
        _advise(_as_bytes(source), mmap.MADV_WILLNEED, path)

    def parts(self, source: Tensor, path: str) -> Iterator[Tensor]:
        """Read a mapped tensor; yield its bytes in staging buffers, part by part.

        Args:
            source: the tensor.
            path: of its file, for errors.

        Raises:
            PlacementError: the file cannot be read.
        """
        for part in _in_parts(_as_bytes(source)):
            _advise(part, _POPULATE_READ, path)
            yield self._free()[: len(part)].copy_(part)

    def _free(self) -> Tensor:
        """Return the staging buffer whose turn it is, once it may be overwritten."""
        if not self._staging:
            is_pinned = torch.cuda.is_available()
            self._staging = [
                torch.empty(STAGING_BYTES, dtype=torch.uint8, device=HOST, pin_memory=is_pinned)
                for _ in self._marks
            ]
        self._turn = (self._turn + 1) % len(self._marks)
        Lane(HOST).wait(self._marks[self._turn])
        return self._staging[self._turn]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor, shape ``(N,)``."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _in_parts(memory: Tensor) -> list[Tensor]:
    """Return memory of shape ``(N,)`` in parts that fit into a staging buffer."""
    starts = range(0, len(memory), STAGING_BYTES)
    return [memory[start : start + STAGING_BYTES] for start in starts]


@cache
def _madvise() -> Any:
    """Return the system's function of this name; None without one."""
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advise(memory: Tensor, advice: int, path: str) -> None:
    """Tell the system that mapped memory is read next.

    Without this, a page that cannot be read would end the process.

    Args:
        memory: shape ``(N,)``.
        advice: a constant of ``madvise``; a system that does not know it does nothing.
        path: of the file.

    Raises:
        PlacementError: the file cannot be read.
    """
    function = _madvise()
    if function is None or not len(memory):
        return
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    if function(start, memory.data_ptr() + len(memory) - start, advice):
        if ctypes.get_errno() == errno.EFAULT:
            raise PlacementError(
                f"{path}, where weights rest on the disk, cannot be read any more: it was "
                "truncated, or its disk fails; restore it, and load the model again"
            )
