"""Route for several questions in one request; each is treated as if it had come alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, Response

from placer.schema import BatchAnswers

from ..jobs.job import SolveJob
from ..problem import Problem, store_away
from ..store.database import StoreError
from ..web.replies import json_reply
from ..web.validation import split
from .placements import answer_or_job, job_progress, not_persisted
from .service import Service, Serving, Wait, client_name

router = APIRouter()


@router.post("/v1/placements:batch", response_model=BatchAnswers)
async def post_batch(request: Request, service: Serving, wait: Wait = None) -> Response:
    """Request several placements at once.

    Each request has only the fields in which it differs; `shared` has the others. An invalid
    request, or one for which the queue is full, gets an answer of its own and does not affect the
    others. The response waits for all of them together.
    """
    async with service.body_reader.body(request) as body:
        bodies = await service.validator.run(split, body)
        del body
        client = client_name(request)
        submitted = [await _submit(service, one, client) for one in bodies]
        # Each job keeps its own body only as long as it needs it.
        del bodies
    seconds = service.settings.default_wait_s if wait is None else wait
    # Equal questions of a batch share one job.
    jobs = {id(one): one for one in submitted if isinstance(one, SolveJob)}
    await asyncio.gather(*(job.wait(seconds) for job in jobs.values()))
    answers = [await _answer_json(one) for one in submitted]
    return json_reply(request, b'{"answers":[' + b",".join(answers) + b"]}")


async def _submit(
    service: Service, body: bytes, client: str
) -> SolveJob | Problem | tuple[str, bytes]:
    """Return the question's job, its stored answer with its id, or its problem."""
    try:
        question = await service.validator.check(body)
        found = await answer_or_job(service, question, body, client)
    except Problem as problem:
        return problem
    except StoreError:
        return store_away("the store cannot be used at the moment; try again later")
    if isinstance(found, bytes):
        return question.id, found
    found.wanted = True
    return found


async def _answer_json(submitted: SolveJob | Problem | tuple[str, bytes]) -> bytes:
    """Return the BatchAnswer as JSON."""
    if isinstance(submitted, Problem):
        return _failure(submitted)
    if isinstance(submitted, tuple):
        return _success(*submitted)
    job, key = submitted, submitted.id
    written = await job.is_written()
    if job.problem is not None:
        return _failure(job.problem, key)
    if job.final_answer is not None:
        return _success(key, job.final_answer)
    if not written:
        return _failure(not_persisted(job), key)
    return _entry(status=202, id=key, progress=job_progress(job).model_dump(), retry_after_s=1)


def _success(key: str, placement: bytes) -> bytes:
    return b'{"status":200,"id":"%s","placement":%s}' % (key.encode(), placement)


def _failure(problem: Problem, key: str | None = None) -> bytes:
    after = problem.headers.get("Retry-After", "")
    more = {"retry_after_s": int(after)} if after.isdecimal() else {}
    return _entry(status=problem.status, id=key, problem=json.loads(problem.content()), **more)


def _entry(**fields: Any) -> bytes:
    return json.dumps(fields).encode()
