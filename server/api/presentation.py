"""Routes that present a placement: its timeline, a trace and a report."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from placer.schema import Timeline

from ..judge.evaluation import EvaluationInput
from ..judge.timeline import report_task, timeline_task, trace_task
from ..problem import Problem
from ..web.replies import json_reply
from ..workers.worker import Task
from .evaluations import load_stored
from .service import Service, Serving, client_name

router = APIRouter()


@router.get("/v1/placements/{id}/timeline", response_model=Timeline)
async def get_timeline(request: Request, id: str, service: Serving) -> Response:
    """Return when each device works on which micro-batch, in milliseconds.

    The times are predictions from the schedule and the profile.
    """
    return json_reply(request, await _present(request, service, id, timeline_task), tagged=True)


@router.get("/v1/placements/{id}/trace")
async def get_trace(request: Request, id: str, service: Serving) -> Response:
    """Return the timeline as a trace for https://ui.perfetto.dev and chrome://tracing."""
    content = await _present(request, service, id, trace_task)
    return json_reply(request, content, headers=_attachment_headers("trace.json"), tagged=True)


@router.get(
    "/v1/placements/{id}/report",
    response_class=Response,
    responses={
        200: {
            "content": {"text/html": {"schema": {"type": "string"}}},
            "description": "The report is one HTML file.",
        }
    },
)
async def get_report(request: Request, id: str, service: Serving) -> Response:
    """Return a report as one HTML file without external resources.

    `placer show --html` writes the same file.
    """
    content = await _present(request, service, id, report_task)
    return Response(content, headers=_attachment_headers("placement.html"), media_type="text/html")


async def _present(
    request: Request, service: Service, id: str, task: Task[bytes | Problem]
) -> bytes:
    return await service.evaluations.run(
        task, EvaluationInput(b"", (await load_stored(service, id),)), client_name(request)
    )


def _attachment_headers(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
