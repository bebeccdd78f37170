"""Routes of profiles: those sent with requests, and those that this node measures from graphs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import suppress
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from placer.schema import Profile

from ..node.profiling import Measuring
from ..problem import Problem
from ..web.replies import JSON, json_reply
from .service import Serving, Wait, checked_id, client_of

router = APIRouter()


class MeasuringStatus(BaseModel):
    """Progress of a measurement.

    Attributes:
        id: Id of the future profile.
        status: Whether it waits for the devices or is measured.
        elapsed_s: Seconds since it was requested.
    """

    id: str
    status: Literal["queued", "running"]
    elapsed_s: float


@router.post("/v1/profiles", response_model=Profile, responses={202: {"model": MeasuringStatus}})
async def post_profile(request: Request, service: Serving, wait: Wait = None) -> Response:
    """Measure a captured graph on this node's devices.

    A graph holds operations, shapes and dtypes, but no weights. The store answers the same request
    at
    once. While the measurement runs, `GET /v1/profiles/{id}` returns its progress.
    """
    async with service.intake.body(request) as body:
        key = hashlib.sha256(body).hexdigest()[:32]
        if (known := await service.store.ask(service.store.measured, key)) is not None:
            return _measured(request, key, known)
        if service.profiling.find(key) is None:
            await service.checker.check_graph(body)
        measuring = service.profiling.submit(key, body, client_of(request))
    await _wait(measuring, service.settings.default_wait_s if wait is None else wait)
    if measuring.written is not None and not measuring.ended.is_set():
        await asyncio.wait([measuring.written])
        if measuring.written.exception() is not None:
            detail = "the graph could not be written to the store, so a crash would lose it; it is measured all the same"
            raise Problem(
                503, "not-kept", "The graph could not be kept", detail, headers={"Retry-After": "2"}
            )
    return _reply(request, measuring)


@router.get(
    "/v1/profiles/{id}", response_model=Profile, responses={202: {"model": MeasuringStatus}}
)
async def get_profile(request: Request, id: str, service: Serving, wait: Wait = 0.0) -> Response:
    """Return a profile, or the progress of its measurement with status 202.

    The profile came with a placement request, or this node measured it. Lists of placements show
    the
    ids of profiles.
    """
    key, store = checked_id(id, "profile"), service.store
    if (measuring := service.profiling.find(key)) is not None:
        await _wait(measuring, wait or 0.0)
        return _reply(request, measuring)
    profile = await store.ask(store.profile, key) or await store.ask(store.measured, key)
    if profile is None:
        raise Problem(
            404, "no-such-profile", "There is no such profile", f"there is no profile {key}"
        )
    return json_reply(request, profile, tagged=True)


async def _wait(measuring: Measuring, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await measuring.ended.wait()


def _reply(request: Request, measuring: Measuring) -> Response:
    if measuring.problem is not None:
        return measuring.problem.response()
    if measuring.profile is not None and measuring.ended.is_set():
        return _measured(request, measuring.id, measuring.profile)
    status = MeasuringStatus(
        id=measuring.id,
        status="running" if measuring.running else "queued",
        elapsed_s=round(time.monotonic() - measuring.created_s, 3),
    )
    headers = {"Location": f"/v1/profiles/{measuring.id}", "Retry-After": "1"}
    return Response(status.model_dump_json(), 202, headers=headers, media_type=JSON)


def _measured(request: Request, key: str, profile: bytes) -> Response:
    return json_reply(request, profile, headers={"Location": f"/v1/profiles/{key}"})
