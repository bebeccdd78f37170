"""All routes of the service."""

from __future__ import annotations

from . import (
    batch,
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

ROUTERS = tuple(
    module.router
    for module in (
        placements,
        batch,
        history,
        events,
        evaluations,
        presentation,
        profiles,
        nodes,
        pages,
        health,
    )
)
