"""The environment in which a model's code is traced: a lock, settings, and modes that watch it.

All state is on one device, under the caller's autocast and no other mode. Code may test the dtype
of a result and branch on it, and autocast decides that dtype.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributions import Distribution
from torch.fx import config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from placer import devices
from placer.capture import autocast

P = ParamSpec("P")
R = TypeVar("R")

# Reentrant: a capture runs other traced functions, such as ``differs_later``.
_TRACING = threading.RLock()

_REENTRANT_CHECKPOINT = (
    "a reentrant checkpoint (CheckpointFunction; one with use_reentrant=False is captured)"
)

_GRADIENT_HOOKS = {
    Tensor.register_hook: "Tensor.register_hook",
    Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
    Tensor.retain_grad: "Tensor.retain_grad",
}
"""Functions that act on a tensor's gradient later; a graph has no operation for them."""


def with_tracing_lock(function: Callable[P, R]) -> Callable[P, R]:
    """Let one thread at a time run a function that traces or inspects a model's code.

    Tracing changes classes, hooks and random number generators, which all threads share.
    """

    @wraps(function)
    def in_turn(*args: P.args, **kwargs: P.kwargs) -> R:
        with _TRACING:
            return function(*args, **kwargs)

    return in_turn


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


class GradientMode(TorchFunctionMode):
    """A mode that notes the parts of a backward pass that a graph would lose.

    These are hooks on the gradient of a tensor, and operations with gradients off where the code
    did not turn them off: only ``autograd.Function`` does that.

    Attributes:
        custom: descriptions of what was found.
        enabled: whether the code seen so far left gradients on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.custom: set[str] = set()
        self.enabled = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT_HOOKS:
            self.custom.add(_GRADIENT_HOOKS[func])
        elif func is torch._C._set_grad_enabled:
            self.enabled = bool(args[0])
        elif self.enabled and not torch.is_grad_enabled():
            self.custom.add("custom autograd function (or a reentrant checkpoint)")
        return func(*args, **(kwargs or {}))


class HiddenGradientMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes when the class of a weight turns gradients off in its operations.

    Inside the ``__torch_function__`` of a class, neither torch.export nor ``GradientMode`` sees
    ``torch.no_grad()``. The graph would have the operations without it and let a gradient flow back
    that the model stops.

    Args:
        seen: the mode that knows whether visible code left gradients on.
        hidden: receives descriptions of what was found.
    """

    def __init__(self, seen: GradientMode, hidden: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._hidden = seen, hidden

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._seen.enabled and not torch.is_grad_enabled():
            self._hidden.add("torch.no_grad() inside the class of a weight")
        return func(*args, **(kwargs or {}))


class OneDevice(TorchFunctionMode):
    """A mode that lets code which names accelerators run on one device.

    A model that was split by hand has such code:

        x = self.first(x.to("cuda:0"))
        return self.second(x.to("cuda:1"))

    The placement decides where a layer runs, so the device of the capture replaces the named
    devices. Tensors that the code moves to the host (``x.cpu()``) stay there.

    Args:
        device: the device of the capture; None to leave the code alone.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._device is not None:
            if func is Tensor.cuda:
                return args[0].to(self._device)
            if func is Tensor.to and len(args) > 1:
                args = (args[0], self._here(args[1]), *args[2:])
            if "device" in kwargs:
                kwargs["device"] = self._here(kwargs["device"])
        return func(*args, **kwargs)

    def _here(self, named: Any) -> Any:
        """Return the capture's device for an accelerator or stand-in; others as given."""
        if isinstance(named, bool) or not isinstance(named, (int, str, torch.device)):
            return named
        device = torch.device(named)
        return (
            named
            if device.type == "meta" or (device.type == "cpu" and device.index is None)
            else self._device
        )


class TraceTimeout(TorchFunctionMode):
    """A mode that ends a trace that takes too long.

    If open sizes are divided repeatedly, torch's proofs about them become slower and slower.

    Args:
        seconds: maximum duration of the trace.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile traces a branch of torch.cond here, and must not trace the clock.
        if not torch.compiler.is_dynamo_compiling() and time.monotonic() > self._end:
            raise TimeoutError("tracing with open sizes takes too long")
        return func(*args, **(kwargs or {}))


def custom_functions(leaves: Sequence[Any]) -> set[str]:
    """Return descriptions of the custom autograd functions in the history of a result.

    torch.export keeps the operations of their forward method and loses their backward method.

    Args:
        leaves: the result's tensors and other values.
    """
    found: set[str] = set()
    # A walk over the autograd graph, from the results back.
    seen: set[Any] = set()
    stack = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not _belongs_to_operator(type(node)):
            name = type(node).__name__.removesuffix("Backward")
            is_checkpoint = name == "CheckpointFunction"
            found.add(
                _REENTRANT_CHECKPOINT if is_checkpoint else f"custom autograd function {name}"
            )
        stack.extend(following for following, _ in node.next_functions)
    return found


def _belongs_to_operator(kind: type) -> bool:
    """Return whether an autograd function belongs to an operator.

    A graph calls custom operators and torch.cond as a whole, with their backward pass.
    """
    return getattr(kind, "_forward_cls", kind).__module__.startswith(
        ("torch._library.", "torch._higher_order_ops.")
    )
