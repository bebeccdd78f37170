"""Errors as problem+json (RFC 9457), at most 4 KB each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from placer.schema import PlacementRequest
from placer.schema.base import read_json
from placer.schema.faults import MAX_TEXT, FieldFault, field_faults
from placer.schema.faults import clip as clip
from placer.schema.faults import nearest as nearest
from placer.schema.faults import wanted as wanted

M = TypeVar("M", bound=BaseModel)

MAX_BYTES = 4096
MAX_FAULTS = 5

# Above this count, faults are counted but not described: a million descriptions take 1 GB.
MANY_FAULTS = 20_000

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """An error response to a request.

    Attributes:
        status: HTTP status.
        name: Kind of problem for programs: the last part of its ``type``.
        title: Kind of problem for people.
        detail: What is wrong with this request, and what to do.
        faults: Invalid places in the body: ``{"pointer": "#/profile", "detail": "..."}``.
        headers: Response headers, such as ``Retry-After`` or ``Allow``.

    Args:
        retry_s: Seconds after which the client may ask again, for ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        name: str,
        title: str,
        detail: str,
        faults: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        retry_s: int | None = None,
    ) -> None:
        sent = {**(headers or {}), **({} if retry_s is None else {"Retry-After": str(retry_s)})}
        super().__init__(status, name, title, detail, list(faults), sent)
        self.status, self.name, self.title, self.detail = status, name, title, detail
        self.faults, self.headers = faults, sent

    # Workers and the validation process return problems, so they must be picklable.
    def __reduce__(self) -> tuple[type[Problem], tuple[Any, ...]]:
        return Problem, self.args

    def content(self) -> bytes:
        """Return the problem as JSON of at most 4 KB."""
        faults = [
            {"pointer": clip(fault["pointer"]), "detail": clip(fault["detail"])}
            for fault in self.faults
        ]
        faults = faults[:MAX_FAULTS]
        detail = clip(self.detail, 3 * MAX_TEXT)
        while len(text := self._encode(detail, faults)) > MAX_BYTES:
            if faults:
                faults.pop()
            else:
                # A character outside ASCII takes six bytes, so clipping once may not suffice.
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
        """Return the HTTP response."""
        return Response(self.content(), self.status, headers=self.headers, media_type=MEDIA_TYPE)


def defect() -> Problem:
    """Return the problem for an error of the service itself."""
    detail = "this is an error of the service, not of the request; see the service's log"
    return Problem(500, "defect", "The service failed", detail)


def no_such(kind: str, detail: str) -> Problem:
    """Return the problem of a ``kind`` of object that does not exist."""
    return Problem(404, f"no-such-{kind}", f"There is no such {kind}", detail)


def invalid_parameter(detail: str, faults: Sequence[Mapping[str, str]] = ()) -> Problem:
    """Return the problem of a query parameter that cannot be used."""
    return Problem(422, "invalid-parameter", "A parameter cannot be used", detail, faults)


def store_away(detail: str) -> Problem:
    """Return the problem of a store that cannot be used at the moment."""
    return Problem(503, "store-away", "The store cannot be used", detail, retry_s=2)


def queue_full(reason: str, seconds: int) -> Problem:
    """Return the problem for a full queue, with the seconds until there may be room."""
    detail = f"{reason}; try again in {seconds} s"
    return Problem(429, "queue-full", "The queue is full", detail, retry_s=seconds)


_OTHER_BODIES = {
    "layers": 'the body is a profile, but a request has the profile as a field: {"profile": ...},'
    " and optional further fields",
    "layer_devices": "the body is a placement, which is the answer to a request: post a request,"
    ' {"profile": ...}, or judge the map of layers by POST /v1/placements:evaluate',
}
"""Hints for a body without a profile, by the field that shows what the body is instead."""


def read_body(kind: type[M], body: bytes, *, strict: bool = True) -> M:
    """Return the object in a body.

    Args:
        kind: Type of the object.
        body: The JSON.
        strict: Whether to reject ``"1"`` as a number.

    Raises:
        Problem: The body is not a ``kind``; the problem names the fault.
    """
    try:
        return read_json(kind, body, strict=strict)
    except ValidationError as error:
        raise invalid_body(error, kind) from None


def invalid_body(error: ValidationError, model: type[BaseModel] = PlacementRequest) -> Problem:
    """Return the problem of a body that is not a ``model``: 400 if it is not JSON, else 422."""
    count = error.error_count()
    if count > MANY_FAULTS:
        return invalid_request(
            f"the body has {count} faults; correct its structure first: see /openapi.json"
        )
    only = error.errors(include_url=False, include_context=False)[0] if count == 1 else None
    if only is not None and only["type"] == "json_invalid":
        detail = f"the body cannot be read as JSON: {only['msg'].removeprefix('Invalid JSON: ')}"
        return Problem(400, "malformed-json", "The body is not JSON", detail)
    if model is PlacementRequest and (other := _other_body(error)):
        return invalid_request(other, [{"pointer": "#/profile", "detail": "is missing"}])
    found, more = field_faults(error, model, MAX_FAULTS)
    faults = [{"pointer": clip(_pointer(fault)), "detail": fault.text} for fault in found]
    path = clip(".".join(clip(str(part), 80) for part in found[0].place))
    detail = f"{path}: {found[0].text}" if path else found[0].text
    return invalid_request(f"{detail} (and {more} more)" if more else detail, faults)


def _other_body(error: ValidationError) -> str:
    """Return a hint at what was sent instead of a PlacementRequest, or "" if that is unknown."""
    found = {
        (fault["type"], fault["loc"])
        for fault in error.errors(include_url=False, include_input=False)
    }
    if ("missing", ("profile",)) not in found:
        return ""
    extra = {place for kind, place in found if kind == "extra_forbidden"}
    return next((hint for field, hint in _OTHER_BODIES.items() if (field,) in extra), "")


def invalid_request(detail: str, faults: Sequence[Mapping[str, str]] = ()) -> Problem:
    """Return the problem of a request that is JSON, but cannot be used."""
    return Problem(422, "invalid-request", "The request cannot be used", detail, faults)


def _pointer(fault: FieldFault) -> str:
    """Return the place as a JSON pointer (RFC 6901), with "~" and "/" escaped as "~0" and "~1"."""
    return "#" + "".join(
        f"/{clip(str(part), 80).replace('~', '~0').replace('/', '~1')}" for part in fault.place
    )
