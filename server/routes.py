"""The paths of the service."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

import placer
from placer.schema import Cluster, Placement

from .body import Checker, Intake, Question
from .cluster import NodeCluster
from .job import Job
from .jobs import Jobs
from .metrics import MEDIA_TYPE, Metrics
from .problem import MEDIA_TYPE as PROBLEM
from .problem import Problem, clip
from .settings import MAX_WAIT_S, Settings
from .store import Store

router = APIRouter()

JSON = "application/json"

_ID = re.compile(r"[0-9a-f]{32}")


class JobStatus(BaseModel):
    """How far a solve is that has not ended.

    Attributes:
        id: of the placement to be.
        status: whether it waits for a worker or runs.
        incumbent: the best objective value so far, ms or bytes; null while there is none.
        bound: the proven lower bound so far; null while there is none.
        elapsed_s: since it was asked.
    """

    id: str
    status: Literal["queued", "running"]
    incumbent: float | None = None
    bound: float | None = None
    elapsed_s: float


class Health(BaseModel):
    """Whether the service lives, or is ready.

    Attributes:
        status: ``ok`` or ``ready``.
        version: of Placer.
    """

    status: str
    version: str


@dataclass
class Service:
    """What the routes stand on.

    Attributes:
        not_ready: why the service takes no solves yet; empty once it does.
    """

    settings: Settings
    store: Store
    metrics: Metrics
    intake: Intake
    checker: Checker
    jobs: Jobs
    cluster: NodeCluster
    not_ready: str = "the first worker is being started"


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_service)]
Wait = Annotated[
    float | None,
    Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for the answer before a 202."),
]


@router.post("/v1/placements", response_model=Placement, responses={202: {"model": JobStatus}})
async def post_placement(request: Request, service: Serving, wait: Wait = None) -> Response:
    """Ask for a placement.

    The same request has the same id and is answered from the store at once. An infeasible request is answered too: with
    a placement whose status is `infeasible`.
    """
    async with service.intake.body(request) as body:
        question = await service.checker.check(body)
    if (answer := _complete_answer(service, question)) is not None:
        service.metrics.cache_hits.inc()
        return Response(answer, media_type=JSON)
    job = service.jobs.submit(question, body)
    del body  # the job holds it as long as it needs it
    job.wanted = True
    written = await job.is_written()
    await job.wait(service.settings.default_wait_s if wait is None else wait)
    if not written and not job.finished.is_set():
        raise _not_kept(job)
    return _job_response(job)


@router.get("/v1/placements/{id}", response_model=Placement, responses={202: {"model": JobStatus}})
async def get_placement(id: str, service: Serving, wait: Wait = 0.0) -> Response:
    """A placement that was asked for, or how far its solve is."""
    key = _checked_id(id)
    if (job := service.jobs.find(key)) is not None:
        await job.wait(wait or 0.0)
        return _job_response(job)
    return _stored_response(service, key)


@router.delete("/v1/placements/{id}", response_model=Placement)
async def stop_placement(id: str, service: Serving) -> Response:
    """Stop the solve and keep the best placement so far, which is the answer; one that has ended is just answered.

    Asking the same question again solves it again, with all its time.
    """
    key = _checked_id(id)
    if (job := service.jobs.find(key)) is not None:
        await service.jobs.stop(job)
        return _job_response(job)
    return _stored_response(service, key)


@router.get("/v1/cluster", response_model=Cluster)
async def get_cluster(service: Serving) -> Response:
    """This node's own devices and the links between them, measured once."""
    return Response(await service.cluster.get(), media_type=JSON)


@router.get("/healthz", response_model=Health)
async def get_health() -> Response:
    """Whether the service lives."""
    return _health("ok")


@router.get("/readyz", response_model=Health)
async def get_readiness(service: Serving) -> Response:
    """Whether the service takes solves."""
    if service.not_ready:
        raise Problem(503, "not-ready", "The service is not ready", service.not_ready, headers={"Retry-After": "1"})
    return _health("ready")


@router.get("/metrics", response_class=Response)
async def get_metrics(service: Serving) -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    return Response(service.metrics.render(), media_type=MEDIA_TYPE)


def _complete_answer(service: Service, question: Question) -> bytes | None:
    """The stored answer, unless it was stopped early or another version of Placer made it."""
    answer = service.store.get(question.id)
    if answer is None or not answer.complete or answer.version != placer.__version__:
        return None
    return answer.placement


def _stored_response(service: Service, key: str) -> Response:
    answer = service.store.get(key)
    if answer is None and (failed := service.store.failure(key)) is not None:
        return Response(failed[1], failed[0], media_type=PROBLEM)
    if answer is None:
        detail = f"there is no placement {key}; POST its request to /v1/placements"
        raise Problem(404, "no-such-placement", "There is no such placement", detail)
    return Response(answer.placement, media_type=JSON)


def _not_kept(job: Job) -> Problem:
    detail = (
        f"the request could not be written to the store, so a crash would lose it; solve {job.question.id} goes on:"
        " ask again for its answer"
    )
    return Problem(503, "not-kept", "The request could not be kept", detail, headers={"Retry-After": "2"})


def _job_response(job: Job) -> Response:
    if job.problem is not None:
        return job.problem.response()
    if job.answer is not None and job.finished.is_set():
        return Response(job.answer, media_type=JSON)
    status = JobStatus(
        id=job.question.id,
        status="running" if job.state == "running" else "queued",
        incumbent=job.incumbent,
        bound=job.bound,
        elapsed_s=round(time.monotonic() - job.created_s, 3),
    )
    headers = {"Location": f"/v1/placements/{job.question.id}", "Retry-After": "1"}
    return Response(status.model_dump_json(), 202, headers=headers, media_type=JSON)


def _checked_id(given: str) -> str:
    if not _ID.fullmatch(given):
        detail = f"{clip(given, 80)!r} is no id of a placement: those are 32 hexadecimal digits, from a POST's answer"
        raise Problem(404, "no-such-placement", "There is no such placement", detail)
    return given


def _health(status: str) -> Response:
    return Response(Health(status=status, version=placer.__version__).model_dump_json(), media_type=JSON)
