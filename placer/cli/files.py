"""JSON in and out: files, stdin, stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from placer.errors import InputError
from placer.report.explain import table
from placer.schema import Cluster, Placement, PlacementRequest, Profile


def emit(subject: Profile | Placement, output: str | None, as_json: bool) -> None:
    """JSON to where it was asked for or to a pipe; a table to a terminal."""
    if output is not None and output != "-":
        try:
            Path(output).write_text(subject.to_json() + "\n")
        except OSError as error:
            raise InputError(f"cannot write {output}: {error.strerror}") from error
    if as_json or output == "-" or (output is None and not sys.stdout.isatty()):
        print_json(subject)
    elif sys.stdout.isatty():
        Console().print(table(subject))


def print_json(subject: Profile | Placement | Cluster) -> None:
    """As JSON on stdout."""
    print(subject.model_dump_json(indent=1) if isinstance(subject, Cluster) else subject.to_json())


def read(file: str) -> str:
    """The text of a file, or of stdin for ``-``."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {getattr(error, 'strerror', error)}") from error


def load(file: str) -> Profile | Placement | PlacementRequest | Cluster:
    """What a JSON file holds, told by its fields."""
    text = read(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    fields: Any = content if isinstance(content, dict) else {}
    kinds: dict[str, type[Profile | Placement | PlacementRequest | Cluster]] = {
        "profile": PlacementRequest,
        "status": Placement,
        "layers": Profile,
        "devices": Cluster,
    }
    for field, kind in kinds.items():
        if field in fields:
            return kind.model_validate(content)
    raise InputError(f"{file} holds no profile, placement, request or cluster")
