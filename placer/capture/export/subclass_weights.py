"""Weights that torch.export would take for plain tensors.

While torch.export traces a model, plain tensors without data stand in for its parameters. The
attributes of a parameter and the methods of its class are not there then: code that asks for them
fails, or does something else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from placer import devices
from placer.errors import CaptureError
from placer.utils.python_objects import is_torchs


def refuse_weights(module: nn.Module) -> None:
    """Raise a CaptureError if a parameter or a buffer has tensors attached to it, or a class that
    changes what it does.

    Wrapper subclasses are captured: torch.export knows how to take them apart.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if devices.is_plain(tensor):
            continue
        if devices.attached(tensor):
            raise CaptureError(
                f"{name!r} has tensors in its attributes, which torch.export does not see"
            )
        if _has_own_class(tensor):
            raise CaptureError(
                f"{name!r} is a {type(tensor).__name__}, which torch.export takes for a plain tensor"
            )


def define_functions(module: nn.Module) -> bool:
    """Return whether the class of a weight defines what functions of torch do with it
    (``__torch_function__``).
    """
    kinds = {type(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return any(map(_defines_functions, kinds))


def _has_own_class(tensor: Tensor) -> bool:
    if is_torchs(type(tensor)) or not devices.has_own_memory(tensor):
        return False
    return bool(vars(tensor)) or _defines_functions(type(tensor))


def _defines_functions(kind: type) -> bool:
    return not is_torchs(kind) and _function(kind) not in (
        _function(nn.Parameter),
        _function(Tensor),
    )


def _function(kind: Any) -> Any:
    """What a class does with functions of its tensors."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
