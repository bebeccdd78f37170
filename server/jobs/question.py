"""Summary of a request."""

from __future__ import annotations

from dataclasses import dataclass

from placer.schema import Objective


@dataclass(frozen=True)
class Question:
    """Fields of a validated PlacementRequest that the service needs.

    Attributes:
        id: Content hash.
        objective: Objective that is minimised.
        time_limit_s: The solver's time limit in seconds.
        workers: Number of cores that the solver may use.
    """

    id: str
    objective: Objective
    time_limit_s: float
    workers: int = 1
