"""Atomic writing of files."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

# Errors after which the file is written in place: no file may be created next to it, or it is a
# mount point, as in containers. A missing folder then gives an error about the file itself.
_NOT_MOVED_THERE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EBUSY,
    errno.ENOENT,
    errno.ENOTDIR,
)


def write_whole(path: Path, text: str) -> None:
    """Write a text to a temporary file and move it into place in one step.

    No reader, crash or full disk leaves half of the file. Symbolic links, owner and permissions
    stay. Files that cannot be replaced, devices and pipes are written in place.

    Args:
        path: the file, encoded in UTF-8.
        text: its new content.

    Raises:
        OSError: if it cannot be written; the old content stays, unless the file had to be written
            in place.
    """
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        if target.exists():
            _take_after(target, part)
        os.replace(part, target)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, OSError) or error.errno not in _NOT_MOVED_THERE:
            raise
        path.write_text(text, encoding="utf-8")


def _take_after(old: Path, new: Path) -> None:
    # may fail for files of other users, and does not exist on Windows
    with suppress(PermissionError, AttributeError):
        os.chown(new, old.stat().st_uid, old.stat().st_gid)
    shutil.copymode(old, new)
