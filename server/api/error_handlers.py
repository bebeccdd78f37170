"""Exception handlers that turn every error into problem+json."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from ..problem import Problem, clip, defect, invalid_parameter, no_such, store_away, wanted
from ..store.database import StoreError
from ..web.guard import supports_head
from .routes import ROUTERS

log = logging.getLogger("placer_server")


def handle_errors(app: FastAPI) -> None:
    """Register the exception handlers."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(StoreError, _on_store)
    app.add_exception_handler(Exception, _on_defect)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = clip(request.url.path, 200)
    if error.status_code == 404:
        problem = no_such("path", f"there is nothing at {path}; see /openapi.json")
    elif error.status_code == 405:
        allowed = ", ".join(_methods(request))
        detail = f"{clip(request.method, 40)} is not allowed on {path}; use {allowed}"
        problem = Problem(
            405, "method", "The method is not allowed", detail, headers={"Allow": allowed}
        )
    else:
        status, detail = error.status_code, str(error.detail)
        problem = Problem(status, "http", "The request failed", detail, headers=error.headers)
    return problem.response()


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes with the request's path.

    The framework names the methods of the first route only.
    """
    every = [route for router in ROUTERS for route in router.routes] + list(request.app.routes)
    routes = [route for route in every if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return sorted(
        methods | {"HEAD"} if "GET" in methods and supports_head(request.url.path) else methods
    )


async def _on_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [
        {
            "pointer": " ".join(str(part) for part in item["loc"]),
            "detail": "is missing; add it to the query"
            if item["type"] == "missing"
            else f"{wanted(item['msg'])}, not {clip(repr(item['input']), 80)}",
        }
        for item in error.errors()
    ]
    detail = "; ".join(
        f"{fault['pointer'].removeprefix('query ')}: {fault['detail']}" for fault in faults
    )
    return invalid_parameter(detail, faults).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    detail = "the client disconnected before the body was complete"
    return Problem(400, "disconnected", "The body is incomplete", detail).response()


async def _on_store(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s", request.method, clip(request.url.path, 200), error)
    detail = (
        "the store cannot be used at the moment; accepted requests are kept, so try again later"
    )
    return store_away(detail).response()


async def _on_defect(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, clip(request.url.path, 200), exc_info=error)
    return defect().response()
