"""Components that the routes use, and their common parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Query, Request

from ..jobs.evaluations import Estimates, Evaluations
from ..jobs.measurements import Measurements
from ..jobs.solves import Solves
from ..node.cluster import NodeCluster
from ..observability.metrics import Metrics
from ..problem import Problem, clip, nearest, no_such
from ..quota import Quota
from ..settings import MAX_WAIT_S, Settings
from ..store.store import Store
from ..web.body_reader import BodyReader
from ..web.validation import Validator

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Service:
    """Components that the routes use.

    Attributes:
        settings: Settings of the service.
        store: Store of requests and answers.
        metrics: Metrics of the service.
        body_reader: Reader of request bodies.
        validator: Parser of request bodies.
        solves: Runner of the solves.
        evaluations: Runner of the evaluations of maps.
        estimates: Runner of the estimates of graphs.
        measurements: Runner of the measurements of graphs.
        cluster: This node's devices.
        stream_quota: Limit on open event streams.
        not_ready: Reason why the service accepts no solves yet; empty once it does.
    """

    settings: Settings
    store: Store
    metrics: Metrics
    body_reader: BodyReader
    validator: Validator
    solves: Solves
    evaluations: Evaluations
    estimates: Estimates
    measurements: Measurements
    cluster: NodeCluster
    stream_quota: Quota
    not_ready: str = "the first worker is starting"


async def _service(request: Request) -> Service:
    if request.scope["query_string"]:
        _refuse_unknown_parameters(request)
    service: Service = request.app.state.service
    return service


def _refuse_unknown_parameters(request: Request) -> None:
    known = [parameter.name for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            detail = f"this path has no parameter {clip(name, 80)!r}{nearest(name, known)}"
            raise Problem(422, "unknown-parameter", "There is no such parameter", detail)


Serving = Annotated[Service, Depends(_service)]
Wait = Annotated[
    float | None,
    Query(
        ge=0,
        le=MAX_WAIT_S,
        allow_inf_nan=False,
        description="Wait this number of seconds for the answer before a response with 202.",
    ),
]
OnDisconnect = Annotated[
    Literal["keep", "stop"],
    Query(
        description="What happens to the solve if the client disconnects while it waits: `keep`"
        " continues, and the answer is available later; `stop` ends the solve with the best"
        " placement so far, unless other clients wait for it or want it kept."
    ),
]


def client_name(request: Request) -> str:
    """Return the name of the client's key, or else its address."""
    name: str = request.scope.get("placer.client", "")
    return name or (request.client.host if request.client else "")


def valid_id(given: str, kind: str = "placement") -> str:
    """Return the id if it is well-formed.

    Raises:
        Problem: It is malformed, so nothing has that id.
    """
    if not _ID.fullmatch(given):
        detail = f"{clip(given, 80)!r} is not an id of a {kind}; an id has 32 hexadecimal digits"
        raise no_such(kind, detail)
    return given


def no_placement(key: str) -> Problem:
    """Return the problem of an id without a placement."""
    detail = f"there is no placement {key}; POST its request to /v1/placements"
    return no_such("placement", detail)


async def refuse_unfinished(service: Service, key: str) -> None:
    """Raise a problem if the placement is still being solved or its solve failed.

    Raises:
        Problem: The placement may be there later, or its solve failed.
    """
    job = await service.solves.find_anywhere(key)
    if job is None:
        return
    if job.problem is not None:
        raise job.problem
    detail = (
        f"placement {key} is still being solved; GET /v1/placements/{key} answers 200 once it is"
        " done, and 202 before"
    )
    raise Problem(409, "not-done", "The placement is not ready", detail, retry_s=1)
