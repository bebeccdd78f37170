"""The plain tensors that hold a tensor's data, and rebuilding a tensor over other ones.

Not every weight is one block of numbers:

    plain              itself
    sparse             indices and values
    wrapper subclass   inner tensors (``__tensor_flatten__``), perhaps nested: a quantised weight
    with attributes    itself, and the tensors in its attributes: a quantisation state

Counting bytes, locating, copying and moving a weight all work on these plain tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from placer.devices.stand_ins import unobserved
from placer.utils.python_objects import fields, is_object, is_torchs, own

Change: TypeAlias = Callable[[Tensor], Tensor]
"""A function from a plain tensor to its replacement."""

Address: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]
"""The address of a plain tensor, its sizes and strides."""

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
USUAL = frozenset({Tensor, nn.Parameter})
"""The tensor classes that are not wrappers."""
_NUMBERS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
MAX_DEPTH = 4
"""Maximum nesting of objects and containers that are searched for attached tensors."""
# Larger containers are not searched: they are not the state of a weight.
_MAX_ITEMS = 1_000


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one block of numbers without attributes."""
    return is_block(tensor) and not (type(tensor) in USUAL and vars(tensor))


def is_block(tensor: Tensor) -> bool:
    """Return whether a tensor is one block of numbers of a usual class; it may have attributes."""
    kind = type(tensor)
    if tensor.layout != torch.strided:
        return False
    # Torch's own non-wrapper classes, except those that represent tensors during tracing.
    return kind in USUAL or (is_torchs(kind) and not is_traceable_wrapper_subclass(tensor))


def dispatches(kind: type) -> bool:
    """Return whether a tensor class overrides ``__torch_dispatch__``, as quantised weights do.

    A mode that watches operations leaves such an operation to the class, and sees the operations
    that it is decomposed into.
    """
    return (
        not is_torchs(kind) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    )


def has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has one block of memory of its own, whatever its class."""
    return tensor.layout == torch.strided and not _is_wrapper(tensor)


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors that hold a tensor's data and its attached state.

    The tensor's own data come last; the values are last for a sparse tensor.
    """
    if is_plain(tensor):
        return (tensor,)
    return (*attached(tensor), *own_parts(tensor))


def own_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors that hold a tensor's data, without its attached state."""
    if is_block(tensor):
        return (tensor,)
    if _is_wrapper(tensor):
        return tuple(part for inner in _inner(tensor).values() for part in own_parts(inner))
    return _components(tensor)


