"""OpenAPI document: the wire types as schemas, tested examples, and the problems of every path."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from placer.schema import Batch, EstimateRequest, PlacementRequest
from placer.schema.graph import ProfileRequest

from ..judge.evaluation import CompareBody, EvaluateBody
from ..problem import MEDIA_TYPE
from .examples import (
    batches,
    clusters,
    comparisons,
    estimates,
    evaluations,
    graphs,
    requests,
)

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

_PATH_STATUSES = {
    ("/v1/placements", "post"): ("400", "408", "413", "415", "422", "429", "500", "501", "503"),
    ("/v1/placements", "get"): ("422",),
    ("/v1/placements/{id}/request", "get"): ("404", "409", "422"),
    ("/v1/placements/{id}/events", "get"): ("404", "422", "429"),
    ("/v1/placements:batch", "post"): ("400", "408", "413", "415", "422", "503"),
    ("/v1/placements/{id}/timeline", "get"): ("404", "409", "422", "429", "500"),
    ("/v1/placements/{id}/trace", "get"): ("404", "409", "422", "429", "500"),
    ("/v1/placements/{id}/report", "get"): ("404", "409", "422", "429", "500"),
    ("/v1/placements/{id}/export", "get"): ("404", "409", "422", "429", "500"),
    ("/v1/placements:evaluate", "post"): (
        "400",
        "404",
        "408",
        "409",
        "413",
        "415",
        "422",
        "429",
        "500",
        "503",
    ),
    ("/v1/placements:compare", "post"): (
        "400",
        "404",
        "408",
        "409",
        "413",
        "415",
        "422",
        "429",
        "500",
        "503",
    ),
    ("/v1/profiles", "post"): ("400", "408", "413", "415", "422", "429", "500", "501", "503"),
    ("/v1/profiles/{id}", "get"): ("404", "422", "500", "501"),
    ("/v1/estimates", "post"): ("400", "408", "413", "415", "422", "429", "500", "501", "503"),
    ("/v1/placements/{id}", "get"): ("404", "422", "500", "501"),
    ("/v1/placements/{id}", "delete"): ("404", "422", "500", "501"),
    ("/v1/cluster", "get"): ("404", "422", "501", "503"),
    ("/v1/cluster:measure", "post"): ("501", "503"),
    ("/v1/nodes", "get"): ("422",),
    ("/v1/nodes/{name}", "put"): ("400", "404", "408", "413", "415", "422", "503"),
    ("/v1/nodes/{name}", "delete"): ("404", "422"),
    ("/readyz", "get"): ("503",),
}


def describe(app: FastAPI) -> None:
    """Give the application its OpenAPI document, generated on first use."""
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        schema = PlacementRequest.model_json_schema(ref_template=REF)
        graph = ProfileRequest.model_json_schema(ref_template=REF)
        schemas = document["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update(schema.pop("$defs"))
        schemas["PlacementRequest"] = schema
        schemas.update(graph.pop("$defs"))
        schemas["ProfileRequest"] = graph
        estimate = EstimateRequest.model_json_schema(ref_template=REF)
        estimate.pop("$defs")  # added with the two schemas above
        schemas["EstimateRequest"] = estimate
        schemas["Problem"] = PROBLEM_SCHEMA
        paths = document["paths"]
        _describe_body(paths["/v1/placements"]["post"], "PlacementRequest", requests())
        _describe_body(paths["/v1/profiles"]["post"], "ProfileRequest", graphs())
        _describe_body(paths["/v1/estimates"]["post"], "EstimateRequest", estimates())
        _describe_body(paths["/v1/nodes/{name}"]["put"], "Cluster", clusters())
        for model, path, examples in (
            (EvaluateBody, "/v1/placements:evaluate", evaluations()),
            (CompareBody, "/v1/placements:compare", comparisons()),
            (Batch, "/v1/placements:batch", batches()),
        ):
            body = model.model_json_schema(ref_template=REF)
            # The same definitions were added with PlacementRequest.
            body.pop("$defs", None)
            schemas[model.__name__] = body
            _describe_body(
                paths[path]["post"], model.__name__, examples, required=model is not CompareBody
            )
        for (path, method), codes in _PATH_STATUSES.items():
            _describe_problems(document["paths"][path][method], codes)
        app.openapi_schema = document
    return app.openapi_schema


def _describe_body(
    operation: dict[str, Any], model: str, examples: dict[str, Any], *, required: bool = True
) -> None:
    content = {"schema": {"$ref": REF.format(model=model)}, "examples": examples}
    operation["requestBody"] = {"required": required, "content": {"application/json": content}}


def _describe_problems(operation: dict[str, Any], codes: tuple[str, ...]) -> None:
    content = {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}}
    operation["responses"].pop("422", None)
    for code in codes:
        operation["responses"][code] = {"description": PROBLEMS[code], "content": content}
