"""Device names: parsing, availability and types."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from placer.devices.stand_ins import registries, stand_ins
from placer.errors import InputError

RECORDING = threading.RLock()
"""A lock held while CUDA graphs are recorded, on one stream per device.

Until it is released, no thread may synchronise a whole device or free device memory: CUDA refuses
both and invalidates the recording."""

DeviceLike = int | str | torch.device


CPU = "cpu"

LAST_INDEX = 127
"""Largest device index; torch stores it in a byte, so ``torch.device("cpu:300")`` silently becomes
cpu:44."""


def parse(device: DeviceLike, kind: str | None = None) -> torch.device:
    """Return the ``torch.device``, always with an index, that an index or a string names.

    Args:
        device: ``1``, ``"1"``, ``"cuda:1"``, ``"cpu:2"`` or ``torch.device("cuda", 1)``.
        kind: type of a bare index, ``"cuda"`` or ``"cpu"``; None (default) for CUDA if present.

    Raises:
        InputError: if it names no device.
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
            f"{device!r} is not a device; give an index, 'cuda:0', 'cpu:1' or a torch.device"
        ) from error
    if parsed.type == "meta":
        raise InputError(
            "'meta' holds no data, so no layer can run there; give 'cuda:0' or 'cpu:0'"
        )
    return parsed if parsed.index is not None else torch.device(parsed.type, 0)


def _too_many(device: int | str) -> InputError:
    return InputError(
        f"device {device!r} is beyond what torch can name: "
        f"its devices of a kind are 0 to {LAST_INDEX}"
    )


def default_kind() -> str:
    """Return the device type of a bare index: ``cuda`` if there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else CPU


def available() -> list[torch.device]:
    """Return every CUDA device, or the CPU stand-ins of a machine without GPUs.

    There is one stand-in, or the number given to an enclosing ``logical_devices``.
    """
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device(CPU, index) for index in range(stand_ins[-1] if stand_ins else 1)]


def resolve(
    devices: int | Sequence[DeviceLike] | None, name: str = "devices"
) -> list[torch.device]:
    """Return the devices that a user named.

    Args:
        devices: a count, a list of devices, or None for all available devices.
        name: the argument's name, for messages.

    Raises:
        InputError: if the count is below 1, the list is empty, names a device twice, or names a
            missing device.
    """
    if devices is None:
        return available()
    if isinstance(devices, int):
        devices = _first(devices, name)
    if isinstance(devices, str | torch.device) or not isinstance(devices, Iterable):
        raise InputError(
            f"{name} is {devices!r}; give a list, such as ['cuda:0', 'cuda:1'], or their number, "
            "or omit it to use all available devices"
        )
    parsed = [parse(device) for device in devices]
    if not parsed:
        raise InputError(f"{name} is an empty list; omit it to use all available devices")
    for device in parsed:
        if parsed.count(device) > 1:
            raise InputError(f"{name} names {device} twice; give each device once")
        require(device)
    return parsed


def _first(count: int, name: str) -> list[int]:
    """Return the indices of the first devices."""
    if count < 1 or isinstance(count, bool):
        raise InputError(
            f"{name} is {count!r}; give a number from 1, or a list, or omit it to use all "
            "available devices"
        )
    if count > LAST_INDEX + 1:
        raise InputError(
            f"{name} is {count}, more than the {LAST_INDEX + 1} devices of a kind that torch can "
            "name"
        )
    return list(range(count))


def require(device: torch.device) -> None:
    """Raise an InputError unless the device exists and is a CUDA device or the CPU."""
    if device.type not in ("cuda", CPU):
        raise InputError(
            f"Placer runs on GPUs by CUDA and on the CPU, not on {device}; give 'cuda:0' or 'cpu:0'"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {device}; {_cuda_devices()}")
    if stand_ins and device.type == CPU and (device.index or 0) >= stand_ins[-1]:
        raise InputError(
            f"there is no device {device}; "
            f"logical_devices({stand_ins[-1]}) made cpu:0 to cpu:{stand_ins[-1] - 1}"
        )


def _cuda_devices() -> str:
    """Return which CUDA devices torch sees, and what to give, for messages."""
    count = torch.cuda.device_count()
    if count == 0:
        return "torch sees no CUDA device: give 'cpu:0', or omit the devices"
    return f"torch sees cuda:0 to cuda:{count - 1}" if count > 1 else "torch sees only cuda:0"


def type_name(device: torch.device) -> str:
    """Return the device type as profiles name it.

    ``NVIDIA H200``, say, or ``cpu`` with the processor's architecture.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}"


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all work, issued by any thread."""
    if device.type == "cuda":
        with RECORDING:
            torch.cuda.synchronize(device)


def synchronise_all() -> None:
    """Wait until each GPU on which torch has memory has finished all work, issued by any thread."""
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            synchronise(torch.device("cuda", index))


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make the device the current one inside the block."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    elif registries:
        with registries[-1].only(device):
            yield
    else:
        yield
