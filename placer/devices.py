"""The one place that knows CUDA from CPU: device names, streams, events, synchronisation, memory figures, copies.

A CPU stand-in is ``cpu:0``, ``cpu:1``, ...: the same memory and cores as every other, a device by name alone, until
``placer.testing.logical_devices`` makes it behave like one.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from placer.errors import InputError

DeviceLike = int | str | torch.device

CPU = "cpu"


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
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise InputError(f"device index {device} is negative; the first device is 0")
        return torch.device(kind or default_kind(), device)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{device!r} is no device; give an index, 'cuda:0', 'cpu:1' or a torch.device") from error
    if parsed.type == "meta":
        raise InputError("'meta' holds no data, so no layer can run there; give 'cuda:0' or 'cpu:0'")
    return parsed if parsed.index is not None else torch.device(parsed.type, 0)


def default_kind() -> str:
    """The kind of device that a bare index means: ``cuda`` where there is any, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else CPU


def available() -> list[torch.device]:
    """Every CUDA device, or, without any, one CPU stand-in (as many as ``logical_devices`` was given, inside it)."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device(CPU, index) for index in range(_stand_ins[-1] if _stand_ins else 1)]


def resolve(devices: int | Sequence[DeviceLike] | None) -> list[torch.device]:
    """The devices that a user named: a count, a list of devices, or None for all that are available.

    Raises:
        InputError: none, one named twice, or one that is not there.
    """
    if devices is None:
        return available()
    if isinstance(devices, int):
        devices = list(range(devices))
    parsed = [parse(device) for device in devices]
    if not parsed:
        raise InputError("no device was given; leave devices out to use all that are available")
    for device in parsed:
        if parsed.count(device) > 1:
            raise InputError(f"device {device} is given twice")
        require(device)
    return parsed


def require(device: torch.device) -> None:
    """Raise an InputError if the device is not there."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no {device}; torch sees {torch.cuda.device_count()} CUDA devices")
    if _stand_ins and device.type == CPU and (device.index or 0) >= _stand_ins[-1]:
        raise InputError(
            f"there is no {device}; logical_devices({_stand_ins[-1]}) made cpu:0 to cpu:{_stand_ins[-1] - 1}"
        )


def type_name(device: torch.device) -> str:
    """The device type as a profile names it: ``NVIDIA H200``, or ``cpu`` with the processor's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}"


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make the device the current one."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    elif _registries:
        with _registries[-1].only(device):
            yield
    else:
        yield


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Free and total memory of the device, in bytes; a stand-in shares the machine's memory with all others."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(device: torch.device, run: Callable[[], Any]) -> int | None:
    """The most memory that ``run`` held beyond what was held before it, in bytes; None where no allocator counts it."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def context_bytes(device: torch.device) -> int:
    """What the device holds that torch's allocator does not count, in bytes: contexts, kernels, other programs."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total) - int(free) - int(torch.cuda.memory_reserved(device)))


def library_bytes(device: torch.device) -> int:
    """What libraries keep of torch's memory once they have run forwards and backwards on one stream, in bytes."""
    return _recorder(device).library_bytes if device.type == "cuda" else 0


@dataclass(frozen=True)
class _Recorder:
    """A stream to record on, and what libraries took for it: cuBLAS keeps a workspace for each stream and thread."""

    stream: torch.cuda.Stream
    library_bytes: int


@cache
def _recorder(device: torch.device) -> _Recorder:
    """One for each device: every further stream would cost another workspace."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        with torch.cuda.stream(stream), torch.enable_grad():
            square = torch.ones(256, 256, device=device, requires_grad=True)
            product = torch.nn.functional.linear(square, square, square[0])
            gradient = torch.autograd.grad(product.sum(), square)
        torch.cuda.synchronize(device)
        del square, product, gradient
        return _Recorder(stream, max(0, int(torch.cuda.memory_allocated(device)) - before))


@contextmanager
def keep_random_state(devices: Sequence[torch.device]) -> Iterator[None]:
    """Give the random number generators of host and devices their states back afterwards."""
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=indices, device_type="cuda"):
        yield


class NotRecordable(Exception):
    """The work synchronises with the host or does what a CUDA graph cannot hold."""


def record(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[Callable[[], None]]:
    """Record each pass as a CUDA graph; the graphs share their memory, so they replay only in order, one after another.

    Args:
        passes: work on static tensors, the later on results of the earlier; each has run before.
        device: where they run.

    Returns:
        What replays each.

    Raises:
        NotRecordable: a pass cannot be recorded.
    """
    with torch.cuda.device(device):  # a capture fails while another device is current
        stream, before = _recorder(device).stream, torch.cuda.current_stream(device)
        try:
            _warm_up(passes, stream)
            pool = torch.cuda.graph_pool_handle()
            graphs = []
            for run in passes:
                graph = torch.cuda.CUDAGraph()
                with warnings.catch_warnings(), torch.cuda.graph(graph, pool=pool, stream=stream):
                    warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")  # a layer of views alone
                    run()
                graphs.append(graph)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.set_stream(before)  # a recording that fails may leave its own stream current
            generator = torch.cuda.default_generators[device.index or 0]  # and random numbers expecting a recording
            generator.graphsafe_set_state(generator.clone_state())
            torch.cuda.synchronize(device)
            raise NotRecordable(str(error)) from error
    return [graph.replay for graph in graphs]


def _warm_up(passes: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> None:
    """Run the passes three times on the stream that records; the last refuses what would spoil a recording."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    mode = torch.cuda.get_sync_debug_mode()
    with torch.cuda.stream(stream):
        for strict in (False, False, True):
            _set_sync_debug_mode("error" if strict else mode)
            try:
                for run in passes:
                    run()
            finally:
                _set_sync_debug_mode(mode)
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    torch.cuda.synchronize(stream.device)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the mode does not detect everything: neither must it
        torch.cuda.set_sync_debug_mode(mode)


