"""``placer serve``, ``placer doctor`` and ``placer demo``: what has to do with this machine."""

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


def serve(
    host: Annotated[str | None, typer.Option(help="the address to listen on")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="the port; 0 takes a free one")] = None,
    database: Annotated[str | None, typer.Option(help="the file that keeps placements; :memory: for none")] = None,
    keys_file: Annotated[
        str | None, typer.Option(help="bearer keys; needed where others can reach the service")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="solves that run at the same time")] = None,
    log_level: Annotated[str | None, typer.Option(help="critical, error, warning, info or debug")] = None,
) -> None:
    """Serve placements over REST; what is left out comes from PLACER_HOST, PLACER_PORT, ... or has a default."""
    with extra("server"):
        from placer_server.app import run
        from placer_server.settings import Settings
    options = {
        "host": host,
        "port": port,
        "database": database,
        "keys_file": keys_file,
        "workers": workers,
        "log_level": log_level,
    }
    run(Settings(**{name: value for name, value in options.items() if value is not None}))


def doctor(json: AsJson = False) -> None:
    """Look at this machine: devices, links, torch, extras, and what would stop a placement; exit code 1 if anything."""
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
    """Profile ResNet-50 and U-Net, place them through the service, split them, and compare with the unsplit models."""
    with extra("torch"):
        from placer.demo import run
    raise typer.Exit(0 if run(quick=quick) else 1)
