"""Weights that torch.export would take for plain tensors.

While torch.export traces a model, plain tensors without data replace its parameters. They lack the
attributes of a parameter and the methods of its class. Code that uses those fails, or does
something else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from placer import devices
from placer.errors import CaptureError
from placer.utils.python_objects import is_torchs


def refuse_weights(module: nn.Module) -> None:
    """Raise a CaptureError if export would lose tensors attached to a weight, or its class.

    Wrapper subclasses are captured: torch.export takes them apart itself.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if devices.is_plain(tensor):
            continue
        if devices.attached(tensor):
            raise CaptureError(
                f"{name!r} has tensors in its attributes, which torch.export would lose"
            )
        if _has_own_class(tensor):
            raise CaptureError(
                f"{name!r} is a {type(tensor).__name__}, which torch.export would treat as a plain "
                "tensor"
            )


def weights_override_functions(module: nn.Module) -> bool:
    """Return whether the class of a weight overrides torch's functions (``__torch_function__``)."""
    kinds = {type(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return any(map(_overrides_functions, kinds))


def _has_own_class(tensor: Tensor) -> bool:
    if is_torchs(type(tensor)) or not devices.has_own_memory(tensor):
        return False
    return bool(vars(tensor)) or _overrides_functions(type(tensor))


def _overrides_functions(kind: type) -> bool:
    return not is_torchs(kind) and _torch_function(kind) not in (
        _torch_function(nn.Parameter),
        _torch_function(Tensor),
    )


def _torch_function(kind: Any) -> Any:
    """Return how a class overrides torch's functions, comparable with ``is``."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
