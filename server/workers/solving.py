"""Task of a solve: from a request body to its placement, in the parts that the store keeps."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from placer.errors import InputError
from placer.schema import Placement, PlacementRequest, Profile

from .incumbent_reporter import IncumbentReporter
from .worker import Report

if TYPE_CHECKING:
    from placer.solver.search import Incumbent

# Function ``solver(request, *, progress=None, stop=None) -> Placement``, importable by name.
Solver = Callable[..., Placement]


class Solved(NamedTuple):
    """A placement and its question, in the parts that the store keeps.

    Attributes:
        placement: The Placement as JSON.
        profile_id: The profile's content hash.
        profile: The Profile as JSON.
        question: The rest of the PlacementRequest as JSON.
        summary: The fields that lists of placements show, as JSON.
    """

    placement: bytes
    profile_id: str
    profile: bytes
    question: bytes
    summary: bytes


class SolveTask:
    """Task that parses a PlacementRequest, solves it and serializes the Placement.

    Args:
        solver: Function that solves the request.
        key: Id of the placement: the hash of the request in the schema version in which it was
            accepted.
    """

    def __init__(self, solver: Solver, key: str) -> None:
        self._solver, self._key = solver, key

    def __call__(self, payload: bytes, report: Report, stop: threading.Event) -> Solved:
        """Run the task; see ``Task``."""
        request = read_request(payload)
        reporter = IncumbentReporter(report.best)

        def progress(found: Incumbent) -> None:
            report(found.objective_value, found.bound)
            reporter.report(found)

        placement = self._solver(request, progress=progress, stop=stop)
        placement = placement.model_copy(update={"id": self._key})
        profile = json.dumps(_without_defaults(request.profile)).encode()
        question = json.dumps(_without_defaults(request, exclude={"profile"})).encode()
        summary = json.dumps(summary_of(request, placement)).encode()
        profile_id = hashlib.sha256(request.profile.model_dump_json().encode()).hexdigest()[:32]
        return Solved(placement.model_dump_json().encode(), profile_id, profile, question, summary)


def read_request(payload: bytes) -> PlacementRequest:
    """Parse a request that was validated on arrival, possibly by another version of Placer.

    Raises:
        InputError: This version does not accept the request.
    """
    try:
        return PlacementRequest.model_validate_json(payload)
    except InputError as error:
        raise InputError(f"this version of Placer does not accept the request: {error}") from error


def summary_of(request: PlacementRequest, placement: Placement) -> dict[str, Any]:
    """Return the fields that lists of placements show."""
    return {
        "model": request.profile.model,
        "layers": len(request.profile.layers),
        "devices": len(request.devices),
        "used_devices": len(set(placement.layer_devices.values())),
        "status": placement.status,
        "objective": placement.objective,
        "objective_value": placement.objective_value,
        "gap": placement.gap,
        "training": request.is_training,
        "chunks": request.chunks,
    }


def _without_defaults(subject: PlacementRequest | Profile, **options: Any) -> dict[str, Any]:
    """Return the fields that are not default, and the schema version for later readers."""
    content = subject.model_dump(mode="json", exclude_defaults=True, **options)
    return {"schema_version": subject.schema_version, **content}


def default_solver(request: PlacementRequest, **options: Any) -> Placement:
    """Solve with Placer's own solver, which only worker processes import."""
    from placer.solver.solve import solve

    return solve(request, **options)


class RecoveredSolver:
    """Solver that returns the best placement of a solve whose process was killed.

    It checks the placement first. Like every solver it is importable by name.

    Args:
        placement: The reported Placement as JSON.
        reason: Reason why the original solver did not end by itself.
    """

    def __init__(self, placement: bytes, reason: str) -> None:
        self._placement = placement
        self._reason = reason

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
            update={"method": f"{placement.method}, the best so far: {self._reason}"}
        )
