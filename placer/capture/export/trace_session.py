"""What is looked at, and what is put right, while a model's code is traced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_REENTRANT = "a reentrant checkpoint (CheckpointFunction; one with use_reentrant=False is captured)"

_ON_GRADIENTS = {
    Tensor.register_hook: "Tensor.register_hook",
    Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
    Tensor.retain_grad: "Tensor.retain_grad",
}
"""What acts on a tensor's gradient when it is there, in no operation of a graph."""


class GradientMode(TorchFunctionMode):
    """Notes what a graph would lose of a backward pass.

    That is what acts on the gradient of a tensor, and what runs with gradients off where no code
    turned them off: only ``autograd.Function`` does that.

    Attributes:
        custom: what was found, in words.
        enabled: whether the code that was seen left gradients on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.custom: set[str] = set()
        self.enabled = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ON_GRADIENTS:
            self.custom.add(_ON_GRADIENTS[func])
        elif func is torch._C._set_grad_enabled:
            self.enabled = bool(args[0])
        elif self.enabled and not torch.is_grad_enabled():
            self.custom.add("custom autograd function (or a reentrant checkpoint)")
        return func(*args, **(kwargs or {}))


class HiddenGradientMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes that the class of a weight turns gradients off inside the operations that it defines.

    Inside the ``__torch_function__`` of a class neither torch.export nor ``GradientMode`` sees
    ``torch.no_grad()``. So a graph has the operations without it, and would let a gradient flow
    back that the model stops.

    Args:
        seen: knows what both of them see.
        hidden: the rest is added to it, in words.
    """

    def __init__(self, seen: GradientMode, hidden: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._hidden = seen, hidden

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._seen.enabled and not torch.is_grad_enabled():
            self._hidden.add("torch.no_grad() inside the class of a weight")
        return func(*args, **(kwargs or {}))


class OneDevice(TorchFunctionMode):
    """Lets code that names accelerators itself, as that of a model that was split by hand, run on
    one device.

        x = self.first(x.to("cuda:0"))
        return self.second(x.to("cuda:1"))

    Where a layer runs is the placement's to say, so what such code names is the device of the
    capture. What it brings to the host (``x.cpu()``) stays there.

    Args:
        device: that of the capture; None to leave the code alone.
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
        """The device of the capture for a named accelerator, or stand-in for one."""
        if isinstance(named, bool) or not isinstance(named, (int, str, torch.device)):
            return named
        device = torch.device(named)
        return (
            named
            if device.type == "meta" or (device.type == "cpu" and device.index is None)
            else self._device
        )


class Patience(TorchFunctionMode):
    """Ends a trace that takes too long: of sizes that are divided over and over torch proves the
    same ever slower.

    Args:
        seconds: how long it may take.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # which looks into torch.cond
        if not torch.compiler.is_dynamo_compiling() and time.monotonic() > self._end:
            raise TimeoutError("sizes that are open take too long to trace")
        return func(*args, **(kwargs or {}))


def custom_functions(leaves: Sequence[Any]) -> set[str]:
    """The custom autograd functions that a result went through: export keeps what their forward
    does, and no more.
    """
    found: set[str] = set()
    seen: set[Any] = set()
    stack = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not _is_of_operator(type(node)):
            name = type(node).__name__.removesuffix("Backward")
            is_checkpoint = name == "CheckpointFunction"
            found.add(_REENTRANT if is_checkpoint else f"custom autograd function {name}")
        stack.extend(following for following, _ in node.next_functions)
    return found


def _is_of_operator(kind: type) -> bool:
    """Whether an autograd function belongs to an operator, which a graph calls whole: a custom one,
    or torch.cond.
    """
    return getattr(kind, "_forward_cls", kind).__module__.startswith(
        ("torch._library.", "torch._higher_order_ops.")
    )
