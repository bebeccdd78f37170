"""``placer export``: a placement in the format of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from placer.cli.files import load_placement, write_text
from placer.cli.options import AsJson, in_a_folder
from placer.cli.terminal import err, extra, users_code
from placer.schema.base import FormatName


def export(
    file: Annotated[
        str, typer.Argument(metavar="PLACEMENT|-", help="JSON of a placement; - for stdin")
    ],
    to: Annotated[FormatName, typer.Option("--to", help="the format of the other engine")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="package.module:callable of the placed model: formats that name or count modules"
            " then also cover modules without operations",
        ),
    ] = None,
    arg: Annotated[
        list[str],
        typer.Option("--arg", metavar="KEY=VALUE", help="an argument of the callable; repeatable"),
    ] = [],  # noqa: B006
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=in_a_folder, help="write to this file"
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Print a placement for another engine; what its format cannot say goes to stderr."""
    found = load_placement(file).export(to, _model(model, arg))
    text = found.model_dump_json(indent=1) if json else found.text
    if output is None:
        print(text)
    else:
        write_text(output, text + "\n")
    if not json:
        for note in found.notes:
            err.print(escape(note), soft_wrap=True, highlight=False)


def _model(spec: str | None, arguments: list[str]) -> object:
    if spec is None:
        return None
    with extra("torch"), users_code():
        from placer.cli.model_arguments import load_model

        return load_model(spec, arguments)
