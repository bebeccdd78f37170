"""``placer doctor`` and ``placer demo``: a look at this machine, and a first run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from placer.cli.options import (
    AsJson,
)
from placer.cli.terminal import extra, spinner


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
        Console().print(report.table())
    raise typer.Exit(1 if report.problems else 0)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="smaller models and images")] = False,
) -> None:
    """Profile, place and split ResNet-50 and U-Net, and compare them with the unsplit models."""
    with extra("torch"):
        from placer.demo import run
    raise typer.Exit(0 if run(quick=quick) else 1)
