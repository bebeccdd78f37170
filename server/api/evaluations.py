"""Routes ``:evaluate`` and ``:compare`` for maps that users made."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from placer.schema import Comparison, Evaluation

from ..judge.evaluation import (
    MAX_MAPS,
    EvaluationInput,
    StoredPlacement,
    compare_task,
    evaluate_task,
)
from ..problem import no_such
from ..web.replies import json_reply
from .service import Service, Serving, client_name, no_placement, refuse_unfinished, valid_id

router = APIRouter()

Id = Annotated[str | None, Query(description="Use the request of the placement with this id.")]
Best = Annotated[
    bool,
    Query(
        description="Also return the best placement and what it would gain: the placement `id` if"
        " it answers the same request, or else the result of a solve of at most 15 seconds."
    ),
]
Ids = Annotated[
    list[str],
    Query(
        max_length=MAX_MAPS,
        description="Compare the placements with these ids. Without a `request` in the body, all"
        " maps are evaluated for the request of the first placement.",
    ),
]


@router.post("/v1/placements:evaluate", response_model=Evaluation)
async def evaluate(
    request: Request, service: Serving, id: Id = None, best: Best = False
) -> Response:
    """Evaluate a map of your own by the cost model that the solver minimises.

    The answer has the map's cost and lists its faults.
    """
    limits = service.evaluations.best_limits if best else None
    stored = [await load_stored(service, id)] if id is not None else []
    async with service.body_reader.body(request) as body:
        content = await service.evaluations.run(
            evaluate_task, EvaluationInput(body, tuple(stored), limits), client_name(request)
        )
    return json_reply(request, content)


@router.post("/v1/placements:compare", response_model=Comparison)
async def compare(request: Request, service: Serving, id: Ids = []) -> Response:  # noqa: B006
    """Compare placements and maps of your own, all evaluated for one request."""
    stored = [await load_stored(service, one) for one in dict.fromkeys(id)]
    async with service.body_reader.body(request, optional=True) as body:
        content = await service.evaluations.run(
            compare_task, EvaluationInput(body, tuple(stored)), client_name(request)
        )
    return json_reply(request, content)


async def load_stored(service: Service, given: str) -> StoredPlacement:
    """Return a stored placement and its request.

    Raises:
        Problem: The placement is unknown or not solved yet, or its request is not kept.
    """
    key = valid_id(given)
    store = service.store
    answer, question = await store.call(store.get, key), await store.call(store.request, key)
    if answer is None:
        await refuse_unfinished(service, key)
        raise no_placement(key)
    if question is None:
        detail = f"the request of placement {key} is not stored; send the request in the body"
        raise no_such("request", detail)
    return StoredPlacement(key, answer.placement, question)
