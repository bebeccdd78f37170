"""Task that measures this machine's devices."""

from __future__ import annotations

import threading

from placer.errors import MissingExtraError

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
            "torch is not installed here, so this node's devices cannot be measured:"
            " pip install 'torch-placer[torch]', or run the image's gpu target"
        ) from error
    return measure_cluster(devices.available()).model_dump_json().encode()
