"""Tasks that measure on this machine: its devices and links, and graphs that clients send."""

from __future__ import annotations

import threading

from pydantic import ValidationError

from placer.errors import MissingExtraError
from placer.schema.base import read_json
from placer.schema.graph import ProfileRequest

from ..problem import Problem, invalid_body
from .worker import Report


def measure_devices(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Measure this machine's devices and the links between them, and return the Cluster as JSON.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        from placer import devices
        from placer.profiler.links.cluster import measure_cluster
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "torch is not installed on this node, so its devices cannot be measured:"
            " pip install 'torch-placer[torch]', or run the image's gpu target"
        ) from error
    return measure_cluster(devices.available()).model_dump_json().encode()


def profile_graph(payload: bytes, report: Report, stop: threading.Event) -> bytes | Problem:
    """Replay a graph and return its Profile as JSON, or the body's problem.

    Only this task's process imports torch, and only for a valid graph.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        request = read_json(ProfileRequest, payload)
    except ValidationError as error:
        return invalid_body(error, ProfileRequest)
    try:
        from placer.profiler.remote.replay import replay
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "torch is not installed on this node, so graphs cannot be measured: send them to a"
            " node that runs the image's gpu target, or pip install 'torch-placer[torch]'"
        ) from error
    return replay(request).to_json().encode()
