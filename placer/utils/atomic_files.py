"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["write_whole"]

# Nothing may be made beside the file, or it is mounted by itself, as files of containers are; or
# there is no folder, which then is told of the file itself.
_NOT_MOVED_THERE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EBUSY,
    errno.ENOENT,
    errno.ENOTDIR,
)


def write_whole(path: Path, text: str) -> None:
    """Write a text beside its file and move it there in one step: no reader, crash or full disk
    meets half of it.

    Links stay, and files keep their owner and permissions. What cannot be moved there is written in
    place, as is what goes to a device or a pipe.

    Args:
        path: of the file, in UTF-8.
        text: all that it shall hold.

    Raises:
        OSError: it cannot be written; what was there still is, unless that had to be written in
            place.
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
    # others' files, and systems without owners
    with suppress(PermissionError, AttributeError):
        os.chown(new, old.stat().st_uid, old.stat().st_gid)
    shutil.copymode(old, new)
