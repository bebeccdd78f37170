"""JSON in and out: files, stdin, stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from placer.errors import InputError
from placer.report.evaluation import evaluation_table
from placer.report.explain import table
from placer.report.joint import joint_table
from placer.report.refinement import refinement_table
from placer.report.timeline import Measurement
from placer.schema import (
    Cluster,
    Estimate,
    Evaluation,
    LayerMap,
    Placement,
    PlacementRequest,
    Profile,
    Progress,
)
from placer.schema.base import Wire
from placer.schema.joint import JointPlacement
from placer.schema.refinement import Refinement
from placer.utils.atomic_files import write_whole

WIDTH = 200
"""Characters of a line without a terminal; the widest table fits."""

Answer = Profile | Placement | JointPlacement | Refinement | Measurement | Evaluation | Estimate
"""The result of a command."""

Subject = Answer | PlacementRequest | Cluster
"""The content of a file."""

KINDS: dict[str, type[Wire]] = {
    "weights_only": Estimate,
    "placements": JointPlacement,
    "rounds": Refinement,
    "faults": Evaluation,
    "elapsed_s": Progress,
    "profile": PlacementRequest,
    "status": Placement,
    "layers": Profile,
    "devices": Cluster,
}
"""The type of a file, by the first of these fields that it has."""

PROBLEM_TYPE = "urn:placer:problem:"
"""The start of the ``type`` of the service's error responses."""


def emit(subject: Answer, output: str | None, as_json: bool) -> None:
    """Write JSON to the file that was named or to a pipe, and a table to a terminal."""
    if output is not None and output != "-":
        try:
            write_text(Path(output), subject.to_json() + "\n")
        except InputError:
            # A result of minutes must not be lost with a full disk.
            print_json(subject)
            raise
    if as_json or output == "-" or (output is None and not sys.stdout.isatty()):
        print_json(subject)
    elif sys.stdout.isatty():
        print_table(subject)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an InputError with the reason if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file."""
    with writing(path):
        write_whole(path, text)


def people() -> Console:
    """Return the console for tables.

    Pipes and files do not wrap lines, so tables there have their full width.
    """
    is_own_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    # names of layers may look like markup or emoji
    return Console(width=None if is_own_width else WIDTH, markup=False, emoji=False)


def print_table(subject: Answer | Cluster | Progress) -> None:
    """Print a table for people."""
    if isinstance(subject, Measurement):
        people().print(subject)
    elif isinstance(subject, Evaluation):
        people().print(evaluation_table(subject), crop=False)
    elif isinstance(subject, Progress):
        people().print(_progress_text(subject))
    elif isinstance(subject, JointPlacement):
        people().print(joint_table(subject), crop=False)
    elif isinstance(subject, Refinement):
        people().print(refinement_table(subject))
    else:
        people().print(table(subject))


def _progress_text(progress: Progress) -> str:
    """Return a line about a solve that has not ended."""
    state = f"solve {progress.id} is {progress.status} after {progress.elapsed_s:g} s"
    if progress.incumbent is None:
        return f"{state}; no placement is known so far"
    bound = "none" if progress.bound is None else f"{progress.bound:g}"
    gap = "" if progress.gap is None else f", gap {progress.gap:.2%}"
    return f"{state}; best objective so far {progress.incumbent:g}, bound {bound}{gap}"


def print_json(subject: Answer | Cluster | Progress) -> None:
    """Print JSON on stdout."""
    if isinstance(subject, Cluster | Progress):
        print(subject.model_dump_json(indent=1))
    else:
        print(subject.to_json())


def read(file: str) -> str:
    """Return the text of a file, or of stdin for ``-``."""
    try:
        text = _read_stdin() if file == "-" else Path(file).read_text(encoding="utf-8")
        # Editors on Windows begin a file with this mark.
        return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {_named(file)}: {getattr(error, 'strerror', error)}"
        ) from error


def _read_stdin() -> str:
    if sys.stdin.closed:
        raise InputError("- is given twice, but stdin holds one input; name a file for the other")
    with sys.stdin:
        return sys.stdin.read()


def load(file: str) -> Subject:
    """Return the content of a JSON file; its fields decide the type.

    Raises:
        InputError: the file has no such content, or the progress of a solve that has not ended.
    """
    found = load_any(file)
    if isinstance(found, Progress):
        raise InputError(
            f"{_named(file)} holds the progress of solve {found.id}, which is {found.status}, and"
            " no placement; ask the service for its placement again when it has ended"
        )
    return found


def load_any(file: str) -> Subject | Progress:
    """Return the content of a JSON file, including the progress of a solve on a service."""
    text = read(file)
    return _typed(_json(text, file), text, file)


def load_map(file: str) -> Placement | LayerMap | dict[str, str]:
    """Return the placement in a file, the map with replicas, or an object from layer to device.

    Raises:
        InputError: the file has none of them.
    """
    text = read(file)
    content = _json(text, file)
    # a layer may be named layer_devices, too
    where = content.get("layer_devices") if isinstance(content, dict) else None
    if isinstance(where, dict) and content.keys() <= LayerMap.model_fields.keys():
        with _blamed(file):
            return LayerMap.model_validate(content)
    if isinstance(content, dict) and all(isinstance(value, str) for value in content.values()):
        return content
    found = _typed(content, text, file)
    if isinstance(found, Refinement):
        return found.placement
    if not isinstance(found, Placement):
        raise _unwanted(file, found, "a placement, or an object from layer to device,")
    return found


def _json(text: str, file: str) -> Any:
    """Return the decoded text of a file."""
    if not text.strip():
        raise InputError(f"{_named(file)} is empty; give JSON, such as a profile or a placement")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{_named(file)} is not JSON: {error}; give a file that a command of placer wrote "
            "with -o"
        ) from error


def _typed(content: Any, text: str, file: str) -> Subject | Progress:
    """Return the decoded content of a file as the type that its fields show."""
    fields: Any = content if isinstance(content, dict) else {}
    if str(fields.get("type", "")).startswith(PROBLEM_TYPE):
        raise InputError(
            f"{_named(file)} holds an error of the service: {fields.get('detail', 'no details')}"
        )
    with _blamed(file):
        if "measured" in fields:
            return Measurement.from_json(text)
        for field, kind in KINDS.items():
            if field in fields:
                return cast(Subject | Progress, kind.model_validate(content))
    raise InputError(
        f"{_named(file)} holds no profile, placement, request, refinement, cluster, measurement,"
        " evaluation or estimate; give a file that a command of placer wrote with -o"
    )


@contextmanager
def _blamed(file: str) -> Iterator[None]:
    """Add the name of the file to an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{_named(file)}: {error}") from error


