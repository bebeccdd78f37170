"""Where in the user's own code an error came from."""

from __future__ import annotations

import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path

OWN = ("placer", "placer_client", "placer_server")


def blamed(error: BaseException) -> str:
    """`` (train.py, line 33)``: the last line of the user's own code on the way to what caused an
    error, if any.

    Args:
        error: as it is told; what it was raised from is looked at.
    """
    cause = error.__cause__
    if cause is None:
        return ""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        if _is_users(frame.filename):
            return f" ({_short(frame.filename)}, line {frame.lineno})"
    return ""


def _is_users(file: str) -> bool:
    """Whether a file is neither of Placer nor installed; frames without a file are of generated
    code.
    """
    path = Path(file)
    # Debian has folders of these beside those of sysconfig
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    paths = sysconfig.get_paths()
    others = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others += [Path(folder) for name in OWN for folder in _folders(name)]
    return path.is_file() and not any(path.is_relative_to(folder) for folder in others)


def _folders(name: str) -> list[str]:
    """Where a package is, installed or in a checkout."""
    found = find_spec(name)
    return list(found.submodule_search_locations or ()) if found else []


def _short(file: str) -> str:
    """Its path from here, where it is below."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
