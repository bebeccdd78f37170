"""Routes of a placement."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request, Response

import placer
from placer.schema import JointPlacement, Placement, Progress

from ..jobs.job import Question, SolveJob
from ..judge.evaluation import EvaluationInput, StoredPlacement, together_task
from ..problem import MEDIA_TYPE as PROBLEM
from ..problem import Problem
from ..web.replies import JSON, json_reply
from ..web.validation import check_joint
from .service import OnDisconnect, Service, Serving, Wait, client_name, no_placement, valid_id

router = APIRouter()


@router.post("/v1/placements", response_model=Placement, responses={202: {"model": Progress}})
async def post_placement(
    request: Request, service: Serving, wait: Wait = None, on_disconnect: OnDisconnect = "keep"
) -> Response:
    """Request a placement.

    The same request has the same id, and the store answers it at once. An infeasible request gets a
    placement whose status is `infeasible`. Before the service answers 202 it stores the request,
    which therefore survives a restart.
    """
    async with service.body_reader.body(request) as body:
        question = await service.validator.check(body)
    found = await answer_or_job(service, question, body, client_name(request))
    # The job keeps the body only as long as it needs it.
    del body
    if isinstance(found, bytes):
        return json_reply(request, found)
    await _wait_for_new(request, service, found, wait, on_disconnect)
    return job_response(request, found)


@router.post(
    "/v1/placements:together", response_model=JointPlacement, responses={202: {"model": Progress}}
)
async def post_together(
    request: Request, service: Serving, wait: Wait = None, on_disconnect: OnDisconnect = "keep"
) -> Response:
    """Request placements of several models that are used one after another.

    All models share the memory of the devices. The service solves for one joint placement, in which
    layer `conv_in` of model `unet` is `unet/conv_in`, and answers with the placement of each model.
    The id is the joint placement's: `GET /v1/placements/{id}`, its events and `DELETE` apply to it
    as to any other. After a 202, send the same request again for the answer.
    """
    # The answer is divided by the models in the body, so the body is held meanwhile.
    async with service.body_reader.body(request) as body:
        question, joint = await service.validator.run(check_joint, body)
        found = await answer_or_job(service, question, joint, client_name(request))
        if isinstance(found, SolveJob):
            await _wait_for_new(request, service, found, wait, on_disconnect)
            if found.final_answer is None:
                return job_response(request, found)
            found = found.final_answer
        task_input = EvaluationInput(body, (StoredPlacement(question.id, found, joint),))
        content = await service.evaluations.run(together_task, task_input, client_name(request))
    return json_reply(request, content)


async def answer_or_job(
    service: Service, question: Question, payload: bytes, client: str
) -> bytes | SolveJob:
    """Return the stored answer to a question, or the job that will answer it.

    Raises:
        Problem: The question exceeds a limit, the queue is full, or the service is stopping.
    """
    if (answer := await complete_answer(service, question)) is not None:
        service.metrics.cache_hits.inc()
        return answer
    return service.solves.submit(question, payload, client)


@router.get("/v1/placements/{id}", response_model=Placement, responses={202: {"model": Progress}})
async def get_placement(
    request: Request,
    id: str,
    service: Serving,
    wait: Wait = 0.0,
    on_disconnect: OnDisconnect = "keep",
) -> Response:
    """Return a placement, or the progress of its solve with status 202."""
    key = valid_id(id)
    if (job := await service.solves.find_anywhere(key)) is not None:
        await _wait(request, service, job, wait or 0.0, on_disconnect)
        return job_response(request, job)
    return await stored_response(request, service, key)


@router.delete("/v1/placements/{id}", response_model=Placement)
async def stop_placement(request: Request, id: str, service: Serving) -> Response:
    """Stop the solve, and return its best placement so far.

    A solve that has ended is returned unchanged. The same request sent again is solved again, with
    its whole time limit.
    """
    key = valid_id(id)
    if (job := await service.solves.find_anywhere(key)) is not None:
        await service.solves.stop(job)
        return job_response(request, job)
    return await stored_response(request, service, key)


async def _wait_for_new(
    request: Request, service: Service, job: SolveJob, wait: float | None, on_disconnect: str
) -> None:
    """Wait for a job that this request submitted.

    Raises:
        Problem: The job has no answer yet, and its request could not be kept.
    """
    job.wanted = job.wanted or on_disconnect == "keep"
    written = await job.is_written()
    seconds = service.settings.default_wait_s if wait is None else wait
    await _wait(request, service, job, seconds, on_disconnect)
    if not written and job.answer is None and job.problem is None:
        raise not_persisted(job)


async def _wait(
    request: Request, service: Service, job: SolveJob, seconds: float, on_disconnect: str
) -> None:
    """Wait for a job; end it if its client disconnects and chose that."""
    if on_disconnect == "keep" or seconds <= 0:
        await job.wait(seconds)
        return
    job.waiting += 1
    ended, disconnected = (
        asyncio.create_task(job.wait(seconds)),
        asyncio.create_task(_disconnected(request)),
    )
    try:
        await asyncio.wait({ended, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        job.waiting -= 1
        left = disconnected.done() and not disconnected.cancelled()
        ended.cancel()
        disconnected.cancel()
    if left:
        # The job ends unless others wait for it or want it kept.
        service.solves.client_left(job)
    else:
        job.left_waiting_s = time.monotonic()


async def _disconnected(request: Request) -> None:
    """Return once the client has disconnected; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def complete_answer(service: Service, question: Question) -> bytes | None:
    """Return the stored answer, or None if it was stopped early or another version made it."""
    store = service.store
    answer = store.recent(question.id) or await store.call(store.get, question.id)
    if answer is None or not answer.complete or answer.version != placer.__version__:
        return None
    return answer.placement


async def stored_response(
    request: Request, service: Service, key: str, *, plain: bool = False
) -> Response:
    """Return the stored answer or failure of an id, if ``plain`` without compression and ETag.

    Raises:
        Problem: The store has neither.
    """
    store = service.store
    if (answer := await store.call(store.get, key)) is not None:
        if plain:
            return Response(answer.placement, media_type=JSON)
        return json_reply(request, answer.placement, tagged=True)
    if (failed := await store.call(store.failure, key)) is not None:
        return Response(failed[1], failed[0], media_type=PROBLEM)
    raise no_placement(key)


def not_persisted(job: SolveJob) -> Problem:
    """Return the problem of a job that runs, but would not survive a crash of the service."""
    detail = (
        f"the request could not be written to the store, so a crash would lose it; solve {job.id}"
        " continues: ask again for its answer"
    )
    return Problem(503, "not-kept", "The request could not be kept", detail, retry_s=2)


def job_response(request: Request, job: SolveJob) -> Response:
    """Return a job's answer, its problem, or its progress with status 202."""
    if job.problem is not None:
        return job.problem.response()
    if job.final_answer is not None:
        return json_reply(request, job.final_answer)
    headers = {"Location": f"/v1/placements/{job.id}", "Retry-After": "1"}
    return Response(job_progress(job).model_dump_json(), 202, headers=headers, media_type=JSON)


def job_progress(job: SolveJob) -> Progress:
    """Return the progress of a job."""
    value, bound = job.incumbent, job.bound
    return Progress(
        id=job.id,
        status="running" if job.state == "running" else "queued",
        incumbent=value,
        bound=bound,
        gap=(value - bound) / value if value and bound is not None else None,
        elapsed_s=job.elapsed_s,
    )
