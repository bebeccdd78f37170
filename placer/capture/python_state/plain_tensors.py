"""Plain tensors: tensors that a model's code reads, except parameters, buffers and inputs.

    self.table = torch.rand(64)   # an attribute that is not registered
    MASKS = [torch.ones(8, 8)]    # an item of a list in a variable of the model's file

During a trace, parameters, buffers and inputs are fake tensors, but plain tensors are real. torch
computes with them, writes to them, and records them in the traced autograd graph. The trace must
leave them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from placer.capture.python_state.tensor_writes import storage_id, writes_to_first_argument

_VALUE_READERS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__array__",
}
"""Names of functions that pass the values of a tensor to Python code."""


class PlainTensors(TorchFunctionMode):
    """A mode that handles the plain tensors of the code inside.

    The code works on aliases of them. An alias has the same memory and an autograd history of its
    own. If the tensor is on an accelerator other than the capture's, the alias is a copy on the
    capture's.

    Args:
        device: the device of the capture.

    Attributes:
        untracked: shapes of plain tensors that require a gradient and take part in a computation.
            torch.export detaches them, so a graph would lose their gradients.
        values_read: plain tensors whose values Python code read, by identity; a graph contains the
            consequences as constants.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.untracked: set[tuple[int, ...]] = set()
        self.values_read: dict[int, Tensor] = {}
        self._alias_of: dict[int, Tensor] = {}
        self._original_of: dict[int, Tensor] = {}
        # Held so that no other tensor can take over an identity.
        self._made: dict[int, Tensor] = {}
        self._by_storage: dict[int | None, Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch.compile traces a branch of torch.cond here.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        args = tuple(_map_tensors(self._alias, one) for one in args)
        kwargs = {name: _map_tensors(self._alias, one) for name, one in kwargs.items()}
        given = list(_tensors((*args, *kwargs.values())))
        name = getattr(func, "__name__", "")
        if given and (name in _VALUE_READERS or "out" in kwargs or writes_to_first_argument(name)):
            self._note(name, given, kwargs.get("out", given[0]))
        # An alias has no gradient of its own, unless code wrote a tensor with a gradient to it.
        own = (one for one in given if one.requires_grad and id(one) not in self._original_of)
        untracked = {tuple(one.shape) for one in own if self._is_plain(one)}
        result = func(*args, **kwargs)
        if untracked and any(one.requires_grad for one in _tensors((result,))):
            self.untracked |= untracked
        return _map_tensors(self._original, result)

    def _note(self, name: str, given: Iterable[Tensor], written: Any) -> None:
        """Note that a function passes values to Python, or save memory that it may write to."""
        if name in _VALUE_READERS:
            self.values_read.update(
                (id(one), one) for one in self._behind(given) if not one.is_inference()
            )
        elif all(_tensor_with_values(one) is not None for one in given):
            # Fake arguments have no values, so torch will not really write.
            for original in self._behind(_tensors((written,))):
                key = storage_id(original)
                if key is not None and key not in self._before:
                    with _disable_current_modes():
                        storage = original.untyped_storage()
                        self._before[key] = storage, storage.clone()  # type: ignore[no-untyped-call]

    def _behind(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the plain tensors that share memory with these tensors."""
        for one in tensors:
            real = _tensor_with_values(one)
            if (
                real is not None
                and (original := self._by_storage.get(storage_id(real))) is not None
            ):
                yield original

    def _is_plain(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or id(tensor) in self._made:
            return False
        return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)

    def _alias(self, tensor: Tensor) -> Tensor:
        if not self._is_plain(tensor) or tensor.requires_grad or id(tensor) in self._original_of:
            return tensor
        if id(tensor) not in self._alias_of:
            if torch._C._functorch.get_dynamic_layer_stack_depth():
                # Inside torch.func, an alias would become a part of the transform.
                return tensor
            with _disable_current_modes():
                alias = tensor.detach()
                if alias.device != self._device and alias.device.type not in ("cpu", "meta"):
                    alias = alias.to(self._device)
            self._alias_of[id(tensor)], self._original_of[id(alias)] = alias, tensor
            for held in (tensor, alias):
                self._by_storage.setdefault(storage_id(held), tensor)
        return self._alias_of[id(tensor)]

    def _original(self, tensor: Tensor) -> Tensor:
        """Return the plain tensor of an alias; another tensor itself, noted as made inside."""
        if id(tensor) in self._original_of:
            return self._original_of[id(tensor)]
        if self._is_plain(tensor) and id(tensor) not in self._alias_of:
            self._made[id(tensor)] = tensor
        return tensor

    def restore(self) -> None:
        """Restore the values of plain tensors; call it when no mode is active any more."""
        for storage, value in self._before.values():
            storage.copy_(value)
        self._before.clear()

    def replace_aliases(self, module: fx.GraphModule) -> None:
        """Replace the aliases in a graph by the plain tensors themselves.

        An unregistered ``nn.Parameter`` keeps its alias, because the graph's module would register
        it.

        Args:
            module: the graph; it is changed.
        """
        originals: dict[Any, Tensor] = dict(self._original_of)
        # torch.export detaches an alias that received a tensor with a gradient; its memory
        # identifies it.
        originals |= {
            place: self._original_of[id(one)]
            for one in self._alias_of.values()
            if (place := _elements_id(one))
        }
        for target in {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}:
            path, _, name = target.rpartition(".")
            owner = module.get_submodule(path)
            value = getattr(owner, name)
            if not isinstance(value, Tensor):
                continue
            original = originals.get(id(value), originals.get(_elements_id(value)))
            # A parameter may share the memory of a plain tensor.
            is_parameter = name in owner._parameters
            if type(original) is Tensor and not is_parameter:
                setattr(owner, name, original)


def plain_names(module: nn.Module) -> dict[int, str]:
    """Return the names of unregistered tensors that are attributes of modules, by identity.

    Args:
        module: the model.
    """
    found: dict[int, str] = {}
    for path, child in module.named_modules():
        for name, value in child.__dict__.items():
            if isinstance(value, Tensor):
                found.setdefault(id(value), f"{path}.{name}".lstrip("."))
    return found


def _tensor_with_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor with values: for a fake tensor, its tracked constant or None."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


def _elements_id(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what identifies the elements of a tensor; None if it has no memory of its own."""
    storage = storage_id(tensor)
    if storage is None or tensor.layout != torch.strided:
        return None
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _map_tensors(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """Apply a function to the tensors of nested lists and tuples."""
    if isinstance(nest, Tensor):
        return function(nest)
    if type(nest) not in (list, tuple):
        return nest
    items = [_map_tensors(function, item) for item in nest]
    return nest if all(map(is_, items, nest)) else type(nest)(items)


def _tensors(nest: Iterable[Any]) -> Iterator[Tensor]:
    for item in nest:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)
