"""What the service tells of its solves: past ones as a list, one under way as its progress."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from placer.schema.base import Objective, Status, Wire


class Progress(Wire):
    """How far a solve is that has not ended.

    Attributes:
        id: of the placement to be.
        status: whether it waits for a worker or runs.
        incumbent: the best objective value so far, ms or bytes; None while there is none.
        bound: the proven lower bound so far; None while there is none.
        gap: (incumbent - bound) / incumbent, as far as both are there.
        elapsed_s: since it was asked.
    """

    id: str
    status: Literal["queued", "running"]
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    elapsed_s: Annotated[float, Field(ge=0)] = 0.0


class Summary(Wire):
    """A placement in a list.

    Attributes:
        id: of the placement.
        profile_id: of its profile, for ``/v1/profiles/{id}``; None where it is not kept.
        complete: whether the solver had all its time.
        version: of the Placer that made it.
        created_s: when, in seconds since 1970.
        model: its name.
        layers: how many there are.
        devices: how many could be used.
        used_devices: how many hold layers.
        status: see ``Placement``, as all that follow.
    """

    id: str
    profile_id: str | None
    complete: bool
    version: str
    created_s: float
    model: str = ""
    layers: int | None = None
    devices: int | None = None
    used_devices: int | None = None
    status: Status | None = None
    objective: Objective | None = None
    objective_value: float | None = None
    gap: float | None = None
    training: bool | None = None
    chunks: int | None = None


class PlacementPage(Wire):
    """Some past placements, newest first.

    Attributes:
        placements: of this page.
        next: the cursor of the next page; None on the last.
    """

    placements: tuple[Summary, ...]
    next: str | None = None
