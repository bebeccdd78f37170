"""``placer refine``: measure a placement's stages, correct its profile, and solve again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import load_placement, load_question, write_text
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Example, Model, Printed, in_a_folder
from placer.cli.terminal import extra, spinner, told, users_code
from placer.schema import PlacementRequest, RefineOptions


@expanded(RefineOptions)
def refine(
    model: Model,
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT|-", help="JSON of a placement; - for stdin")
    ],
    example: Example,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="the profile or request that it answers; measured again if left out",
        ),
    ] = None,
    *,
    words: Words[RefineOptions],
    placement_output: Annotated[
        Path | None,
        typer.Option(
            "--save-placement",
            metavar="FILE",
            callback=in_a_folder,
            help="write the best placement alone, too",
        ),
    ] = None,
    printed: Printed,
) -> None:
    """Measure a placement's stages, correct the profile by them, and solve again.

    This repeats until the placement stays the same. The inputs are one micro-batch. Each round's
    prediction and measurement are shown. The JSON has the best placement that was measured, the
    corrected profile, and the rounds.
    """
    where, question = load_placement(placement), None if profile is None else load_question(profile)
    with extra("torch"):
        from placer.refinement.refine import refine as refine_here
    options = words.read()
    asked: dict[str, Any] = {
        "request" if isinstance(question, PlacementRequest) else "profile": question
    }
    module, inputs = example.load(model)
    with told(), spinner("measuring stages"), users_code():
        found = refine_here(where, module, inputs, options=options, **asked)
    printed.emit(found)
    if placement_output is not None:
        write_text(placement_output, found.placement.to_json() + "\n")
