"""All routes of the service."""

from __future__ import annotations

from fastapi import FastAPI

from . import batch, events, health, history, judging, nodes, pages, placements, profiles, shown

ROUTERS = (
    placements.router,
    batch.router,
    history.router,
    events.router,
    judging.router,
    shown.router,
    profiles.router,
    nodes.router,
    pages.router,
    health.router,
)


def include_routes(app: FastAPI) -> None:
    """Add all routes to the application."""
    for router in ROUTERS:
        app.include_router(router)
