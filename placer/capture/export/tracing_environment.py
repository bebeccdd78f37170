"""The environment in which a model's code is traced.

All state is on one device, under the caller's autocast and no other mode. Code may test the dtype
of a result and branch on it, and autocast decides that dtype.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx import config as fx_config
from torch.utils._python_dispatch import _disable_current_modes

from placer import devices
from placer.capture import autocast


def capture_device(module: nn.Module, tensors: Sequence[Any]) -> torch.device:
    """Return the device to trace on.

    It is the device of the state if all of it is on one device; otherwise the CPU, or, if autocast
    is on for GPUs, a GPU.
    """
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if not places:
        places = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    place = places.pop() if len(places) == 1 else torch.device("cpu")
    kind = devices.default_kind()
    if place.type != kind and torch.is_autocast_enabled(kind):
        return torch.device(kind, 0)
    return place


def trace_input(tensor: Any, device: torch.device) -> Any:
    """Return an input for the trace: a tensor of the same shape on the device of the capture."""
    if not isinstance(tensor, Tensor) or tensor.device == device:
        return tensor
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


@contextmanager
def tracing_environment(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Trace inside with state on one device, gradients, and the caller's autocast."""
    with ExitStack() as stack:
        # The executor's observers, other modes and inference mode would all become part of the
        # graph.
        stack.enter_context(devices.unobserved())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", devices.default_kind()}:
            stack.enter_context(
                autocast.uncached(device)
                if kind == device.type
                else torch.autocast(kind, enabled=False)
            )
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_quiet())
        stack.enter_context(_without_python_stacks())
        stack.enter_context(_unchecked_distributions())
        stack.enter_context(_state_on_device(module, device))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export, which prints the whole graph of a model that it refuses."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _without_python_stacks() -> Iterator[None]:
    """Turn off the recording of Python stacks for operations.

    Nobody reads them, and they take a tenth of the time.
    """
    option = "do_not_emit_stack_traces"
    before = getattr(fx_config, option, None)
    # A version of torch without the option.
    if before is None:
        yield
        return
    setattr(fx_config, option, True)
    try:
        yield
    finally:
        setattr(fx_config, option, before)


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Turn off the value checks of ``torch.distributions``.

    They read tensor values in every call, which a graph cannot repeat.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def _state_on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Replace state on other devices by uninitialised tensors on ``device`` while inside.

    torch.export needs shapes, and all of them on one device.
    """
    undo: list[tuple[dict[str, Any], str, Tensor]] = []
    # By identity, so that a tied parameter stays one tensor.
    twins: dict[int, Tensor] = {}
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in twins:
                    twin_of = partial(
                        torch.empty_like if device.type == "cpu" else _without_memory, device=device
                    )
                    # A sparse tensor without elements is enough.
                    twin = (
                        devices.rebuilt(tensor, twin_of)
                        if tensor.layout == torch.strided
                        else twin_of(tensor)
                    )
                    is_parameter = isinstance(tensor, nn.Parameter)
                    twins[id(tensor)] = (
                        nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
                    )
                undo.append((table, name, tensor))
    for table, name, tensor in undo:
        table[name] = twins[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and strides without memory; it cannot be read.

    Tensors that are not strided keep their memory.
    """
    twin = torch.empty_like(tensor, device=device)
    if twin.layout == torch.strided:
        twin.untyped_storage().resize_(0)
    return twin