def queued_ms(passes: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[list[float]]:
    """Device time of each pass, by events in a queue that is full before the device begins.

    Args:
        passes: run in this order, ``repeats`` times over.
        device: a CUDA device.
        repeats: how often.

    Returns:
        For each pass its ``repeats`` times in milliseconds.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for run in passes:
            run()
        launch_s = time.perf_counter() - began
        torch.cuda.synchronize(device)
        marks = [[_timing_event() for _ in range(len(passes) + 1)] for _ in range(repeats)]
        asleep_s = min(0.2, 1.5 * repeats * launch_s + 1e-4)
        torch.cuda._sleep(int(_CYCLES_PER_S * asleep_s))  # type: ignore[no-untyped-call]
        for row in marks:
            row[0].record()
            for run, mark in zip(passes, row[1:], strict=True):
                run()
                mark.record()
        torch.cuda.synchronize(device)
        return [[float(row[i].elapsed_time(row[i + 1])) for row in marks] for i in range(len(passes))]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


_CYCLES_PER_S = 2e9  # about the clock of current GPUs: how long the device sleeps while its queue fills


def release_cache() -> None:
    """Give cached, unused device memory back."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Registry(Protocol):
    """Knows which stand-in each tensor is on."""

    def device(self, tensor: Tensor) -> torch.device:
        """Where the tensor is."""

    def land(self, tensor: Tensor, device: torch.device) -> None:
        """Note that the tensor was copied to the device."""

    def expect(self, tensor: Tensor, device: torch.device) -> None:
        """Raise a MixedDevicesError if the tensor, a gradient, is not there."""

    def only(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise a MixedDevicesError if an operation inside meets tensors of another device."""


# Set by placer.testing.logical_devices: how many stand-ins there are and who knows where tensors are, innermost last,
# and whether it looks away.
_stand_ins: list[int] = []
_registries: list[Registry] = []
_observed: list[bool] = [True]


@contextmanager
def unobserved() -> Iterator[None]:
    """Let ``logical_devices`` look away: what runs inside (capture, measuring) is no part of the user's computation."""
    _observed.append(False)
    try:
        yield
    finally:
        _observed.pop()


def observed() -> bool:
    """Whether ``logical_devices`` should look."""
    return _observed[-1]


def location(tensor: Tensor) -> torch.device:
    """The device that holds the tensor, under ``logical_devices`` the stand-in."""
    return _registries[-1].device(tensor) if _registries else tensor.device


def same(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one; outside ``logical_devices`` all CPU stand-ins hold each other's tensors."""
    if a.type == CPU and b.type == CPU and not _stand_ins:
        return True
    return a == b


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device; itself if it is there. Differentiable: the gradient moves back."""
    source = location(tensor)
    if same(source, device):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        moved: Tensor = _Move.apply(tensor, source, device)  # type: ignore[no-untyped-call]
        return moved
    return copy(tensor, device)


def copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of the tensor's data on that device, without a gradient."""
    copied: Tensor = torch.ops.aten._to_copy.default(
        tensor.detach(), device=device, non_blocking=device.type == "cuda" and tensor.device.type == "cuda"
    )
    if _registries and device.type == CPU:
        _registries[-1].land(copied, device)
    return copied


class _Move(torch.autograd.Function):
    """A copy forwards and a copy back; torch's own copy forgets which stand-in a tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: torch.device, target: torch.device) -> Tensor:
        ctx.source, ctx.target = source, target
        return copy(tensor, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if _registries:
            _registries[-1].expect(gradients[0], ctx.target)
        return copy(gradients[0], ctx.source), None, None