def load_placement(file: str) -> Placement:
    """Return the placement in a file; of a refinement, the best one."""
    found = load(file)
    if isinstance(found, Refinement):
        return found.placement
    if not isinstance(found, Placement):
        raise _unwanted(file, found, "a placement")
    return found


def load_profile(file: str) -> Profile:
    """Return the profile in a file, or the profile of a request."""
    found = load_question(file, "a profile")
    return found.profile if isinstance(found, PlacementRequest) else found


def load_question(file: str, wanted: str = "a profile or a request") -> Profile | PlacementRequest:
    """Return the profile or the request in a file."""
    found = load(file)
    if not isinstance(found, Profile | PlacementRequest):
        raise _unwanted(file, found, wanted)
    return found


def load_cluster(file: str) -> Cluster:
    """Return the cluster in a file, or the cluster of a profile or a request."""
    found = load(file)
    if isinstance(found, PlacementRequest):
        found = found.placed_on
    elif isinstance(found, Profile) and found.cluster is not None:
        found = found.cluster
    if not isinstance(found, Cluster):
        raise _unwanted(file, found, "a cluster")
    return found


def _unwanted(file: str, found: Subject | Progress, wanted: str) -> InputError:
    kind = type(found).__name__.removeprefix("Placement").lower() or "placement"
    article = "an" if isinstance(found, Evaluation) else "a"
    return InputError(f"{_named(file)} holds {article} {kind}; {wanted} is needed")


def _named(file: str) -> str:
    return "stdin" if file == "-" else file
