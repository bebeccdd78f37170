"""Conditions of a measurement: device, driver, libraries, settings, Placer's own code, and load.

Runs under equal conditions share measurements. Other conditions either do not change a layer's
time, or cannot be detected (see ``devices.speed_facts``). In the latter case use ``placer cache
clear`` or ``cache=False``.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from placer import devices
from placer.optimizers import OptimizerLike

_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)

MOST_WAITING = 0.4
"""Largest acceptable waiting share of a thread's runnable time. Three processes that share two
cores fairly wait for a third of it."""

# Minimum runnable time of a thread in ns: a few time slices of another program distort less.
_LEAST_NS = 1e8

_TASKS = Path("/proc/self/task")


def conditions(device: torch.device) -> dict[str, Any]:
    """Return the current conditions of measurements on this device, as facts for a key."""
    return {
        "type": devices.type_name(device),
        "device": devices.speed_facts(device),
        "versions": _versions(),
        "settings": {name: _setting(read) for name, read in _settings(device).items()},
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "measured_by": _code("capture", "profiler", "devices"),
    }


def capture_facts() -> dict[str, Any]:
    """Return the conditions of a capture besides the model, as facts for a key."""
    return {"versions": _versions(), "captured_by": _code("capture", "profiler")}


def _versions() -> dict[str, str]:
    cudnn: Any = torch.backends.cudnn
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        "cudnn": str(cudnn.version()) if torch.version.cuda else "none",
    }


def _settings(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return readers of torch's settings that influence kernel selection, by name."""
    cudnn: Any = torch.backends.cudnn
    attention, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    return {
        "matmul_precision": torch.get_float32_matmul_precision,
        "matmul_tf32": torch._C._get_cublas_allow_tf32,
        "cudnn_tf32": torch._C._get_cudnn_allow_tf32,
        "fp32_precision": lambda: (
            matmul.fp32_precision,
            cudnn.conv.fp32_precision,
            cudnn.rnn.fp32_precision,
        ),
        "half_sums": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        "bfloat16_sums": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        "fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        "cudnn": lambda: (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "mkldnn": torch._C._get_mkldnn_enabled,
        "flash": attention.flash_sdp_enabled,
        "memory_efficient": attention.mem_efficient_sdp_enabled,
        "math": attention.math_sdp_enabled,
        "cudnn_attention": attention.cudnn_sdp_enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "autocast": lambda: (
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        ),
        "autocast_cache": torch.is_autocast_cache_enabled,
    }


def _setting(read: Callable[[], Any]) -> str:
    try:
        return repr(read())
    except Exception:
        # torch refuses to read a legacy setting after its replacement was set, and some versions
        # lack some settings
        return "unknown"


def optimizer_facts(optimizer: OptimizerLike) -> Any:
    """Return the facts that an optimizer's step time depends on; None if they are unknown.

    Numbers count only as zero or non-zero: a learning rate changes no kernel, but momentum does.
    """
    if optimizer is None or isinstance(optimizer, str):
        return [str(optimizer).lower()]
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [_options(group, "params", "param_names") for group in optimizer.param_groups]
        of_kind = optimizer_facts(type(optimizer))
        return None if of_kind is None else [of_kind, groups]
    if isinstance(optimizer, list | tuple):
        facts = [optimizer_facts(one) for one in optimizer]
        return None if None in facts else ["list", *facts]
    if isinstance(optimizer, partial):
        inner = optimizer_facts(optimizer.func)
        return None if inner is None or optimizer.args else [inner, _options(optimizer.keywords)]
    name = f"{getattr(optimizer, '__module__', '')}.{getattr(optimizer, '__qualname__', '')}"
    if name.startswith("torch.optim."):
        return [name]
    if not isinstance(optimizer, type):  # a function may depend on anything
        return None
    sources = _own_sources(optimizer)
    return None if sources is None else [name, *sources]


def _own_sources(kind: type) -> list[str] | None:
    """Return the sources of a class and its bases in the same module; None if unavailable."""
    own = [base for base in kind.__mro__ if base.__module__ == kind.__module__]
    try:
        return [inspect.getsource(base) for base in own]
    except (OSError, TypeError):  # defined interactively
        return None


def _option(value: Any) -> str:
    if isinstance(value, (bool, str, type(None))):
        return repr(value)
    if isinstance(value, (int, float)):
        return f"{type(value).__name__} {'not ' if value else ''}zero"
    return type(value).__name__


@cache
def _code(*packages: str) -> str:
    """Return a hash of Placer's sources: a change in how it measures outdates measurements."""
    total = hashlib.sha256()
    for path in source_files(*packages):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def source_files(*packages: str) -> list[Path]:
    """Return the source files of Placer's packages and subpackages, sorted by path."""
    root = Path(__file__).parents[1]
    return sorted(path for package in packages for path in (root / package).rglob("*.py"))


def _options(given: dict[str, Any], *left_out: str) -> dict[str, Any]:
    """Return the facts about options, by name, without those in ``left_out``."""
    return {name: _option(value) for name, value in given.items() if name not in left_out}


class CoreWaits:
    """How long this process's threads waited for a core, since the creation of this object.

    Threads of a pass wait for one another, so the longest-waiting thread shows how much the times
    are inflated. The spread of timings cannot show this: on a permanently busy CPU all of them are
    equally long. Linux counts for each thread::

        /proc/self/task/1234/schedstat:  1520000000 4570000000 412
                                         ns it ran  ns it waited for a core
    """

    def __init__(self) -> None:
        self._before = thread_times()

    def share(self) -> float:
        """Return the waiting share of the longest-waiting thread; 0 if the system has no counts."""
        shares = [0.0]
        for thread, (ran, waited) in thread_times().items():
            ran_before, waited_before = self._before.get(thread, (0, 0))
            # time sleeping or blocked is neither running nor waiting for a core
            could_run = ran - ran_before + waited - waited_before
            if could_run > _LEAST_NS:
                shares.append((waited - waited_before) / could_run)
        return max(shares)


def thread_times() -> dict[str, tuple[int, int]]:
    """Return for each thread its nanoseconds of running and of waiting for a core."""
    times: dict[str, tuple[int, int]] = {}
    for path in _TASKS.glob("*/schedstat"):
        # the thread has just ended, or the system uses another format
        with suppress(OSError, ValueError):
            ran, waited, _ = map(int, path.read_text().split())
            times[path.parent.name] = ran, waited
    return times


def busy(kind: str, share: float) -> str:
    """Return a warning about contended CPU timings and its remedy; empty if all is well."""
    if share <= MOST_WAITING:
        return ""
    return (
        f"while layers were timed on {kind}, a thread waited for a core {share:.0%} of its time: "
        "other programs, or more threads than cores, kept it busy, and times may be many times too "
        "long; when it is idle, or with fewer threads (torch.set_num_threads), clear the cache "
        "(placer cache clear) and profile again"
    )
