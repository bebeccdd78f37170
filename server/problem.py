"""Errors as problem+json (RFC 9457), at most 4 KB whatever was sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from placer.schema import PlacementRequest

MAX_BYTES = 4096
MAX_FAULTS = 5
MAX_TEXT = 400
MANY_FAULTS = 20_000
"""More faults than this are counted, not described: describing a million takes a gigabyte."""

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """A request that cannot be answered, and what the client is told about it.

    Attributes:
        status: the HTTP status.
        name: of the kind of problem, for programs: the end of its ``type``.
        title: the kind of problem, for people.
        detail: what is wrong with this request, and the way out.
        faults: where in the body it is wrong: ``{"pointer": "#/profile", "detail": "..."}``.
        headers: sent along: ``Retry-After``, ``Allow``.
    """

    def __init__(
        self,
        status: int,
        name: str,
        title: str,
        detail: str,
        faults: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, name, title, detail, list(faults), dict(headers or {}))
        self.status = status
        self.name = name
        self.title = title
        self.detail = detail
        self.faults = faults
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[type[Problem], tuple[Any, ...]]:
        return Problem, self.args

    def content(self) -> bytes:
        """The problem as JSON of at most 4 KB."""
        faults = [{"pointer": clip(fault["pointer"]), "detail": clip(fault["detail"])} for fault in self.faults]
        faults = faults[:MAX_FAULTS]
        detail = clip(self.detail, 3 * MAX_TEXT)
        while len(text := self._encode(detail, faults)) > MAX_BYTES:
            if faults:
                faults.pop()
            else:  # text outside ASCII takes six bytes a character
                detail = clip(detail, max(1, len(detail) // 2))
        return text

    def _encode(self, detail: str, faults: list[dict[str, str]]) -> bytes:
        content: dict[str, Any] = {
            "type": f"urn:placer:problem:{self.name}",
            "title": self.title,
            "status": self.status,
            "detail": detail,
        }
        if faults:
            content["errors"] = faults
        return json.dumps(content).encode()

    def response(self) -> Response:
        """The HTTP response that tells it."""
        return Response(self.content(), self.status, headers=self.headers, media_type=MEDIA_TYPE)


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """The text, its middle left out where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    head, tail = (2 * limit) // 3, limit // 3
    return f"{text[:head]} ... {text[-tail:] if tail else ''}"


def invalid_body(error: ValidationError, model: type[BaseModel] = PlacementRequest) -> Problem:
    """The problem of a body that is no ``model``: 400 where it is no JSON, else 422."""
    count = error.error_count()
    if count > MANY_FAULTS:
        return _invalid(f"the body has {count} faults; the first thing to mend is its shape: see /openapi.json", [])
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        detail = first["msg"].removeprefix("Invalid JSON: ")
        return Problem(400, "malformed-json", "The body is not JSON", f"the body cannot be read as JSON: {detail}")
    errors = [item for item in errors if not _follows(item, errors)]
    errors.sort(key=_by_what_they_explain)
    faults = [_fault(item["loc"], item["type"], item["msg"], item["input"], model) for item in errors[:MAX_FAULTS]]
    lead = faults[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _invalid(f"{_path(lead['pointer'])}{lead['detail']}{more}", faults)


def _by_what_they_explain(error: ErrorDetails) -> int:
    """A wrong version explains all the others, a misspelt name a missing one."""
    if error["loc"] == ("schema_version",):
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _follows(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Whether it only follows from another: a list is too short because its elements are faulty."""
    place = error["loc"]
    return error["type"] == "too_short" and any(
        other is not error and other["loc"][: len(place)] == place for other in errors
    )


def _invalid(detail: str, faults: list[dict[str, str]]) -> Problem:
    return Problem(422, "invalid-request", "The request cannot be used", detail, faults)


def _fault(
    loc: tuple[int | str, ...], kind: str, message: str, given: object, model: type[BaseModel]
) -> dict[str, str]:
    message = message.removeprefix("Value error, ").removeprefix("Input ").replace("Tuple should", "should")
    message = message.replace(" after validation", "")
    loc = tuple(part for part in loc if not str(part).startswith("constrained-"))  # the branch of a union
    pointer = "#" + "".join(f"/{clip(str(part), 80)}" for part in loc)
    if kind == "missing":
        message = "is missing"
    elif kind == "extra_forbidden":
        message = f"there is no such field{nearest(str(loc[-1]), fields_at(model, loc[:-1]))}"
    elif loc and loc[-1] == "schema_version" and kind == "literal_error":
        message = f"version {clip(repr(given), 40)} is not known to this service; it reads version '1'"
    elif kind not in ("value_error", "missing") and isinstance(given, (str, int, float, bool, type(None))):
        message = f"{message}, not {clip(_shown(given), 60)}"
    return {"pointer": clip(pointer), "detail": clip(message)}


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint at the known name that is most like the given one, or at all of them if none is."""
    names = list(known)
    if found := get_close_matches(given[:200], names, 1, 0.5):
        return f"; did you mean {found[0]!r}?"
    return f"; there are {', '.join(map(repr, names))}" if names else ""


def fields_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """The names of the fields at a place in a body."""
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


def _path(pointer: str) -> str:
    path = pointer.removeprefix("#/").removeprefix("#").replace("/", ".")
    return f"{path}: " if path else ""
