"""``placer export`` and ``placer evaluate``: placements for other engines, and maps of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from placer import errors
from placer.cli.files import load_map, load_placement, read, write_text
from placer.cli.option_fields import Words, expanded
from placer.cli.options import AsJson, Printed, Server, in_a_folder
from placer.cli.solving import MEASURING, Target, solve_anywhere
from placer.cli.terminal import err, extra, spinner, users_code
from placer.errors import InputError
from placer.schema import LayerMap, Placement, SuggestOptions
from placer.schema.base import FormatName

_OWN = {"file", "source", "text", "profile", "best"}
"""Parameters that do not change the request."""


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


@expanded(SuggestOptions, leave_out=MEASURING)
def evaluate(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE|-]", help="the map; - for stdin, which is the default"),
    ] = None,
    source: Annotated[
        Literal["map", FormatName],
        typer.Option(
            "--from",
            help="the format of the map; map: JSON from layer to device, a placement, or an object"
            " of layer_devices and replicas",
        ),
    ] = "map",
    text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="the map itself instead of a file, as 8,9,9,6"),
    ] = None,
    *,
    profile: Annotated[str, typer.Option(metavar="FILE|-", help="the profile, or a whole request")],
    target: Target,
    words: Words[SuggestOptions],
    best: Annotated[
        bool, typer.Option("--best/--no-best", help="also solve for the best placement")
    ] = True,
    server: Server = None,
    printed: Printed,
) -> None:
    """Evaluate a map: its cost, what is wrong with it, and what the best placement would gain.

    Exit codes: 0 if the map is valid; 1 if it is not; 3 if no placement is possible.
    """
    given = _map(file, source, text)
    request = target.request(context, profile, words, _OWN)
    from placer.evaluation.evaluate import evaluate as evaluate_here
    from placer.evaluation.evaluate import for_format, with_best

    asked = for_format(request, None if source == "map" else source)
    # Faults of the text are reported before the solve.
    found = evaluate_here(asked, given, best=False)
    if best:
        with spinner(f"asking {server}" if server else "solving"):
            found = with_best(found, asked, solve_anywhere(asked, server))
    printed.emit(found)
    if found.best is not None and found.best.placement.infeasible is not None:
        raise errors.InfeasibleError(found.best.placement.infeasible.reason)
    raise typer.Exit(0 if found.valid else 1)


def _map(
    file: str | None, source: Literal["map", FormatName], text: str | None
) -> Placement | LayerMap | dict[str, str] | str:
    """Return the map in a file, or the text of a format."""
    if text is None:
        return load_map(file or "-") if source == "map" else read(file or "-")
    if file is not None:
        raise InputError(f"a map is in {file}, and another one in --text; give one of the two")
    if source == "map":
        raise InputError(f"--text {text!r:.80} needs its format; name it with --from")
    return text
