"""Validation errors in the user's terms: the field, the value and the remedy.

Pydantic locates an error by names and indices, mixed with labels of its own: branches of a union,
and ``[key]`` for a dictionary key. Users may have chosen the same texts as names. So a location is
read along the type: only where the type has a union is the next part a label.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from placer.schema.versions import RENAMED, SCHEMA_VERSION, VERSIONS

MAX_TEXT = 400

# Number of known names to list if none is similar.
_HINTS = 8

# Number of known names to compare; a request may have fifty times as many.
_COMPARED = 2_000

Place = tuple[int | str, ...]
"""Names of fields and indices of elements, outermost first."""


# Pydantic's last part of the location of a dictionary key.
_KEY = "[key]"


class FieldFault(NamedTuple):
    """An invalid or missing value."""

    place: Place
    text: str


class _Location(NamedTuple):
    """A location of pydantic, read along the type.

    Attributes:
        place: its names and indices.
        labels: the positions of branch labels in it.
        is_key: whether it refers to a dictionary key.
        known: the existing field names, if it ends at an unknown field.
    """

    place: Place = ()
    labels: frozenset[int] = frozenset()
    is_key: bool = False
    known: tuple[str, ...] = ()

    def below(self, part: int | str) -> _Location:
        """Return the location with a name or index in front."""
        return self._replace(
            place=(part, *self.place), labels=frozenset(one + 1 for one in self.labels)
        )

    def behind_label(self) -> _Location:
        """Return the location with a branch label in front."""
        return self._replace(labels=frozenset({0, *(one + 1 for one in self.labels)}))


class _Error(NamedTuple):
    """An error with its location."""

    details: ErrorDetails
    at: _Location


def field_faults(
    error: ValidationError, model: type[BaseModel], most: int
) -> tuple[list[FieldFault], int]:
    """Return ``most`` faults, most explanatory first, and the number of faults beyond the first."""
    schema = model.__pydantic_core_schema__
    errors = [
        _Error(details, _location_of(details, schema))
        for details in error.errors(include_url=False, include_context=False)
    ]
    # pydantic reports every branch of a union: drop errors that only follow from others
    errors = [one for one in errors if not _follows(one, errors)]
    errors.sort(key=_by_what_they_explain)
    return [_described(one) for one in errors[:most]], len(errors) - 1


def first_fault(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the most explanatory fault as one line.

    For example: ``Constraints.pined: there is no such field; did you mean 'pinned'?``.
    """
    ((place, text),), more = field_faults(error, model, 1)
    path = ".".join([model.__name__.lstrip("_"), *(clip(str(part), 80) for part in place)])
    return f"{path}: {text}" + (f" (and {more} more)" if more else "")


