"""Stored placements in the formats of other engines."""

from __future__ import annotations

import pickle
import threading

from placer.schema import Placement

from ..problem import Problem
from ..workers.worker import Report
from .evaluation import EvaluationInput


def export_task(payload: bytes, report: Report, stop: threading.Event) -> bytes | Problem:
    """Return an Export as JSON; the body of the input is the format's name."""
    # Safe to unpickle: this service pickled it. The client's bytes inside it are only parsed.
    given: EvaluationInput = pickle.loads(payload)
    placement = Placement.model_validate_json(given.stored[0].placement)
    return placement.export(given.body.decode()).model_dump_json().encode()  # type: ignore[arg-type]
