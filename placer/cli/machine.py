"""``placer doctor``, ``demo`` and ``cache``: a look at this machine, a first run, the cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from placer.cli.files import people
from placer.cli.options import AsJson
from placer.cli.terminal import extra, spinner
from placer.errors import InputError
from placer.profiler.cache.file_cache import open_cache
from placer.utils.units import bytes_text, count_text


def doctor(json: AsJson = False) -> None:
    """Look at this machine: devices, links, torch, extras, and problems.

    The exit code is 1 if a problem would prevent a placement.
    """
    from placer.doctor import examine

    with spinner("measuring devices and links"):
        report = examine(os.environ.get("PLACER_URL"))
    if json or not sys.stdout.isatty():
        print(report.model_dump_json(indent=1))
    else:
        people().print(report.table())
    raise typer.Exit(1 if report.problems else 0)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="smaller models and images")] = False,
) -> None:
    """Profile, place and split ResNet-50 and U-Net, and compare them with the unsplit models."""
    with extra("torch"):
        from placer.demo import run
    raise typer.Exit(0 if run(quick=quick) else 1)


def cache(
    action: Annotated[
        str,
        typer.Argument(
            metavar="size|clear", help="size: show the folder and its size; clear: empty it"
        ),
    ] = "size",
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="the cache; by default PLACER_CACHE, or the user's own"
        ),
    ] = None,
    older_than: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="clear only older measurements")
    ] = 0.0,
) -> None:
    """Show the size of the cache of measurements, or clear it.

    An entry is reused only for the same layer, device, driver, libraries and settings. Clear the
    cache after a change that Placer cannot see: clocks locked by hand, or a machine that was busy
    during the measurement.
    """
    if action not in ("size", "clear"):
        raise InputError(f"{action!r} is not an action of the cache; write size or clear")
    if action == "size" and older_than:
        raise InputError(
            f"--older-than {older_than:g} tells what is cleared; give it to placer cache clear"
        )
    found = open_cache(True if folder is None else folder)
    if found is None:
        raise InputError("PLACER_CACHE turns the cache off; name a folder with --folder")
    if action == "clear":
        removed = count_text(found.clear(older_than), "entry", "entries")
        print(f"{removed} removed from {found.folder}")
    else:
        count, total_bytes = found.size()
        entries = count_text(count, "entry", "entries")
        print(f"{found.folder}: {entries}, {bytes_text(total_bytes)}")
