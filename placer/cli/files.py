"""JSON in and out: files, stdin, stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from placer.errors import InputError
from placer.report.explain import table
from placer.report.refinement import refinement_table
from placer.schema import Cluster, Placement, PlacementRequest, Profile
from placer.schema.refinement import Refinement

Subject = Profile | Placement | PlacementRequest | Refinement | Cluster
"""What a file may hold."""


def emit(subject: Profile | Placement | Refinement, output: str | None, as_json: bool) -> None:
    """JSON to where it was asked for or to a pipe; a table to a terminal."""
    if output is not None and output != "-":
        write_text(Path(output), subject.to_json() + "\n")
    if as_json or output == "-" or (output is None and not sys.stdout.isatty()):
        print_json(subject)
    elif sys.stdout.isatty():
        print_table(subject)


def write_text(path: Path, text: str) -> None:
    """Write a file, or say why it cannot be."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def print_table(subject: Profile | Placement | Refinement | Cluster) -> None:
    """For people."""
    Console().print(refinement_table(subject) if isinstance(subject, Refinement) else table(subject))


def print_json(subject: Profile | Placement | Refinement | Cluster) -> None:
    """As JSON on stdout."""
    print(subject.model_dump_json(indent=1) if isinstance(subject, Cluster) else subject.to_json())


def read(file: str) -> str:
    """The text of a file, or of stdin for ``-``."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {getattr(error, 'strerror', error)}") from error


def load(file: str) -> Subject:
    """What a JSON file holds, told by its fields."""
    text = read(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{'stdin' if file == '-' else file} is not JSON: {error}") from error
    fields: Any = content if isinstance(content, dict) else {}
    kinds: dict[str, type[Subject]] = {
        "rounds": Refinement,
        "profile": PlacementRequest,
        "status": Placement,
        "layers": Profile,
        "devices": Cluster,
    }
    for field, kind in kinds.items():
        if field in fields:
            return kind.model_validate(content)
    raise InputError(f"{file} holds no profile, placement, request, refinement or cluster")


def load_placement(file: str) -> Placement:
    """The placement in a file; the best one of a refinement."""
    found = load(file)
    if isinstance(found, Refinement):
        return found.placement
    if not isinstance(found, Placement):
        raise InputError(f"{file} holds a {type(found).__name__.lower()}; a placement is needed")
    return found
