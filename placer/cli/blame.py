"""The line of the user's own code that caused an error."""

from __future__ import annotations

import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path

OWN = ("placer", "placer_client", "placer_server")


def blamed(error: BaseException) -> str:
    """Return the last line of the user's own code in the traceback of an error's cause.

    Args:
        error: the error that is reported; its ``__cause__`` has the traceback.

    Returns:
        Text such as `` (train.py, line 33)``, or an empty text.
    """
    cause = error.__cause__
    if cause is None:
        return ""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        if _is_users(frame.filename):
            return f" ({_short(frame.filename)}, line {frame.lineno})"
    return ""


def _is_users(file: str) -> bool:
    """Return whether a file is neither Placer's nor installed.

    Generated code has no file, and is not the user's.
    """
    path = Path(file)
    # Debian has such folders in addition to the folders of sysconfig.
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    paths = sysconfig.get_paths()
    others = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others += [Path(folder) for name in OWN for folder in _folders(name)]
    return path.is_file() and not any(path.is_relative_to(folder) for folder in others)


def _folders(name: str) -> list[str]:
    """Return the folders of a package, installed or in a checkout."""
    found = find_spec(name)
    return list(found.submodule_search_locations or ()) if found else []


def _short(file: str) -> str:
    """Return a path relative to the working directory, if it is below."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