def nearest(given: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name, or at the first few names."""
    names = list(islice(known, _COMPARED))
    if hint := similar(given, names):
        return hint
    more = ", and others" if len(names) > _HINTS else ""
    there = "there is only" if len(names) == 1 else "there are"
    return f"; {there} {', '.join(map(repr, names[:_HINTS]))}{more}" if names else ""


def similar(given: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name; an empty text if none is similar."""
    # bounded, because comparing 100,000 names would take seconds
    found = get_close_matches(given[:200], islice(known, _COMPARED), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def wanted(message: str) -> str:
    """Return the requirement in pydantic's message: ``should be a valid integer``."""
    text = message.removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
    text = text.replace("Tuple should", "should").replace("Dictionary should", "should")
    return text.replace(" after validation", "").partition(", unable to parse")[0]


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return the text, with its middle left out if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    head, tail = (2 * limit) // 3, limit // 3
    return f"{text[:head]} ... {text[-tail:] if tail else ''}"


def _by_what_they_explain(error: _Error) -> int:
    """Return an error's rank: versions explain all others, misspelt names explain missing ones."""
    if error.at.place == ("schema_version",):
        return 0
    return 1 if error.details["type"] == "extra_forbidden" else 2


def _follows(error: _Error, errors: Sequence[_Error]) -> bool:
    """Return whether an error is only a consequence of another one.

    A list is too short because its elements are invalid, or another branch of a union matches
    further.
    """
    loc = error.details["loc"]
    others = [other.details["loc"] for other in errors if other is not error]
    if error.details["type"] == "too_short":
        return any(other[: len(loc)] == loc for other in others)
    if len(loc) - 1 not in error.at.labels:
        return False
    return any(len(other) > len(loc) and other[: len(loc) - 1] == loc[:-1] for other in others)


def _location_of(details: ErrorDetails, schema: Mapping[str, Any]) -> _Location:
    """Return the location of an error in a type."""
    found = _located(schema, details["loc"], {}) or _Location(details["loc"])
    if found.known and details["type"] != "extra_forbidden":
        # the key of a dictionary of objects, which was read as an unknown field of the object
        return found._replace(place=found.place[:-1], is_key=True, known=())
    return found


def _located(schema: Mapping[str, Any], loc: Place, known: Mapping[str, Any]) -> _Location | None:
    """Return the location read along a type; None if the type has no such location.

    Args:
        schema: the type, as pydantic-core describes it.
        loc: the location.
        known: referenced type definitions, by reference.
    """
    kind = schema["type"]
    # pydantic-core nests schemas: unwrap references and unions until fields or items appear
    if kind == "definitions":
        return _located(schema["schema"], loc, {one["ref"]: one for one in schema["definitions"]})
    if kind == "definition-ref":
        return _located(known[schema["schema_ref"]], loc, known)
    if kind == "union" and loc:
        # the location begins with a branch's label; a branch may be a (type, label) pair
        branches = (one[0] if isinstance(one, tuple) else one for one in schema["choices"])
        found = (_located(branch, loc[1:], known) for branch in branches)
        return next((one.behind_label() for one in found if one is not None), None)
    # a model, a default, a validator around a type, or a nullable type
    if "schema" in schema:
        return _located(schema["schema"], loc, known)
    return _located_in(schema, loc[0], loc[1:], known) if loc else _Location()


def _located_in(
    schema: Mapping[str, Any], part: int | str, rest: Place, known: Mapping[str, Any]
) -> _Location | None:
    """Return the location of a part of an object, a dictionary or a list, and what is inside it."""
    kind, inside = schema["type"], None
    if kind == "model-fields":
        if part not in schema["fields"]:
            return _Location((part,), known=tuple(schema["fields"])) if not rest else None
        inside = _located(schema["fields"][part]["schema"], rest, known)
    elif kind == "dict":
        values = schema.get("values_schema")
        inside = _Location(rest) if values is None else _located(values, rest, known)
        if inside is None and rest == (_KEY,):
            inside = _Location(is_key=True)
    elif kind in ("tuple", "list") and isinstance(part, int):
        items = schema.get("items_schema", {"type": "any"})
        item = items if isinstance(items, Mapping) else items[min(part, len(items) - 1)]
        inside = _located(item, rest, known)
    return None if inside is None else inside.below(part)


def _described(error: _Error) -> FieldFault:
    details, place = error.details, error.at.place
    kind, given, text = details["type"], details["input"], wanted(details["msg"])
    if kind == "missing":
        text = "is missing"
    elif kind == "json_invalid":
        text = (
            f"should be JSON, not {clip(repr(given[:100]), 60)}: "
            f"{text.removeprefix('Invalid JSON: ')}"
        )
    elif kind == "extra_forbidden":
        text = f"there is no such field{nearest(str(place[-1]), error.at.known)}"
    elif place and place[-1] == "schema_version" and kind == "literal_error":
        text = _version_fault(given)
    elif kind != "value_error" and isinstance(given, (str, int, float, bool, type(None))):
        text = f"{text}, not {clip(_shown(given), 60)}"
    return FieldFault(place, clip(f"its name {text}" if error.at.is_key else text))


def _version_fault(given: Any) -> str:
    if isinstance(given, str) and given in RENAMED:
        # the readers upgrade an older version before they validate it
        return (
            f"{given!r} is an older version; model_validate and model_validate_json upgrade it, "
            f"and the constructor takes {SCHEMA_VERSION!r}"
        )
    *older, current = map(repr, VERSIONS)
    known = f"{', '.join(older)} and {current}"
    return (
        f"version {clip(repr(given), 40)} is not known here; this Placer reads versions {known}: "
        "upgrade Placer, or write one of these"
    )


def _shown(given: str | int | float | bool | None) -> str:
    return json.dumps(given) if not isinstance(given, str) else repr(given[:100])
