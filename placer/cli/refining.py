"""``placer refine``: measure a placement's stages here, correct its profile, and solve again until
nothing moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import emit, load_placement, load_question, write_text
from placer.cli.options import Arguments, AsJson, Inputs, Loss, Model, Output, Target, in_a_folder
from placer.cli.profiling import example_of, loss_of
from placer.cli.terminal import extra, spinner, told, users_code
from placer.schema import PlacementRequest


def refine(
    model: Model,
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT|-", help="JSON of a placement; - for stdin")
    ],
    arg: Arguments = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="the profile or request that it answers; measured anew if left out"
        ),
    ] = None,
    loss: Loss = None,
    target: Target = None,
    rounds: Annotated[int, typer.Option(min=1, help="the most placements that are measured")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="how often each pass is timed")] = 7,
    compile: Annotated[
        bool, typer.Option("--compile", help="measure stages as they run under torch.compile")
    ] = False,
    placement_output: Annotated[
        Path | None,
        typer.Option(
            "--save-placement",
            metavar="FILE",
            callback=in_a_folder,
            help="write the best placement alone, too",
        ),
    ] = None,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Measure a placement's stages, correct the profile by them, and solve again, until nothing
    moves.

    The inputs are one micro-batch. Each round's prediction and measurement are shown; the JSON has
    the best placement that was measured, the corrected profile, and the rounds.
    """
    where, question = load_placement(placement), None if profile is None else load_question(profile)
    with extra("torch"):
        from placer.model_spec import load_model
        from placer.refinement.refine import refine as refine_here
    asked: dict[str, Any] = {"rounds": rounds, "repeats": repeats, "compile": compile} | loss_of(
        loss, target
    )
    asked["request" if isinstance(question, PlacementRequest) else "profile"] = question
    with told(), spinner("measuring stages"), users_code():
        module = load_model(model, arg)
        found = refine_here(where, module, example_of(module, input), **asked)
    emit(found, output, json)
    if placement_output is not None:
        write_text(placement_output, found.placement.to_json() + "\n")
