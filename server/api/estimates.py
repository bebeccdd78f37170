"""Route of estimates: the memory of a captured graph, without weights and without GPUs."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from placer.schema import Estimate

from ..web.replies import json_reply
from .service import Serving, client_name

router = APIRouter()


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
