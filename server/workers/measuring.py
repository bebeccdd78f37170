"""Tasks that need torch: measurements of this machine's devices, and of graphs that clients send.

Only the processes of these tasks import torch, and only for a valid graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from placer.errors import MissingExtraError
from placer.schema import EstimateRequest
from placer.schema.graph import ProfileRequest

from ..problem import read_body
from .worker import Report

_NODE_WITH_TORCH = (
    "send them to a node that runs the image's gpu target, or pip install 'torch-placer[torch]'"
)


def measure_devices(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Measure this machine's devices and the links between them, and return the Cluster as JSON.

    Raises:
        MissingExtraError: torch is not installed.
    """
    with _torch_for(
        "its devices cannot be measured: pip install 'torch-placer[torch]', or run the image's gpu"
        " target"
    ):
        from placer import devices
        from placer.profiler.links.cluster import measure_cluster
    return measure_cluster(devices.available()).model_dump_json().encode()


def profile_graph(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Replay the graph of a ProfileRequest, and return its Profile as JSON.

    Raises:
        Problem: The payload is not a ProfileRequest.
        MissingExtraError: torch is not installed.
    """
    request = read_body(ProfileRequest, payload, strict=False)
    with _torch_for(f"graphs cannot be measured: {_NODE_WITH_TORCH}"):
        from placer.profiler.remote.replay import replay
    return replay(request).to_json().encode()


def estimate_graph(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return the Estimate of an EstimateRequest as JSON; the graph runs on fake tensors.

    Raises:
        Problem: The payload is not an EstimateRequest.
        MissingExtraError: torch is not installed.
    """
    request = read_body(EstimateRequest, payload, strict=False)
    with _torch_for(f"graphs cannot be estimated: {_NODE_WITH_TORCH}"):
        from placer.estimator.graph_estimate import estimated_request
    return estimated_request(request).model_dump_json().encode()


@contextmanager
def _torch_for(work: str) -> Iterator[None]:
    """Raise a MissingExtraError that says which work is impossible if torch is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        reason = f"torch is not installed on this node, so {work}"
        raise MissingExtraError(reason) from error
