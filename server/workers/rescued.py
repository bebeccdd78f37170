"""What is left of a solve whose process was killed: the best placement that it had told."""

from __future__ import annotations

import threading
from typing import Any

from placer.schema import Placement, PlacementRequest


class Rescued:
    """A solver that answers with what another had found; importable by name, as every solver is.

    Args:
        placement: the Placement as JSON, as it was told.
        why: its solver did not end by itself.
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
        """The placement, which says that it is the best so far.

        Raises:
            PlacementError: it does not meet the request, or is not as good as it says.
        """
        from placer.solver.check import check  # in the worker alone

        placement = Placement.model_validate_json(self._placement)
        check(request, placement)
        return placement.model_copy(
            update={"method": f"{placement.method}, the best so far: {self._why}"}
        )
