"""Routes that present a placement: its timeline, a trace, a report, and other formats."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from placer.schema import Timeline
from placer.schema.base import FormatName
from placer.schema.export import Export

from ..judge.evaluation import EvaluationInput, export_task
from ..judge.timeline import report_task, timeline_task, trace_task
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


@router.get("/v1/placements/{id}/export", response_model=Export)
async def get_export(request: Request, id: str, format: FormatName, service: Serving) -> Response:
    """Return the placement in the format of another engine.

    A placement that the format cannot express is refused. The field `for_format` of a request
    restricts its placements to the format.
    """
    content = await _present(request, service, id, export_task, format.encode())
    return json_reply(request, content, tagged=True)


async def _present(
    request: Request, service: Service, id: str, task: Task[bytes], body: bytes = b""
) -> bytes:
    return await service.evaluations.run(
        task, EvaluationInput(body, (await load_stored(service, id),)), client_name(request)
    )


def _attachment_headers(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
