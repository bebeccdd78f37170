"""The identity of a device: the properties that its speed depends on, and its UUID."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch


def speed_facts(device: torch.device) -> dict[str, str]:
    """Return the properties of a device that its speed depends on.

    For a CUDA device: name, memory, multiprocessors, driver, and the power limit if
    ``nvidia-ml-py`` is installed. For the CPU: processor, cores, torch's threads and vector
    extensions. Locked clocks, temperature and other programs cannot be queried and are not
    included.
    """
    if device.type != "cuda":
        return {
            "processor": _processor(),
            "cores": str(os.cpu_count()),
            "threads": str(torch.get_num_threads()),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        }
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "memory": str(found.total_memory),
        "multiprocessors": str(found.multi_processor_count),
        "driver": _driver(),
        "power_limit_mw": _power_limit_mw(device),
    }


def place(device: torch.device) -> str:
    """Return an identifier of the device that survives restarts and reindexing.

    A CUDA device has its UUID; all CPU stand-ins share one identifier.
    """
    if device.type != "cuda":
        return device.type
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def host_name() -> str:
    """Return the name of this machine."""
    return platform.node()


def boot_id() -> str:
    """Return an identifier that changes when the machine restarts; empty if unknown."""
    return _first_line("/proc/sys/kernel/random/boot_id")


@cache
def _driver() -> str:
    return _first_line("/proc/driver/nvidia/version") or str(torch.version.cuda)


@cache
def _processor() -> str:
    lines = _text("/proc/cpuinfo").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _power_limit_mw(device: torch.device) -> str:
    try:
        pynvml = _management()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{place(device).removeprefix('GPU-')}")
        return str(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    except Exception:
        # the package is missing, permission is denied, or the device does not report it
        return "unknown"


@cache
def _management() -> Any:
    """Return NVIDIA's management library, initialised once."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _first_line(path: str) -> str:
    return (_text(path).splitlines() or [""])[0].strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
