"""``placer evaluate``: judge a map of another engine, or of one's own."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from placer import errors
from placer.cli.files import load_map, read
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Printed, Server
from placer.cli.solving import MEASURING, Target, solve_anywhere
from placer.cli.terminal import spinner
from placer.errors import InputError
from placer.schema import Placement, SuggestOptions
from placer.schema.base import FormatName

_OWN = {"file", "source", "text", "profile", "best"}
"""Parameters that do not change the request."""


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
            help="the format of the map; map: JSON from layer to device, or a placement",
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
) -> Placement | dict[str, str] | str:
    """Return the map in a file, or the text of a format."""
    if text is None:
        return load_map(file or "-") if source == "map" else read(file or "-")
    if file is not None:
        raise InputError(f"a map is in {file}, and another one in --text; give one of the two")
    if source == "map":
        raise InputError(f"--text {text!r:.80} needs its format; name it with --from")
    return text
