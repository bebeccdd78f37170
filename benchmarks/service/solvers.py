"""Solvers that occupy a worker during a measurement; workers import them by name."""

from __future__ import annotations

import threading
from typing import Any

from placer.schema import Placement, PlacementRequest


def waiting(request: PlacementRequest, *, progress: Any = None, stop: threading.Event) -> Placement:
    """Occupy a worker but no core until stopped."""
    stop.wait()
    return _placed(request)


def spinning(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event
) -> Placement:
    """Occupy a worker and a core until stopped."""
    while not stop.is_set():
        sum(range(10_000))
    return _placed(request)


def _placed(request: PlacementRequest) -> Placement:
    device = request.devices[0].name
    return Placement(
        status="feasible",
        objective=request.objective,
        layer_devices={layer.name: device for layer in request.profile.layers},
    )
