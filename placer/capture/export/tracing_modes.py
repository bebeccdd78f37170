"""Modes that watch a model's code while it is traced, or correct what it does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_REENTRANT_CHECKPOINT = (
    "a reentrant checkpoint (CheckpointFunction; one with use_reentrant=False is captured)"
)

_GRADIENT_HOOKS = {
    Tensor.register_hook: "Tensor.register_hook",
    Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
    Tensor.retain_grad: "Tensor.retain_grad",
}
"""Functions that act on a tensor's gradient later; a graph has no operation for them."""


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
