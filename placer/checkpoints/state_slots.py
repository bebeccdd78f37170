"""The places where a model's modules hold their parameters and buffers."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn


class StateSlots:
    """The parameters and buffers of a model when this object was made.

    As a context manager, it puts them back if the block fails.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # the tensors stay alive, so that each id belongs to one tensor
        self._tensors = [(module, name, tensor) for module, name, tensor in _slots(model)]
        self._ids = {id(tensor) for _, _, tensor in self._tensors}

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor was in the model when this object was made."""
        return id(tensor) in self._ids

    def restore(self) -> None:
        """Put back the tensors that were replaced."""
        for module, name, tensor in self._tensors:
            if getattr(module, name) is not tensor:
                setattr(module, name, tensor)

    def __enter__(self) -> StateSlots:
        """Enter the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the tensors back after an error."""
        if error is not None:
            self.restore()


def users(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules and attributes that hold each tensor, by its ``id``."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module, name, tensor in _slots(model):
        found.setdefault(id(tensor), []).append((module, name))
    return found


def _slots(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, tensor)
        for module in model.modules()
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    ]
