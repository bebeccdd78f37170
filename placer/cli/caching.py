"""``placer cache``: what profiling has kept, and how to be rid of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placer.errors import InputError
from placer.profiler.cache.file_cache import Cache, open_cache
from placer.utils.units import bytes_text, count_text


def cache(
    action: Annotated[
        str,
        typer.Argument(
            metavar="size|clear", help="size: tell the folder and what is in it; clear: remove it"
        ),
    ] = "size",
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="another cache than PLACER_CACHE or the user's own"),
    ] = None,
    older_than: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="clear only what was measured longer ago")
    ] = 0.0,
) -> None:
    """Tell the size of the cache of measurements, or clear it.

    Entries are found by all that times depend on and can be asked for: layer, device, driver,
    libraries, settings. Clear them after what cannot: clocks locked by hand, or a machine that was
    busy when it was measured.
    """
    if action not in ("size", "clear"):
        raise InputError(f"{action!r} is nothing to do with the cache; write size or clear")
    if action == "size" and older_than:
        raise InputError(
            f"--older-than {older_than:g} tells what is cleared; give it to placer cache clear"
        )
    found = open_cache(True if folder is None else folder)
    if found is None:
        raise InputError("PLACER_CACHE turns the cache off; name a folder with --folder")
    if action == "clear":
        print(
            f"{count_text(found.clear(older_than), 'entry', 'entries')} removed from {found.folder}"
        )
    else:
        print(_size(found))


def _size(found: Cache) -> str:
    count, total_bytes = found.size()
    return f"{found.folder}: {count_text(count, 'entry', 'entries')}, {bytes_text(total_bytes)}"
