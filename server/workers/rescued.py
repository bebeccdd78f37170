"""Solver that returns the best placement of a solve whose process was killed."""

from __future__ import annotations

import threading
from typing import Any

from placer.schema import Placement, PlacementRequest


class Rescued:
    """Solver that returns a given placement after a check; importable by name, like every solver.

    Args:
        placement: The reported Placement as JSON.
        why: Reason why the original solver did not end by itself.
    """

    def __init__(self, placement: bytes, why: str) -> None:
        self._placement = placement
        self._why = why

    def __call__(
        self,
        request: PlacementRequest,
        *,
        progress: Any = None,
        stop: threading.Event | None = None,
    ) -> Placement:
        """Return the placement, marked as the best so far.

        Raises:
            PlacementError: It does not meet the request, or its values are wrong.
        """
        # Imported here, since only the worker process needs it.
        from placer.solver.check import check

        placement = Placement.model_validate_json(self._placement)
        check(request, placement)
        return placement.model_copy(
            update={"method": f"{placement.method}, the best so far: {self._why}"}
        )
