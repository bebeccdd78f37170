"""All errors that Placer raises on purpose.

    PlacerError
    ├── InputError            a value that was given cannot be used (also a ValueError)
    │   ├── ProfileError      a profile or cluster contradicts itself
    │   ├── BatchError        micro-batches do not give what the whole batch gives
    │   └── PlacementError    a placement or layer map does not fit the model or the devices
    ├── CaptureError          the model's layers cannot be captured, not even by hooks
    ├── ProfilingError        a layer or link could not be measured
    ├── MixedDevicesError     an operation met tensors of two devices under logical_devices
    │                         (also a RuntimeError)
    ├── StageError            a layer failed while a pipeline ran it (also a RuntimeError)
    ├── InfeasibleError       no placement meets the requirements
    ├── SolveLimitError       the time ran out before any placement was found
    ├── ServerError           the service answered with a problem
    │   ├── UnreachableError  the service could not be reached
    │   └── TimeoutExceeded   the service did not answer in time
    └── MissingExtraError     an optional package is not installed (also an ImportError)

A message names the wrong values in the user's words, and says what to do.
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
    """Return the type of a value for a message: ``a Linear``, ``an int``, ``None``.

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
    """A value that was given cannot be used."""


class BatchError(InputError):
    """Micro-batches do not give what the whole batch gives: another output, or another loss."""


class ProfileError(InputError):
    """A profile or cluster contradicts itself."""


class PlacementError(InputError):
    """A placement or a layer map does not fit the model or the devices."""


class CaptureError(PlacerError):
    """The layers of a model cannot be captured."""


class ProfilingError(PlacerError):
    """A layer or a link could not be measured."""


class MixedDevicesError(PlacerError, RuntimeError):
    """An operation met tensors of two devices, under ``placer.testing.logical_devices``."""


class StageError(PlacerError, RuntimeError):
    """A layer failed while a pipeline ran it; ``__cause__`` is what it raised.

    Attributes:
        device: where it ran.
        layer: its name; None where the failure belongs to no layer.
        batch: the number of the batch, or of the micro-batch, from 0.
    """

    def __init__(self, message: str, device: str, layer: str | None, batch: int) -> None:
        super().__init__(message)
        self.device, self.layer, self.batch = device, layer, batch


class InfeasibleError(PlacerError):
    """No placement meets the requirements; the message names those that conflict."""


class SolveLimitError(PlacerError):
    """The time ran out before any placement was found."""


class ServerError(PlacerError):
    """The service answered with a problem.

    Attributes:
        status: the HTTP status, or None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ServerError):
    """The service could not be reached."""


class TimeoutExceeded(ServerError):
    """The service did not answer in time."""


class MissingExtraError(PlacerError, ImportError):
    """An optional package is not installed; the message names the pip command."""
