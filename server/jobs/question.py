"""What a request asks, in short."""

from __future__ import annotations

from dataclasses import dataclass

from placer.schema import Objective


@dataclass(frozen=True)
class Question:
    """What the service needs to know of a PlacementRequest that it has checked.

    Attributes:
        id: the content hash.
        objective: what is made small.
        time_limit_s: the solver's time limit.
        workers: cores that the solver may use.
    """

    id: str
    objective: Objective
    time_limit_s: float
    workers: int = 1
