"""Devices by name: what a user may write, what there is, and of which type it is."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from placer.devices.stand_ins import registries, stand_ins
from placer.errors import InputError

RECORDING = threading.RLock()
"""Held while CUDA graphs are recorded, on one stream a device.

Meanwhile no thread may wait for the whole of a device, or give memory back: that fails, and breaks
the recording off. """

DeviceLike = int | str | torch.device


CPU = "cpu"

LAST_INDEX = 127
"""torch keeps indices in a byte; ``torch.device("cpu:300")`` is cpu:44 without a word."""


def parse(device: DeviceLike, kind: str | None = None) -> torch.device:
    """A device from an index, a string or a ``torch.device``, always with an index.

    Args:
        device: ``1``, ``"1"``, ``"cuda:1"``, ``"cpu:2"`` or ``torch.device("cuda", 1)``.
        kind: ``"cuda"`` or ``"cpu"``: what a bare index means; CUDA where there is any, if None.

    Raises:
        InputError: it names no device.
    """
    if isinstance(device, str) and device.isdecimal():
        device = int(device)
    if (
        isinstance(device, str)
        and (index := device.rpartition(":")[2]).isdecimal()
        and int(index) > LAST_INDEX
    ):
        raise _too_many(device)
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise InputError(f"device index {device} is negative; the first device is 0")
        if device > LAST_INDEX:
            raise _too_many(device)
        return torch.device(kind or default_kind(), device)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{device!r} is no device; give an index, 'cuda:0', 'cpu:1' or a torch.device"
        ) from error
    if parsed.type == "meta":
        raise InputError(
            "'meta' holds no data, so no layer can run there; give 'cuda:0' or 'cpu:0'"
        )
    return parsed if parsed.index is not None else torch.device(parsed.type, 0)


def _too_many(device: int | str) -> InputError:
    return InputError(
        f"device {device!r} is beyond what torch can name: its devices of a kind are 0 to {LAST_INDEX}"
    )


def default_kind() -> str:
    """The kind of device that a bare index means: ``cuda`` where there is any, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else CPU


def available() -> list[torch.device]:
    """Every CUDA device, or, without any, one CPU stand-in (as many as ``logical_devices`` was
    given, inside it).
    """
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device(CPU, index) for index in range(stand_ins[-1] if stand_ins else 1)]


def resolve(devices: int | Sequence[DeviceLike] | None) -> list[torch.device]:
    """The devices that a user named: a count, a list of devices, or None for all that are
    available.

    Raises:
        InputError: none, one named twice, or one that is not there.
    """
    if devices is None:
        return available()
    if isinstance(devices, int):
        devices = list(range(devices))
    if isinstance(devices, str | torch.device) or not isinstance(devices, Iterable):
        raise InputError(
            f"devices are {devices!r}; give a list, such as ['cuda:0', 'cuda:1'], or their number; "
            "leave them out to use all that are available"
        )
    parsed = [parse(device) for device in devices]
    if not parsed:
        raise InputError(
            "devices has none in it, or is 0; leave it out to use all that are available"
        )
    for device in parsed:
        if parsed.count(device) > 1:
            raise InputError(f"device {device} is given twice")
        require(device)
    return parsed


def require(device: torch.device) -> None:
    """Raise an InputError if the device is not there, or of a kind that nothing here runs on."""
    if device.type not in ("cuda", CPU):
        raise InputError(
            f"Placer runs on GPUs by CUDA and on the CPU, not on {device}; give 'cuda:0' or 'cpu:0'"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no {device}; torch sees {torch.cuda.device_count()} CUDA devices"
        )
    if stand_ins and device.type == CPU and (device.index or 0) >= stand_ins[-1]:
        raise InputError(
            f"there is no {device}; logical_devices({stand_ins[-1]}) made cpu:0 to cpu:{stand_ins[-1] - 1}"
        )


def type_name(device: torch.device) -> str:
    """The device type as a profile names it: ``NVIDIA H200``, or ``cpu`` with the processor's
    architecture.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}"


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it, by whichever thread."""
    if device.type == "cuda":
        with RECORDING:
            torch.cuda.synchronize(device)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make the device the current one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    elif registries:
        with registries[-1].only(device):
            yield
    else:
        yield
