"""What a model's code is looked at in: all of its state on one device, under the caller's autocast
and nothing else.

A model's code may ask of what type a result is, and do otherwise for another; of what type it is
autocast decides.
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
    """Where the state is, if it is in one place; else the CPU, or, for an autocast of GPUs, one of
    them.
    """
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if not places:
        places = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    place = places.pop() if len(places) == 1 else torch.device("cpu")
    kind = devices.default_kind()
    if place.type != kind and torch.is_autocast_enabled(kind):
        return torch.device(kind, 0)
    return place


def example(tensor: Any, device: torch.device) -> Any:
    """An input as the capture takes it: a tensor of its shape on the device of the capture."""
    if not isinstance(tensor, Tensor) or tensor.device == device:
        return tensor
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


@contextmanager
def traceable(module: nn.Module, device: torch.device) -> Iterator[None]:
    """State in one place, gradients on, the caller's autocast where it is one of this kind of
    device.
    """
    with ExitStack() as stack:
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
        stack.enter_context(_no_stacks())
        stack.enter_context(_unchecked_distributions())
        stack.enter_context(_gathered(module, device))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export prints the whole graph of a model that it refuses; the reason alone is kept."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _no_stacks() -> Iterator[None]:
    """Operations do not note where in the code they stand: nobody reads it, and it takes a tenth of
    the time.
    """
    option = "do_not_emit_stack_traces"
    before = getattr(fx_config, option, None)
    if before is None:  # a torch without it
        yield
        return
    setattr(fx_config, option, True)
    try:
        yield
    finally:
        setattr(fx_config, option, before)


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """``torch.distributions`` does not look at the values of what it is given, as it would in every
    call otherwise.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def _gathered(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Stand uninitialised twins in for state that is elsewhere: export needs shapes, and all on one
    device.
    """
    undo: list[tuple[dict[str, Any], str, Tensor]] = []
    twins: dict[int, Tensor] = {}
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in twins:
                    twin_of = partial(
                        torch.empty_like if device.type == "cpu" else _bare, device=device
                    )
                    # Of a sparse tensor, one without elements is enough.
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


def _bare(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and strides that takes no memory of a GPU if it is strided; it
    cannot be read.
    """
    twin = torch.empty_like(tensor, device=device)
    if twin.layout == torch.strided:
        twin.untyped_storage().resize_(0)
    return twin