def attached(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors in the attributes of a tensor, and of the tensors that it wraps."""
    return tuple(_attached(tensor, {id(tensor)}))


def _attached(tensor: Tensor, seen: set[int]) -> Iterator[Tensor]:
    wrapped = _inner(tensor)
    for inner in wrapped.values():
        yield from _attached(inner, seen)
    for name, value in _attributes(tensor).items():
        for _, held in named_tensors(value) if name not in wrapped else ():
            if id(held) not in seen:
                seen.add(id(held))
                yield from _attached(held, seen)
                yield from own_parts(held)


def named_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a container or an object, with their names in it.

    Parameters and tensors with a history belong to other owners and are left out. So are objects
    that refer to modules or optimizers: they are more than the state of a weight.
    """
    return _named_tensors(value, "", 0, set())


def _named_tensors(
    value: Any, name: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and value.grad_fn is None:
            yield name, value
    elif depth < MAX_DEPTH and id(value) not in seen:
        seen.add(id(value))
        inside = contents(value)
        if not any(isinstance(item, nn.Module | torch.optim.Optimizer) for item in inside.values()):
            for key, item in inside.items():
                if type(item) not in _NUMBERS:
                    yield from _named_tensors(
                        item, f"{name}.{key}" if name else str(key), depth + 1, seen
                    )


def holds_tensors(value: Any) -> bool:
    """Return whether there are tensors in a container or an object."""
    return next(named_tensors(value), None) is not None


def rebuilt_object(value: Any, change: Change, known: Known | None = None) -> Any:
    """Return a container or object like this one with replaced tensors; see ``rebuilt``.

    Args:
        value: not changed.
        change: called once for each plain tensor in it.
        known: carries the results of ``change`` over several calls.
    """
    with unobserved(), torch.no_grad():
        return _Rebuilding(change, Known() if known is None else known).value(value)


def with_tensors(value: Any, others: Mapping[int, Tensor]) -> Any:
    """Return a container or object like this one with given tensors in it.

    Args:
        value: not changed; returned itself if it holds no tensors.
        others: by the ``id`` of each tensor in it, the replacement.
    """
    rebuilding = _Rebuilding(lambda part: part, Known())
    rebuilding.seen.update(others)
    return rebuilding.value(value)


def take_over_object(value: Any, made: Any) -> None:
    """Give an object the tensors of ``made``, which ``rebuilt_object`` built from it."""
    _taken(value, made, set())


def rebuilt(tensor: Tensor, change: Change, known: Known | None = None) -> Tensor:
    """Return a tensor of the same class and attributes over other plain tensors.

    Args:
        tensor: any tensor; not changed.
        change: called once for each plain tensor; views of one memory stay views of one memory.
        known: carries the results of ``change`` over several calls.

    Returns:
        The tensor, without a history. Tensors in attributes are replaced, too; other attributes are
        shared.
    """
    with unobserved(), torch.no_grad():
        return _Rebuilding(change, Known() if known is None else known).tensor(tensor)


def take_over(tensor: Tensor, made: Tensor) -> None:
    """Give a tensor the data and attached state of ``made``, which ``rebuilt`` built from it.

    The tensor and the objects in its attributes keep their identity, since others may refer to
    them.
    """
    if is_plain(tensor):
        tensor.data = made
        return
    with unobserved(), torch.no_grad():
        _take_over(tensor, made)


class Known:
    """The replacements of plain tensors, by the memory of the originals."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.devices: dict[torch.device, torch.device] = {}

    def get(self, part: Tensor, change: Change) -> Tensor:
        """Return the replacement of a plain tensor."""
        key = memory_key(part)
        if key not in self._made:
            made = change(part)
            # keep the original alive, so that its memory (the key) is not reused
            self._made[key] = part, made
            self.devices[part.device] = made.device
        return self._made[key][1]


def memory_key(part: Tensor) -> tuple[Any, ...]:
    """Return a key that identifies the memory of a plain tensor while it lives."""
    try:
        storage = part.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        # oneDNN tensors, for example, do not expose their storage
        return (id(part),)
    layout = part.storage_offset(), part.shape, part.stride()
    return storage, *layout, part.dtype, part.is_conj(), part.is_neg()


class _Rebuilding:
    """One call of ``rebuilt``.

    Attributes:
        seen: the replacements of tensors, containers and objects, by ``id``.
    """

    def __init__(self, change: Change, known: Known) -> None:
        self._change, self._known = change, known
        self.seen: dict[int, Any] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the replacement of a tensor."""
        if id(tensor) in self.seen:
            known: Tensor = self.seen[id(tensor)]
            return known
        made = self._data(tensor)
        self.seen[id(tensor)] = made
        for name, value in _attributes(tensor).items():
            if name not in vars(made):
                vars(made)[name] = self.value(value)
        return made

    def _data(self, tensor: Tensor) -> Tensor:
        if _is_wrapper(tensor):
            inner = {name: self.tensor(item) for name, item in _inner(tensor).items()}
            return _wrapped(tensor, inner, self._on_devices)
        # bypass subclasses that do not implement these calls
        with torch._C.DisableTorchFunctionSubclass():
            own_data = [part.detach() for part in _components(tensor)]
            if type(tensor) not in USUAL and not is_block(tensor):
                own_data = [part.as_subclass(Tensor) for part in own_data]
            new_data = [self._known.get(part, self._change) for part in own_data]
            return _like(tensor, new_data[0]) if len(new_data) == 1 else _sparse(tensor, new_data)

    def value(self, value: Any) -> Any:
        """Return the replacement of an attribute's value."""
        if isinstance(value, Tensor):
            return self.tensor(value) if holds_tensors(value) else value
        if id(value) in self.seen:
            return self.seen[id(value)]
        if not holds_tensors(value):
            return value
        if isinstance(value, tuple):
            items = [self.value(item) for item in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        # registered before its items are visited: objects may refer to themselves
        made = self.seen[id(value)] = copy.copy(value)
        inside = contents(value)
        for key, item in inside.items():
            put(made, key, self.value(item))
        for key, item in inside.items():
            if isinstance(item, torch.device):
                put(made, key, self._on_devices(item))
        return made

    def _on_devices(self, context: Any) -> Any:
        """Return the context with the original devices replaced by the new ones."""
        if isinstance(context, torch.device):
            return self._known.devices.get(context, context)
        if isinstance(context, dict):
            return {key: self._on_devices(item) for key, item in context.items()}
        if type(context) in (list, tuple):
            return type(context)(map(self._on_devices, context))
        if dataclasses.is_dataclass(context) and not isinstance(context, type):
            inside = {
                one.name: getattr(context, one.name)
                for one in dataclasses.fields(context)
                if one.init
            }
            named = {name: item for name, item in inside.items() if isinstance(item, torch.device)}
            return dataclasses.replace(context, **self._on_devices(named)) if named else context
        return context


def _take_over(tensor: Tensor, made: Tensor) -> None:
    if tensor.layout in (*_BY_ROWS, *_BY_COLUMNS):
        # Assigning to ``data`` does not replace the components of these layouts. Swapping also
        # exchanges ``requires_grad``.
        made.requires_grad_(tensor.requires_grad)
        torch._C._swap_tensor_impl(tensor, made)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = made
    for name in _inner(tensor):
        is_property = isinstance(getattr(type(tensor), name, None), property)
        if name not in vars(tensor) and not is_property:  # it is in ``__slots__``
            setattr(tensor, name, getattr(made, name))
    seen: set[int] = set()
    for name, value in vars(made).items():
        vars(tensor)[name] = _taken(vars(tensor).get(name), value, seen)


def _taken(old: Any, new: Any, seen: set[int]) -> Any:
    """Return the attribute's new value: the old object with new tensors if possible."""
    if old is new or type(old) is not type(new) or isinstance(new, Tensor | tuple):
        return new
    if not (isinstance(new, dict | list) or fields(new)):
        return new
    if id(old) not in seen:
        seen.add(id(old))
        inside = contents(old)
        for key, item in contents(new).items():
            put(old, key, _taken(inside.get(key), item, seen))
    return old


def _attributes(tensor: Tensor) -> dict[str, Any]:
    return getattr(tensor, "__dict__", {})


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory of its own but wraps other tensors.

    It lists them in ``__tensor_flatten__``, or has them in its attributes.
    """
    if type(tensor) in USUAL or is_traceable_wrapper_subclass(tensor):
        return type(tensor) not in USUAL
    with torch._C.DisableTorchFunctionSubclass():
        is_theirs = (
            not is_torchs(type(tensor)) and tensor.layout == torch.strided and not tensor.is_meta
        )
        return is_theirs and tensor.numel() > 0 and tensor.data_ptr() == 0


def _inner(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a wrapper subclass wraps, by name; empty for others."""
    if not _is_wrapper(tensor):
        return {}
    if not is_traceable_wrapper_subclass(tensor):
        return {
            name: item for name, item in _attributes(tensor).items() if isinstance(item, Tensor)
        }
    names, _ = tensor.__tensor_flatten__()
    return {name: item for name in names if isinstance(item := getattr(tensor, name), Tensor)}


def _wrapped(tensor: Tensor, inner: dict[str, Tensor], on_devices: Callable[[Any], Any]) -> Tensor:
    """Return a wrapper of the same class around other tensors."""
    made: Tensor
    if is_traceable_wrapper_subclass(tensor):
        context = on_devices(tensor.__tensor_flatten__()[1])
        made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return made
    made = torch.Tensor._make_wrapper_subclass(
        type(tensor),
        tensor.size(),
        tensor.stride(),
        dtype=tensor.dtype,
        device=on_devices(tensor.device),
    )
    vars(made).update(inner)
    return made


def _components(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _sparse(tensor: Tensor, components: Sequence[Tensor]) -> Tensor:
    """Return a sparse tensor of the same layout over other components."""
    if tensor.layout == torch.sparse_coo:
        indices, values = components
        coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(
            indices,
            values,
            tensor.shape,
            is_coalesced=coalesced,
            check_invariants=False,
            device=values.device,
        )
    compressed, plain, values = components
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        tensor.shape,
        layout=tensor.layout,
        check_invariants=False,
        device=values.device,
    )


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return plain data as a tensor of the same class.

    A parameter becomes a plain tensor, as in every copy.
    """
    kind = type(tensor)
    if kind in USUAL or is_torchs(kind):
        # Attributes belong to this tensor only, although others may have the same data.
        return torch.Tensor._make_subclass(Tensor, data, False) if vars(tensor) else data
    return torch.Tensor._make_subclass(kind, data, False)


def contents(value: Any) -> dict[Any, Any]:
    """Return the content of a container or an object by key; empty for anything else."""
    if isinstance(value, dict):
        return dict(value) if len(value) <= _MAX_ITEMS else {}
    if isinstance(value, list | tuple):
        return dict(enumerate(value)) if len(value) <= _MAX_ITEMS else {}
    return fields(value)


def put(holder: Any, key: Any, item: Any) -> None:
    """Set an item of a list or dict, or an attribute of an object.

    Args:
        holder: the list, dict or object.
        key: an index, a key, or an attribute's name.
        item: the new value.
    """
    if isinstance(holder, dict | list):
        holder[key] = item
    elif is_object(holder) and key in own(holder):
        own(holder)[key] = item
    else:  # in ``__slots__``
        object.__setattr__(holder, key, item)


def unwrapped_all(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors themselves if all have usual classes, else the parts of each.

    The check is one set operation, because every call of a flow makes it for hundreds of tensors.
    """
    return (
        tensors
        if {*map(type, tensors)} <= USUAL
        else [part for tensor in tensors for part in parts(tensor)]
    )


def addresses(tensors: Sequence[Tensor]) -> list[Address]:
    """Return the address, sizes and strides of each tensor's parts.

    They differ after a move or replacement, and if ``data`` becomes a view of itself.
    """
    try:
        return _addresses(unwrapped_all(tensors))
    except RuntimeError:  # one is sparse
        return _addresses([part for tensor in tensors for part in parts(tensor)])


def _addresses(tensors: Sequence[Tensor]) -> list[Address]:
    columns = map(Tensor.data_ptr, tensors), map(Tensor.size, tensors), map(Tensor.stride, tensors)
    return [*zip(*columns, strict=True)]


def storages(tensors: Sequence[Tensor]) -> list[ref[torch.UntypedStorage]]:
    """Return weak references to the storages of the tensors' parts.

    Two lists are equal only if the storages are the same: unlike an address, a reference to a freed
    storage never equals a reference to a later one.
    """
    found = []
    for tensor in tensors:
        for part in parts(tensor):
            # oneDNN tensors, for example, do not expose their storage
            with suppress(NotImplementedError, RuntimeError):
                found.append(ref(part.untyped_storage()))
    return found


def write_count(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version
