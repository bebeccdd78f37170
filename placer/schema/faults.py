"""What is wrong with values that a type does not take, in the user's words: the place, the value and the way out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

MAX_TEXT = 400

_HINTS = 8
"""So many known names are told where none is like the given one."""

_COMPARED = 2_000
"""So many known names are compared with one; a request may have fifty times as many."""

Place = tuple[int | str, ...]
"""Names of fields and numbers of elements, from the outermost on."""


class FieldFault(NamedTuple):
    """A value that is not taken, or is missing."""

    place: Place
    text: str


def field_faults(error: ValidationError, model: type[BaseModel], most: int) -> tuple[list[FieldFault], int]:
    """What was found wrong, what explains the rest first; and how many more there are than that one.

    Args:
        error: from validating a ``model``.
        model: tells which fields there are.
        most: so many faults are described.
    """
    errors = error.errors(include_url=False, include_context=False)
    errors = [one for one in errors if not _follows(one, errors)]
    errors.sort(key=_by_what_they_explain)
    return [_described(one, model) for one in errors[:most]], len(errors) - 1


def first_fault(error: ValidationError, model: type[BaseModel]) -> str:
    """What explains most, in a line: ``Constraints.pined: there is no such field; did you mean 'pinned'?``.

    Args:
        error: from validating a ``model``.
        model: tells which fields there are.
    """
    ((place, text),), more = field_faults(error, model, 1)
    path = ".".join([model.__name__.lstrip("_"), *(clip(str(part), 80) for part in place)])
    return f"{path}: {text}" + (f" (and {more} more)" if more else "")


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint at the known name that is most like the given one, or at the first of them if none is."""
    names = list(islice(known, _COMPARED))
    if found := get_close_matches(given[:200], names, 1, 0.5):
        return f"; did you mean {found[0]!r}?"
    more = ", and others" if len(names) > _HINTS else ""
    return f"; there are {', '.join(map(repr, names[:_HINTS]))}{more}" if names else ""


def wanted(message: str) -> str:
    """What a value should be, from pydantic's message: ``should be a valid integer``."""
    text = message.removeprefix("Value error, ").removeprefix("Input ").replace("Tuple should", "should")
    return text.replace(" after validation", "").partition(", unable to parse")[0]


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """The text, its middle left out where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    head, tail = (2 * limit) // 3, limit // 3
    return f"{text[:head]} ... {text[-tail:] if tail else ''}"


def _by_what_they_explain(error: ErrorDetails) -> int:
    """A wrong version explains all the others, a misspelt name a missing one."""
    if error["loc"] == ("schema_version",):
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _follows(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Whether it only follows from another.

    A list is too short because its elements are faulty, or a value is taken further by another branch of a union.
    """
    place = error["loc"]
    if error["type"] == "too_short":
        return any(other is not error and other["loc"][: len(place)] == place for other in errors)
    if not place or not _is_branch(place[-1]):
        return False
    return any(len(other["loc"]) > len(place) and other["loc"][: len(place) - 1] == place[:-1] for other in errors)


def _is_branch(part: int | str) -> bool:
    """Whether it is pydantic's name of a branch of a union, which is no place."""
    return str(part).startswith(("constrained-", "literal[", "function-"))


def _described(error: ErrorDetails, model: type[BaseModel]) -> FieldFault:
    kind, given, text = error["type"], error["input"], wanted(error["msg"])
    place = tuple(part for part in error["loc"] if not _is_branch(part))
    if kind == "missing":
        text = "is missing"
    elif kind == "json_invalid":
        text = f"should be JSON, not {clip(repr(given[:100]), 60)}: {text.removeprefix('Invalid JSON: ')}"
    elif kind == "extra_forbidden":
        text = f"there is no such field{nearest(str(place[-1]), _fields_at(model, place[:-1]))}"
    elif place and place[-1] == "schema_version" and kind == "literal_error":
        text = f"version {clip(repr(given), 40)} is not known here; this Placer reads version '1'"
    elif kind != "value_error" and isinstance(given, (str, int, float, bool, type(None))):
        text = f"{text}, not {clip(_shown(given), 60)}"
    return FieldFault(place, clip(text))


def _fields_at(model: type[BaseModel], place: Place) -> list[str]:
    """The names of the fields at a place in a model."""
    here: Any = model
    for part in place:
        found = _models(here.model_fields[part].annotation) if part in here.model_fields else [here]
        if not found:
            return []
        here = found[0]
    return list(here.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type: of ``tuple[Layer, ...] | None``, Layer."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _shown(given: str | int | float | bool | None) -> str:
    return json.dumps(given) if not isinstance(given, str) else repr(given[:100])
