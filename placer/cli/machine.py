"""``placer doctor`` and ``placer demo``: what has to do with this machine."""

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
    """Look at this machine: devices, links, torch, extras, and what would stop a placement; exit
    code 1 if anything.
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
    """Profile ResNet-50 and U-Net, place them through the service, split them, and compare with the
    unsplit models.
    """
    with extra("torch"):
        from placer.demo import run
    raise typer.Exit(0 if run(quick=quick) else 1)
