"""What one device is, beyond its type: what its speed depends on, and which it is among its like."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch


def speed_facts(device: torch.device) -> dict[str, str]:
    """What the speed of a device depends on, beside what runs there.

    Of a CUDA device: its type, size and driver, and its power limit where ``nvidia-ml-py`` is
    installed. Of the CPU: the processor, its cores, and the threads that torch uses. What cannot be
    asked is not among them: clocks that were locked, heat, and what other programs do at the time.
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
    """Which device of this machine it is, also after a restart under another index; all CPU
    stand-ins are one.
    """
    if device.type != "cuda":
        return device.type
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def host_name() -> str:
    """The name of this machine."""
    return platform.node()


def boot_id() -> str:
    """The same until this machine starts again; empty where that cannot be told."""
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
        # not installed, no right to ask, or a device that does not tell
        return "unknown"


@cache
def _management() -> Any:
    """NVIDIA's management library, begun once."""
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
