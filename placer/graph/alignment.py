"""Running a model that cannot be captured: modules on their devices, functional operations aligned between them.

A module that has a device gets its inputs moved there. An operation between modules whose tensors are on several
devices runs where its parameters are, else where the latest module ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from placer import devices
from placer.graph.structure import flatten

_KEEPS_ITS_PLACE = {
    "to",
    "cpu",
    "cuda",
    "copy_",
    "__get__",
    "__set__",
    "backward",
    "set_",
    "requires_grad_",
    "register_hook",
}

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called after every function with (function, args, kwargs, result)."""


class Alignment(TorchFunctionMode):
    """Moves the tensors of one operation to one device.

    Attributes:
        place: the device of the latest module; None before the first.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self.place: torch.device | None = None
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _KEEPS_ITS_PLACE:
            args, kwargs = self._aligned(name, args, kwargs)
        result = func(*args, **kwargs)
        if self._observer is not None:
            self._observer(func, args, kwargs, result)
        return result

    def _aligned(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tensors, structure = flatten((args, kwargs))
        tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        places = [devices.location(tensor) for tensor in tensors]
        if all(devices.same(place, places[0]) for place in places):
            return args, kwargs
        target = self._target(name, tensors, places)
        moved = [
            tensor if tensor.dim() == 0 and place.type == devices.CPU else devices.move(tensor, target)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        aligned: tuple[Any, Any] = structure.unflatten(moved)
        return aligned

    def _target(self, name: str, tensors: list[Tensor], places: list[torch.device]) -> torch.device:
        writes_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        if writes_in_place:
            return places[0]
        owners = [place for tensor, place in zip(tensors, places, strict=True) if isinstance(tensor, nn.Parameter)]
        if owners:
            return owners[0]
        if self.place is not None and any(devices.same(place, self.place) for place in places):
            return self.place
        return next((place for tensor, place in zip(tensors, places, strict=True) if tensor.dim()), places[0])


@contextmanager
def aligned(modules: Mapping[nn.Module, torch.device], alignment: Alignment) -> Iterator[None]:
    """Run what is inside with these modules on these devices; nothing of the model is changed after it.

    Args:
        modules: module -> the device that its state is on.
        alignment: aligns the operations between them.
    """
    with ExitStack() as stack:
        for module, device in modules.items():
            hook = _arrive(device, alignment)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        stack.enter_context(alignment)
        yield


def _arrive(device: torch.device, alignment: Alignment) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        alignment.place = device
        tensors, structure = flatten((args, kwargs))
        moved = [devices.move(tensor, device) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        arrived: tuple[tuple[Any, ...], dict[str, Any]] = structure.unflatten(moved)
        return arrived

    return hook
