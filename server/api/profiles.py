"""Routes of profiles, sent with requests or measured here from graphs, and of graphs' memory."""

from __future__ import annotations

import hashlib
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from placer.schema import Estimate, Profile

from ..jobs.job import Job
from ..problem import Problem, no_such
from ..web.replies import JSON, json_reply
from ..web.validation import check_graph
from .service import Serving, Wait, client_name, valid_id

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
    at once. While the measurement runs, `GET /v1/profiles/{id}` returns its progress.
    """
    async with service.body_reader.body(request) as body:
        # The id is a hash of the bytes, not of the parsed graph: parsing a large graph takes long.
        key = hashlib.sha256(body).hexdigest()[:32]
        if (known := await service.store.call(service.store.measured, key)) is not None:
            return _measured(request, key, known)
        if service.measurements.find(key) is None:
            await service.validator.run(check_graph, body)
        job = service.measurements.submit(key, body, client_name(request))
    await job.wait(service.settings.default_wait_s if wait is None else wait)
    if not job.finished.is_set() and not await job.is_written():
        detail = (
            "the graph could not be written to the store, so a crash would lose it;"
            " its measurement continues"
        )
        raise Problem(503, "not-kept", "The graph could not be kept", detail, retry_s=2)
    return _reply(request, job)


@router.get(
    "/v1/profiles/{id}", response_model=Profile, responses={202: {"model": MeasuringStatus}}
)
async def get_profile(request: Request, id: str, service: Serving, wait: Wait = 0.0) -> Response:
    """Return a profile, or the progress of its measurement with status 202.

    The profile came with a placement request, or this node measured it. Lists of placements show
    the ids of profiles.
    """
    key, store = valid_id(id, "profile"), service.store
    if (job := service.measurements.find(key)) is not None:
        await job.wait(wait or 0.0)
        return _reply(request, job)
    profile = await store.call(store.profile, key) or await store.call(store.measured, key)
    if profile is None:
        raise no_such("profile", f"there is no profile {key}")
    return json_reply(request, profile, tagged=True)


@router.post("/v1/estimates", response_model=Estimate)
async def estimate(request: Request, service: Serving) -> Response:
    """Estimate the memory of a captured graph by device, and whether it fits.

    A graph holds operations, shapes and dtypes, but no weights. It runs on fake tensors, so the
    service needs no GPU. If it does not fit, the answer has the smallest changes with which it
    fits.
    """
    async with service.body_reader.body(request) as body:
        content = await service.estimates.run(body, client_name(request))
    return json_reply(request, content)


def _reply(request: Request, job: Job) -> Response:
    if job.problem is not None:
        return job.problem.response()
    if job.final_answer is not None:
        return _measured(request, job.id, job.final_answer)
    status = MeasuringStatus(
        id=job.id, status="running" if job.state == "running" else "queued", elapsed_s=job.elapsed_s
    )
    headers = {"Location": f"/v1/profiles/{job.id}", "Retry-After": "1"}
    return Response(status.model_dump_json(), 202, headers=headers, media_type=JSON)


def _measured(request: Request, key: str, profile: bytes) -> Response:
    return json_reply(request, profile, headers={"Location": f"/v1/profiles/{key}"})
