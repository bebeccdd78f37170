"""The service's solves: a list of past ones, and the progress of a running one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from placer.schema.base import Objective, Status, Wire


class Progress(Wire):
    """The progress of an unfinished solve.

    Attributes:
        id: of the future placement.
        status: whether it waits for a worker or runs.
        incumbent: the best objective value so far, ms or bytes; None without one.
        bound: the proven lower bound so far; None without one.
        gap: (incumbent - bound) / incumbent; None without both.
        elapsed_s: seconds since the request.
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
        profile_id: of its profile, for ``/v1/profiles/{id}``; None if it is not stored.
        complete: whether the answer is proven, or the solver was not stopped early.
        version: of the Placer that made it.
        created_s: seconds since 1970.
        model: its name.
        layers: number of layers.
        devices: number of available devices.
        used_devices: number of devices that hold layers.
        status: see ``Placement``, as for all further fields.
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
    """A page of past placements, newest first.

    Attributes:
        placements: of this page.
        next: the cursor of the next page; None on the last page.
    """

    placements: tuple[Summary, ...]
    next: str | None = None
