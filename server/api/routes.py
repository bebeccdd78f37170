"""All routes of the service."""

from __future__ import annotations

from . import (
    batch,
    estimates,
    evaluations,
    events,
    health,
    history,
    nodes,
    pages,
    placements,
    presentation,
    profiles,
)

ROUTERS = (
    placements.router,
    batch.router,
    history.router,
    events.router,
    evaluations.router,
    presentation.router,
    profiles.router,
    estimates.router,
    nodes.router,
    pages.router,
    health.router,
)
