"""``placer show`` and ``placer compare``: tables and pictures of files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placer.cli.files import (
    Answer,
    load,
    load_any,
    load_profile,
    people,
    print_json,
    print_table,
    write_text,
)
from placer.cli.options import AsJson, in_a_folder
from placer.errors import InputError
from placer.report.comparing import compare as compare_both
from placer.report.comparing import comparison_table
from placer.report.comparison_page import comparison_report
from placer.report.page import html_report
from placer.report.pictures import picture
from placer.report.timeline import Measurement
from placer.schema import (
    Cluster,
    Estimate,
    Evaluation,
    Placement,
    PlacementRequest,
    Profile,
    Progress,
)
from placer.schema.joint import JointPlacement
from placer.schema.refinement import Refinement

Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=in_a_folder,
        help="also write a report with pictures, all in one file",
    ),
]
Shown = Answer | Cluster | Progress


def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-",
            help="JSON of a profile, placement, placements of several models, request, refinement,"
            " cluster, measurement, evaluation or estimate, or the progress of a solve on a"
            " service",
        ),
    ],
    html: Html = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=in_a_folder, help="also write the picture alone"),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="with --html of a placement: show its layers in the colours of their devices",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a file as tables, and as pictures of time and memory by layer and device."""
    subject = load_any(file)
    if isinstance(subject, PlacementRequest):
        subject = subject.profile
    if profile is not None and html is None:
        raise InputError(
            f"--profile {profile} colours the layers of a report; name the report with --html FILE"
        )
    if html is not None:
        known = None if profile is None else load_profile(profile)
        write_text(html, html_report(_placed(subject, file), known))
    if svg is not None:
        write_text(svg, picture(_drawable(subject, file)))
    if json:
        print_json(subject)
    else:
        print_table(subject)


def compare(
    first: Annotated[str, typer.Argument(metavar="FILE", help="a profile or a placement")],
    second: Annotated[str, typer.Argument(metavar="FILE|-", help="another one")],
    html: Html = None,
    json: AsJson = False,
) -> None:
    """Compare two profiles or two placements: time, memory, and the layers that moved."""
    found = compare_both(*(_without_request(load(file)) for file in (first, second)))
    if html is not None:
        write_text(html, comparison_report(found))
    if json:
        print(found.model_dump_json(indent=1))
    else:
        people().print(comparison_table(found, (first, second)), crop=False)


def _without_request(subject: object) -> object:
    return subject.profile if isinstance(subject, PlacementRequest) else subject


def _placed(subject: Shown, file: str) -> Profile | Placement | Cluster | Estimate:
    """Return the part that can be drawn; of a refinement, its best placement."""
    if isinstance(subject, Measurement):
        raise InputError(f"{file} holds a measurement; placer measure --trace draws a measurement")
    if isinstance(subject, Evaluation):
        raise InputError(f"{file} holds an evaluation; pictures are of profiles and placements")
    if isinstance(subject, Progress):
        raise InputError(
            f"{file} holds the progress of a solve; pictures are of its placement when it has ended"
        )
    if isinstance(subject, JointPlacement):
        raise InputError(
            f"{file} holds placements of several models; pictures are of one: save the placement"
            " of a model, found.placements[NAME].to_json()"
        )
    return subject.placement if isinstance(subject, Refinement) else subject


def _drawable(subject: Shown, file: str) -> Profile | Placement | Estimate:
    subject = _placed(subject, file)
    if isinstance(subject, Cluster):
        raise InputError(
            f"{file} holds a cluster; pictures are of profiles, placements and estimates"
        )
    return subject
