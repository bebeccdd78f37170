"""A stored placement of several models, divided into a placement of each."""

from __future__ import annotations

import pickle
import threading

from placer.schema import JointPlacement, JointRequest, Placement

from ..workers.worker import Report
from .evaluation import EvaluationInput


def together_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return the JointPlacement of a JointRequest and its joint placement, all as JSON."""
    # Imported here, since only the worker process needs the solver.
    from placer.solver.together import divided

    # Safe to unpickle: this service pickled it. The client's bytes inside it are only parsed.
    given: EvaluationInput = pickle.loads(payload)
    joint = Placement.model_validate_json(given.stored[0].placement)
    found: JointPlacement = divided(JointRequest.model_validate_json(given.body), joint)
    return found.model_dump_json().encode()
