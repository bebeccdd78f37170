"""Routes that read the store: lists of placements, and their requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from placer.schema import Objective, PlacementPage, PlacementRequest, Status

from ..problem import clip, invalid_parameter, no_such
from ..web.replies import json_reply
from .service import Serving, refuse_unfinished, valid_id

router = APIRouter()

# Larger than every row number.
NEWEST = 2**62
_CURSOR = re.compile(r"[0-9a-f]{1,15}")

Limit = Annotated[int, Query(ge=1, le=200, description="Return at most this number of placements.")]
Cursor = Annotated[
    str | None,
    Query(max_length=100, description="Start after this cursor, `next` of the page before."),
]
Text = Annotated[
    str,
    Query(
        max_length=200,
        description="Return only placements whose model name or id contains this text.",
    ),
]


@router.get("/v1/placements", response_model=PlacementPage)
async def list_placements(
    request: Request,
    service: Serving,
    limit: Limit = 50,
    cursor: Cursor = None,
    q: Text = "",
    status: Status | None = None,
    objective: Objective | None = None,
) -> Response:
    """List past placements, newest first.

    `next`, or the `Link` header, leads to the next page.
    """
    filters: dict[str, str] = {
        name: value
        for name, value in (("status", status), ("objective", objective))
        if value is not None
    }
    # One row more than the limit shows whether another page follows.
    found = await asyncio.to_thread(service.store.search, q, filters, _before(cursor), limit + 1)
    more = len(found) > limit
    rows = found[:limit]
    following = f"{rows[-1]['row']:x}" if more else None
    shown = [{name: value for name, value in row.items() if name != "row"} for row in rows]
    page = {"placements": shown, "next": following}
    headers = {"Link": _link(request, following)} if following else {}
    return json_reply(request, json.dumps(page).encode(), headers=headers, tagged=True)


@router.get("/v1/placements/{id}/request", response_model=PlacementRequest)
async def get_request(request: Request, id: str, service: Serving) -> Response:
    """Return the request of a placement, ready to be sent again."""
    key = valid_id(id)
    if (question := await service.store.call(service.store.request, key)) is None:
        await refuse_unfinished(service, key)
        detail = (
            f"there is no request of placement {key}: nobody sent one, or its solve was stopped"
            " before it started"
        )
        raise no_such("request", detail)
    return json_reply(request, question, tagged=True)


def _before(cursor: str | None) -> int:
    if cursor is None:
        return NEWEST
    if not _CURSOR.fullmatch(cursor):
        detail = f"{clip(cursor, 80)!r} is not a cursor; use `next` of the page before, unchanged"
        raise invalid_parameter(detail)
    return int(cursor, 16)


def _link(request: Request, following: str) -> str:
    parameters = {**request.query_params, "cursor": following}
    return f'</v1/placements?{urlencode(parameters)}>; rel="next"'
