"""Plain tensors of a model: those that its code reads and that are neither parameters nor buffers
nor inputs.

self.table = torch.rand(64)     # an attribute that is not registered
MASKS = [torch.ones(8, 8)]      # a variable of the model's file, an item of a list

While a model is traced, its parameters, buffers and inputs are fake tensors. Plain tensors are real
ones: torch computes with them, writes to them, and lets them become part of the traced backward
graph. A look at a model must leave them as they are.
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

from placer.capture.python_state.tensor_writes import storage_of, writes_to_its_first

_VALUES = {
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
"""Names of functions that hand the values of a tensor to Python code."""


class PlainTensors(TorchFunctionMode):
    """The plain tensors that code inside this mode uses.

    The code works on aliases of them: an alias has the same memory and an autograd history of its
    own. The alias of a tensor on another accelerator than the capture is a copy there, as the twins
    of parameters are.

    Args:
        device: that of the capture.

    Attributes:
        untracked: the shapes of plain tensors that require a gradient and are computed with. A
            graph would lose their gradients, because torch.export detaches them.
        looked_at: the plain tensors whose values Python code asked for, by identity; a graph holds
            what followed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.untracked: set[tuple[int, ...]] = set()
        self.looked_at: dict[int, Tensor] = {}
        self._alias_of: dict[int, Tensor] = {}
        self._original_of: dict[int, Tensor] = {}
        # held, so that no other tensor gets the identity of one
        self._made: dict[int, Tensor] = {}
        self._by_storage: dict[int | None, Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # it looks into a branch of torch.cond
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        args = tuple(_mapped(self._alias, one) for one in args)
        kwargs = {name: _mapped(self._alias, one) for name, one in kwargs.items()}
        given = list(_tensors((*args, *kwargs.values())))
        name = getattr(func, "__name__", "")
        if given and (name in _VALUES or "out" in kwargs or writes_to_its_first(name)):
            self._note(name, given, kwargs.get("out", given[0]))
        # An alias has no gradient of its own: it has one where code wrote to it what has one.
        own = (one for one in given if one.requires_grad and id(one) not in self._original_of)
        untracked = {tuple(one.shape) for one in own if self._is_plain(one)}
        result = func(*args, **kwargs)
        if untracked and any(one.requires_grad for one in _tensors((result,))):
            self.untracked |= untracked
        return _mapped(self._original, result)

    def _note(self, name: str, given: Iterable[Tensor], written: Any) -> None:
        """Note that a function hands values to Python code, or keep what it may write to."""
        if name in _VALUES:
            self.looked_at.update(
                (id(one), one) for one in self._behind(given) if not one.is_inference()
            )
        elif all(_real(one) is not None for one in given):
            # else torch has no values to compute with
            for original in self._behind(_tensors((written,))):
                key = storage_of(original)
                if key is not None and key not in self._before:
                    with _disable_current_modes():
                        storage = original.untyped_storage()
                        self._before[key] = storage, storage.clone()  # type: ignore[no-untyped-call]

    def _behind(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """The plain tensors whose memory some tensors have."""
        for one in tensors:
            real = _real(one)
            if (
                real is not None
                and (original := self._by_storage.get(storage_of(real))) is not None
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
                # inside torch.func an alias would be a part of the transform
                return tensor
            with _disable_current_modes():
                alias = tensor.detach()
                if alias.device != self._device and alias.device.type not in ("cpu", "meta"):
                    alias = alias.to(self._device)
            self._alias_of[id(tensor)], self._original_of[id(alias)] = alias, tensor
            for held in (tensor, alias):
                self._by_storage.setdefault(storage_of(held), tensor)
        return self._alias_of[id(tensor)]

    def _original(self, tensor: Tensor) -> Tensor:
        """The plain tensor of an alias; any other tensor itself, which was made inside."""
        if id(tensor) in self._original_of:
            return self._original_of[id(tensor)]
        if self._is_plain(tensor) and id(tensor) not in self._alias_of:
            self._made[id(tensor)] = tensor
        return tensor

    def put_back(self) -> None:
        """Give plain tensors the values that they had; when no mode is in force any more."""
        for storage, value in self._before.values():
            storage.copy_(value)
        self._before.clear()

    def replace_aliases(self, module: fx.GraphModule) -> None:
        """Let a graph hold the plain tensors themselves in place of their aliases.

        An unregistered ``nn.Parameter`` keeps its alias: the graph's module would register it.
        """
        originals: dict[Any, Tensor] = dict(self._original_of)
        # torch.export detaches an alias to which code wrote what has a gradient.
        originals |= {
            place: self._original_of[id(one)]
            for one in self._alias_of.values()
            if (place := _place(one))
        }
        for target in {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}:
            path, _, name = target.rpartition(".")
            owner = module.get_submodule(path)
            value = getattr(owner, name)
            if not isinstance(value, Tensor):
                continue
            original = originals.get(id(value), originals.get(_place(value)))
            # which may have the memory of a plain tensor
            is_parameter = name in owner._parameters
            if type(original) is Tensor and not is_parameter:
                setattr(owner, name, original)


def plain_names(module: nn.Module) -> dict[int, str]:
    """The names of the tensors that are attributes of modules and neither parameters nor buffers,
    by identity.
    """
    found: dict[int, str] = {}
    for path, child in module.named_modules():
        for name, value in child.__dict__.items():
            if isinstance(value, Tensor):
                found.setdefault(id(value), f"{path}.{name}".lstrip("."))
    return found


def _real(tensor: Tensor) -> Tensor | None:
    """The tensor, if it has values: that of a fake one, which has some where torch follows them."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


def _place(tensor: Tensor) -> tuple[Any, ...] | None:
    """Where the elements of a tensor lie; None where it has no memory of its own."""
    storage = storage_of(tensor)
    if storage is None or tensor.layout != torch.strided:
        return None
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _mapped(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """A nest of lists and tuples with other tensors; itself if these are the same."""
    if isinstance(nest, Tensor):
        return function(nest)
    if type(nest) not in (list, tuple):
        return nest
    items = [_mapped(function, item) for item in nest]
    return nest if all(map(is_, items, nest)) else type(nest)(items)


def _tensors(nest: Iterable[Any]) -> Iterator[Tensor]:
    for item in nest:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)
