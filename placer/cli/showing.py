"""``placer show``: what a file holds, for people."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from placer.cli.files import load, print_json
from placer.cli.options import (
    AsJson,
)
from placer.report.explain import table
from placer.schema import PlacementRequest


def show(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="a profile, placement, request or cluster")],
    json: AsJson = False,
) -> None:
    """Show a profile or a placement as tables."""
    subject = load(file)
    if isinstance(subject, PlacementRequest):
        subject = subject.profile
    if json:
        print_json(subject)
    else:
        Console().print(table(subject))
