"""Versions of the wire types, and the reader of older ones.

    JSON ──▶ validate ──▶ object
                │ invalid
                ▼
             upgrade ──▶ validate ──▶ object

JSON of the current version is validated at once, so it costs nothing that there are older versions.
If it is invalid, older objects in it are upgraded along the type, and it is validated again.

The version of an object is its own ``schema_version``, or else the version of the object around it.
Requests hold profiles, so one JSON text may have objects of several versions. Without any version,
JSON that is invalid today is read as version 1.

A new field, even with a default, raises the version, so that older readers refuse it by its version
and not by its name. A version that renames nothing has an empty table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

SCHEMA_VERSION: Literal["3"] = "3"
"""Version of every wire type that is written; readers also accept the versions of ``RENAMED``."""

T = TypeVar("T")
C = TypeVar("C")


class Renames(NamedTuple):
    """The fields and values of a type that the next version renames.

    Attributes:
        fields: the new name of each field, by the old one.
        values: by the new name of a field, the new text of each value, by the old one.
    """

    fields: Mapping[str, str] = {}
    values: Mapping[str, Mapping[str, str]] = {}


_STEP_KINDS = {"alone": "isolated", "in-a-row": "steady-state"}
_MISSING = {"short_bytes": "missing_bytes"}
_RATIO = {"optimizer_step_share": "optimizer_workspace_ratio"}
_WEIGHT_GRAD = {"weights_ms": "weight_grad_ms"}

RENAMED: Mapping[str, Mapping[str, Renames]] = {
    "1": {
        # requests
        "SolveOptions": Renames({"steps": "step_kind"}, {"step_kind": _STEP_KINDS}),
        # profiles
        "Profile": Renames(_RATIO),
        "Layer": Renames(
            _WEIGHT_GRAD
            | {
                "pass_workspace_bytes": "recorded_workspace_bytes",
                "input_workspace_bytes": "input_grad_workspace_bytes",
                "weights_workspace_bytes": "weight_grad_workspace_bytes",
            }
        ),
        "Edge": Renames({"rest_bytes": "retained_bytes", "rest_until": "retained_until"}),
        "Link": Renames(
            {"both_ways": "bidirectional", "both_ways_computing": "bidirectional_computing"}
        ),
        "GraphState": Renames({"trained": "requires_grad"}),
        # placements
        "Placement": Renames(_RATIO | {"ties": "tie_breaks", "through_host": "links_through_host"}),
        "Step": Renames(
            {"steps": "kind", "alone_ms": "isolated_ms", "in_a_row_ms": "steady_state_ms"},
            {"kind": _STEP_KINDS},
        ),
        "TieBreaks": Renames({"spread_ms": "imbalance_ms"}),
        "Limits": Renames(
            {"what": "detail", "helps": "improvements"}, {"kind": {"work": "compute"}}
        ),
        "SingleDevice": Renames(_MISSING),
        "Infeasibility": Renames(_MISSING | {"smallest": "minimal"}),
        # judgements and refinements
        "Fault": Renames(_MISSING),
        "StageTime": Renames(_WEIGHT_GRAD),
        "Refinement": Renames(
            {"ended": "stop_reason"},
            {"stop_reason": {"settled": "converged", "rounds": "max-rounds"}},
        ),
    },
    # Version 3 adds resting weights, repeats of edges and experts, and renames nothing.
    "2": {},
}
"""By version and by type (of today's name, or a base class): what the next version renames."""

VERSIONS = (*RENAMED, SCHEMA_VERSION)
"""The versions that can be read, oldest first."""

# Every text of an older version has one of these. Without any, an invalid text of up to 16 MiB is
# not decoded again, only to find nothing older in it.
_MARKS = tuple(
    f'"{mark}"'.encode()
    for mark in {*RENAMED}.union(
        *(renames.fields for table in RENAMED.values() for renames in table.values())
    )
)

# the first field of an object; long texts are not searched for a later one
_VERSION = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*"(\w+)"')


def validated(validate: Callable[[C], T], content: C, upgrade: Callable[[C], C]) -> T:
    """Return the object in ``content``, of the current or an older version.

    Args:
        validate: makes the object; raises pydantic's ValidationError.
        content: JSON, as text or decoded.
        upgrade: returns the content in the current version; unchanged if it is not older.

    Raises:
        ValidationError: the content is invalid in its version.
    """
    try:
        return validate(content)
    except ValidationError:
        current = upgrade(content)
        if current is content:
            raise
    return validate(current)


def upgraded(content: Any, kind: type[BaseModel]) -> Any:
    """Return decoded JSON in the current version; the same object if nothing in it is older.

    Args:
        content: decoded JSON of ``kind``, possibly invalid; it stays unchanged.
        kind: the type.
    """
    current = _upgraded(content, kind, VERSIONS[0])
    return content if current == content else current


def upgraded_json(text: str | bytes | bytearray, kind: type[BaseModel]) -> Any:
    """Return JSON in the current version; the same text if nothing in it is older."""
    if not isinstance(text, str | bytes | bytearray):
        return text  # validation says that it is not JSON
    try:
        encoded = text.encode() if isinstance(text, str) else text
        if not any(mark in encoded for mark in _MARKS):
            return text
        content = from_json(encoded)
        current = upgraded(content, kind)
        return text if current is content else json.dumps(current).encode()
    except (ValueError, RecursionError):
        # not JSON, or too large a number to write: validation says what is wrong with it
        return text


def stored_json(text: bytes, kind: type[BaseModel]) -> bytes:
    """Return JSON from a store in the current version, without decoding it if it is current.

    Args:
        text: JSON of ``kind``, which begins with its version if it has one.
        kind: the type.
    """
    version = _VERSION.match(text)
    if version is not None and version[1] == SCHEMA_VERSION.encode():
        return text
    current: bytes = upgraded_json(text, kind)
    return current


def _upgraded(content: Any, kind: Any, version: str) -> Any:
    """Return decoded JSON of any annotated type, ``version`` being the version around it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _upgraded(content, args[0], version)
    if origin in (Union, UnionType):
        # at most one branch is an object or a list of objects; the others change nothing
        for branch in args:
            content = _upgraded(content, branch, version)
    elif isinstance(content, list | tuple) and origin in (list, tuple) and args:
        return [_upgraded(item, args[0], version) for item in content]
    elif isinstance(content, dict) and origin is dict:
        return {name: _upgraded(value, args[1], version) for name, value in content.items()}
    elif isinstance(content, dict) and _is_model(kind):
        return _upgraded_object(content, kind, version)
    return content


def _upgraded_object(
    content: dict[str, Any], kind: type[BaseModel], version: str
) -> dict[str, Any]:
    given = content.get("schema_version", version)
    current, reached = content, given
    while isinstance(reached, str) and (table := RENAMED.get(reached)) is not None:
        for renames in (table[one.__name__] for one in kind.__mro__ if one.__name__ in table):
            current = _renamed(current, renames)
        reached = str(int(reached) + 1)
    if reached != given and "schema_version" in current:
        current = current | {"schema_version": reached}
    inner = {
        name: _upgraded(current[name], annotation, given)
        for name, annotation in _fields_with_objects(kind)
        if name in current
    }
    return current | inner if inner else current


def _renamed(content: dict[str, Any], renames: Renames) -> dict[str, Any]:
    # if both names are given, the old one stays and is refused as unknown
    named = {
        name if (new := renames.fields.get(name, name)) in content else new: value
        for name, value in content.items()
    }
    for name, values in renames.values.items():
        given = named.get(name)
        if isinstance(given, str) and given in values:
            named[name] = values[given]
    return named


@cache
def _fields_with_objects(kind: type[BaseModel]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a type that may hold objects, with their annotations.

    A profile has up to 100,000 layers with a dozen fields each, none of which holds objects.
    """
    return tuple(
        (name, field.annotation)
        for name, field in kind.model_fields.items()
        if any(_is_model(part) for part in _parts(field.annotation))
    )


def _parts(kind: Any) -> Iterator[Any]:
    """Yield an annotation and all annotations within it."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
