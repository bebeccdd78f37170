"""Routes for operators: liveness, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel

import placer

from ..observability.metrics import MEDIA_TYPE
from ..problem import Problem
from ..web.replies import JSON
from .service import Serving

router = APIRouter()

# Message of ``/readyz``, which needs no key and therefore does not name the store.
STORE_AWAY = "the store cannot be used at the moment; see the service's log"


class Health(BaseModel):
    """State of the service.

    Attributes:
        status: ``ok`` or ``ready``.
        version: Version of Placer.
    """

    status: str
    version: str


@router.get("/healthz", response_model=Health)
async def get_health() -> Response:
    """Return 200 while the service is alive."""
    return _health("ok")


@router.get("/readyz", response_model=Health)
async def get_readiness(service: Serving) -> Response:
    """Return 200 if the service accepts solves, else 503."""
    if why := service.not_ready or (STORE_AWAY if service.solves.store_error else ""):
        raise Problem(503, "not-ready", "The service is not ready", why, retry_s=1)
    return _health("ready")


@router.get("/metrics", response_class=Response)
async def get_metrics(service: Serving) -> Response:
    """Return counters, gauges and histograms in Prometheus' text format."""
    return Response(service.metrics.render(), media_type=MEDIA_TYPE)


def _health(status: str) -> Response:
    return Response(
        Health(status=status, version=placer.__version__).model_dump_json(), media_type=JSON
    )
