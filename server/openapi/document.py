"""OpenAPI document: the wire types as schemas, tested examples, and the problems of every path."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from placer.schema import Batch, Cluster, EstimateRequest, JointRequest, PlacementRequest
from placer.schema.graph import ProfileRequest

from ..judge.evaluation import CompareBody, EvaluateBody
from ..problem import MEDIA_TYPE
from . import examples

REF = "#/components/schemas/{model}"

PROBLEM_SCHEMA = {
    "title": "Problem",
    "description": "An error as defined by RFC 9457, at most 4 KB.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {
            "type": "string",
            "description": "The kind of problem, for programs.",
            "examples": ["urn:placer:problem:invalid-request"],
        },
        "title": {"type": "string", "description": "The kind of problem, for people."},
        "status": {"type": "integer", "description": "The HTTP status."},
        "detail": {
            "type": "string",
            "description": "What is wrong with this request, and what to do.",
        },
        "errors": {
            "type": "array",
            "description": "The invalid places of the body, as JSON pointers (RFC 6901).",
            "items": {
                "type": "object",
                "required": ["pointer", "detail"],
                "properties": {"pointer": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
}

PROBLEMS = {
    "400": "The body is not JSON.",
    "404": "The placement, profile or node does not exist.",
    "405": "The method is not allowed on this path.",
    "408": "The body arrived too slowly.",
    "409": "The placement is still being solved.",
    "413": "The body is too large.",
    "415": "The content type or encoding is not supported.",
    "422": "The request is invalid; the problem names the fault.",
    "429": "The queue is full; Retry-After gives the seconds to wait.",
    "500": "The solver failed on this request.",
    "501": "The service lacks a package that this operation needs.",
    "503": (
        "The service is starting or stopping, or its store cannot be used; Retry-After gives the"
        " seconds to wait."
    ),
}

# Statuses of problems: of a body, of a body that becomes a job, and of placements that are shown.
_BODY = ("400", "408", "413", "415", "422")
_JOB = (*_BODY, "429", "500", "501", "503")
_SHOWN = ("404", "409", "422", "429", "500")
_COMPARED = ("400", "404", "408", "409", "413", "415", "422", "429", "500", "503")

_PATH_STATUSES = {
    ("/v1/placements", "post"): _JOB,
    ("/v1/placements:together", "post"): _JOB,
    ("/v1/placements", "get"): ("422",),
    ("/v1/placements/{id}/request", "get"): ("404", "409", "422"),
    ("/v1/placements/{id}/events", "get"): ("404", "422", "429"),
    ("/v1/placements:batch", "post"): (*_BODY, "503"),
    ("/v1/placements/{id}/timeline", "get"): _SHOWN,
    ("/v1/placements/{id}/trace", "get"): _SHOWN,
    ("/v1/placements/{id}/report", "get"): _SHOWN,
    ("/v1/placements/{id}/export", "get"): _SHOWN,
    ("/v1/placements:evaluate", "post"): _COMPARED,
    ("/v1/placements:compare", "post"): _COMPARED,
    ("/v1/profiles", "post"): _JOB,
    ("/v1/profiles/{id}", "get"): ("404", "422", "500", "501"),
    ("/v1/estimates", "post"): _JOB,
    ("/v1/placements/{id}", "get"): ("404", "422", "500", "501"),
    ("/v1/placements/{id}", "delete"): ("404", "422", "500", "501"),
    ("/v1/cluster", "get"): ("404", "422", "501", "503"),
    ("/v1/cluster:measure", "post"): ("501", "503"),
    ("/v1/nodes", "get"): ("422",),
    ("/v1/nodes/{name}", "put"): ("400", "404", "408", "413", "415", "422", "503"),
    ("/v1/nodes/{name}", "delete"): ("404", "422"),
    ("/readyz", "get"): ("503",),
}

# Method and path, model and examples of every body that the routes read themselves.
_BODIES: tuple[tuple[str, str, type[BaseModel], dict[str, Any]], ...] = (
    ("post", "/v1/placements", PlacementRequest, examples.requests()),
    ("post", "/v1/placements:together", JointRequest, examples.joint_requests()),
    ("post", "/v1/profiles", ProfileRequest, examples.graphs()),
    ("post", "/v1/estimates", EstimateRequest, examples.estimates()),
    ("put", "/v1/nodes/{name}", Cluster, examples.clusters()),
    ("post", "/v1/placements:evaluate", EvaluateBody, examples.evaluations()),
    ("post", "/v1/placements:compare", CompareBody, examples.comparisons()),
    ("post", "/v1/placements:batch", Batch, examples.batches()),
)


def describe(app: FastAPI) -> None:
    """Give the application its OpenAPI document, generated on first use."""
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        schemas = document["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for method, path, model, shown in _BODIES:
            schema = model.model_json_schema(ref_template=REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
            content = {"schema": {"$ref": REF.format(model=model.__name__)}, "examples": shown}
            document["paths"][path][method]["requestBody"] = {
                "required": model is not CompareBody,
                "content": {"application/json": content},
            }
        schemas["Problem"] = PROBLEM_SCHEMA
        for (path, method), codes in _PATH_STATUSES.items():
            _describe_problems(document["paths"][path][method], codes)
        app.openapi_schema = document
    return app.openapi_schema


def _describe_problems(operation: dict[str, Any], codes: tuple[str, ...]) -> None:
    content = {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}}
    operation["responses"].pop("422", None)
    for code in codes:
        operation["responses"][code] = {"description": PROBLEMS[code], "content": content}
