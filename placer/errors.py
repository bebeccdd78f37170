"""The errors that Placer raises on purpose.

    PlacerError
    ├── InputError            an argument is invalid (also a ValueError)
    │   ├── ProfileError      a profile or cluster contradicts itself
    │   ├── BatchError        micro-batches give other results than the whole batch
    │   └── PlacementError    a placement or layer map does not fit the model or the devices
    ├── CaptureError          the model's layer graph cannot be obtained, not even through hooks
    ├── ProfilingError        a layer or link could not be measured
    ├── MixedDevicesError     under logical_devices, an operation read tensors of two devices
    │                         (also a RuntimeError)
    ├── StageError            a layer failed while a pipeline ran it (also a RuntimeError)
    ├── InfeasibleError       no placement meets the requirements
    ├── SolveLimitError       the time limit was reached before any placement was found
    ├── ServerError           the service answered with a problem
    │   ├── UnreachableError  the service could not be reached
    │   └── TimeoutExceeded   the service did not answer in time
    └── MissingExtraError     an optional package is not installed (also an ImportError)

A message states the invalid values in the user's words, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "CaptureError",
    "InfeasibleError",
    "InputError",
    "MissingExtraError",
    "MixedDevicesError",
    "PlacementError",
    "PlacerError",
    "ProfileError",
    "ProfilingError",
    "ServerError",
    "SolveLimitError",
    "StageError",
    "TimeoutExceeded",
    "UnreachableError",
    "kind_of",
]


def kind_of(given: object) -> str:
    """Return a description of a value's type for messages: ``a Linear``, ``an int``, ``None``.

    Args:
        given: the value.
    """
    if given is None:
        return "None"
    name = type(given).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


class PlacerError(Exception):
    """The base of every error that Placer raises on purpose."""


class InputError(PlacerError, ValueError):
    """An invalid argument."""


class BatchError(InputError):
    """A difference between results or losses of micro-batches and of the whole batch."""


class ProfileError(InputError):
    """A contradiction within a profile or cluster."""


class PlacementError(InputError):
    """A placement or layer map that does not fit the model or the devices."""


class CaptureError(PlacerError):
    """A failure to obtain a model's layer graph."""


class ProfilingError(PlacerError):
    """A failure to measure a layer or a link."""


class MixedDevicesError(PlacerError, RuntimeError):
    """An operation on tensors of two devices, under ``placer.testing.logical_devices``."""


class StageError(PlacerError, RuntimeError):
    """A failure of a layer in a pipeline; ``__cause__`` is the layer's error.

    Attributes:
        device: where it ran.
        layer: its name; None if the failure belongs to no layer.
        batch: the number of the batch, or of the micro-batch, from 0.
    """

    def __init__(self, message: str, device: str, layer: str | None, batch: int) -> None:
        super().__init__(message)
        self.device, self.layer, self.batch = device, layer, batch


class InfeasibleError(PlacerError):
    """Requirements that no placement meets; the message names those in conflict."""


class SolveLimitError(PlacerError):
    """A time limit reached before any placement was found."""


class ServerError(PlacerError):
    """A problem reported by the service.

    Attributes:
        status: the HTTP status; None if no answer arrived.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ServerError):
    """A service that could not be reached."""


class TimeoutExceeded(ServerError):
    """A service that did not answer in time."""


class MissingExtraError(PlacerError, ImportError):
    """An optional package that is not installed; the message gives the pip command."""
