"""Task of an estimate: the memory of a graph that a client sent, on fake tensors."""

from __future__ import annotations

import threading

from pydantic import ValidationError

from placer.errors import MissingExtraError
from placer.schema import EstimateRequest
from placer.schema.base import read_json

from ..problem import Problem, invalid_body
from .worker import Report


def estimate_graph(payload: bytes, report: Report, stop: threading.Event) -> bytes | Problem:
    """Return the Estimate of an EstimateRequest as JSON, or the body's problem.

    Only this task's process imports torch, and only for a valid graph.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        request = read_json(EstimateRequest, payload)
    except ValidationError as error:
        return invalid_body(error, EstimateRequest)
    try:
        from placer.estimator.graph_estimate import estimated_request
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "torch is not installed on this node, so graphs cannot be estimated: send them to a"
            " node that runs the image's gpu target, or pip install 'torch-placer[torch]'"
        ) from error
    return estimated_request(request).model_dump_json().encode()
