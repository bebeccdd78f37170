"""``placer show`` and ``placer compare``: what files hold, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from placer.cli.files import load, load_profile, print_json, print_table, write_text
from placer.cli.options import AsJson
from placer.errors import InputError
from placer.report.comparing import compare as compare_both
from placer.report.comparing import comparison_table
from placer.report.comparison_page import comparison_report
from placer.report.page import html_report
from placer.report.pictures import picture
from placer.schema import Cluster, Placement, PlacementRequest, Profile
from placer.schema.refinement import Refinement


def show(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="a profile, placement, request, refinement or cluster")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a report with pictures, all in one file, too")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="write the picture alone, too")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="of a placement, to show its layers in their devices' colours")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a profile or a placement: tables, and pictures of time and memory by layer and device."""
    subject = load(file)
    if isinstance(subject, PlacementRequest):
        subject = subject.profile
    if html is not None:
        write_text(html, html_report(_placed(subject), None if profile is None else load_profile(profile)))
    if svg is not None:
        write_text(svg, picture(_drawable(subject, file)))
    if json:
        print_json(subject)
    else:
        print_table(subject)


def compare(
    first: Annotated[str, typer.Argument(metavar="FILE", help="a profile or a placement")],
    second: Annotated[str, typer.Argument(metavar="FILE|-", help="another one")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a report with pictures, all in one file, too")
    ] = None,
    json: AsJson = False,
) -> None:
    """Hold two profiles or two placements against each other: time, memory, and what moved."""
    found = compare_both(*(_without_request(load(file)) for file in (first, second)))
    if html is not None:
        write_text(html, comparison_report(found))
    if json:
        print(found.model_dump_json(indent=1))
    else:
        Console().print(comparison_table(found))


def _without_request(subject: object) -> object:
    return subject.profile if isinstance(subject, PlacementRequest) else subject


def _placed(subject: Profile | Placement | Refinement | Cluster) -> Profile | Placement | Cluster:
    """What there are pictures of: of a refinement its best placement."""
    return subject.placement if isinstance(subject, Refinement) else subject


def _drawable(subject: Profile | Placement | Refinement | Cluster, file: str) -> Profile | Placement:
    subject = _placed(subject)
    if isinstance(subject, Cluster):
        raise InputError(f"{file} holds a cluster; pictures are of profiles and placements")
    return subject
