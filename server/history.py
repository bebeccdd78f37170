"""The paths that read the store: lists of placements, their requests, and profiles."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from placer.schema import Objective, PlacementRequest, Profile, Status

from .problem import Problem, clip
from .replies import json_reply
from .service import Serving, checked_id

router = APIRouter()

NEWEST = 2**62
_CURSOR = re.compile(r"[0-9a-f]{1,15}")

Limit = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
Cursor = Annotated[str | None, Query(max_length=100, description="Where to go on: `next` of the answer before.")]
Text = Annotated[str, Query(max_length=200, description="What the model's name or the id must contain.")]


class Summary(BaseModel):
    """A placement in a list.

    Attributes:
        id: of the placement.
        profile_id: of its profile, for ``/v1/profiles/{id}``; null where it is not kept.
        complete: whether the solver had all its time.
        version: of the Placer that made it.
        created_s: when, in seconds since 1970.
    """

    id: str
    profile_id: str | None
    complete: bool
    version: str
    created_s: float
    model: str = ""
    layers: int | None = None
    devices: int | None = None
    used_devices: int | None = None
    status: Status | None = None
    objective: Objective | None = None
    objective_value: float | None = None
    gap: float | None = None
    training: bool | None = None
    chunks: int | None = None


class Page(BaseModel):
    """Some placements, newest first.

    Attributes:
        placements: of this page.
        next: the cursor of the next page; null on the last.
    """

    placements: list[Summary]
    next: str | None


@router.get("/v1/placements", response_model=Page)
async def list_placements(
    request: Request,
    service: Serving,
    limit: Limit = 50,
    cursor: Cursor = None,
    q: Text = "",
    status: Status | None = None,
    objective: Objective | None = None,
) -> Response:
    """Past placements, newest first; `next` and the `Link` header lead on."""
    filters: dict[str, str] = {
        name: value for name, value in (("status", status), ("objective", objective)) if value is not None
    }
    found = await asyncio.to_thread(service.store.search, q, filters, _before(cursor), limit + 1)
    more = len(found) > limit
    rows = found[:limit]
    following = f"{rows[-1]['row']:x}" if more else None
    page = {"placements": [_summary(row) for row in rows], "next": following}
    headers = {"Link": _link(request, following)} if following else {}
    return json_reply(request, json.dumps(page).encode(), headers=headers, tagged=True)


@router.get("/v1/placements/{id}/request", response_model=PlacementRequest)
async def get_request(request: Request, id: str, service: Serving) -> Response:
    """The question of a placement, as it can be asked again."""
    key = checked_id(id)
    if (question := await service.store.ask(service.store.request, key)) is None:
        detail = f"there is no request of placement {key}: it is not done, or was ended before it was begun"
        raise Problem(404, "no-such-request", "There is no such request", detail)
    return json_reply(request, question, tagged=True)


@router.get("/v1/profiles/{id}", response_model=Profile)
async def get_profile(request: Request, id: str, service: Serving) -> Response:
    """A profile that placements were asked for; lists of placements have its id."""
    key = checked_id(id, "profile")
    if (profile := await service.store.ask(service.store.profile, key)) is None:
        raise Problem(404, "no-such-profile", "There is no such profile", f"there is no profile {key}")
    return json_reply(request, profile, tagged=True)


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "row"}


def _before(cursor: str | None) -> int:
    if cursor is None:
        return NEWEST
    if not _CURSOR.fullmatch(cursor):
        detail = f"{clip(cursor, 80)!r} is no cursor; take `next` of the page before as it is"
        raise Problem(422, "invalid-parameter", "A parameter cannot be used", detail)
    return int(cursor, 16)


def _link(request: Request, following: str) -> str:
    parameters = {**request.query_params, "cursor": following}
    return f'</v1/placements?{urlencode(parameters)}>; rel="next"'
