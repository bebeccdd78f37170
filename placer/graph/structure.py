"""Any nest of inputs or outputs as a flat list of tensors, and back.

torch's pytree knows containers that were registered with it. A model may also take or return dataclasses, caches and
other objects that hold tensors, and these must not have to be registered by the user.

    (x, {"mask": m}, Cache(k, v), None)   <->   [x, m, k, v]  +  Structure
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_OPAQUE = (nn.Module, type, torch.Generator)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is left of a nest once its tensors are taken out.

    Attributes:
        key: equal for equal nests: containers, their types, and plain constants by value.
        rebuild: makes the nest again from an iterator over its tensors.
        paths: where each tensor stands, for messages: ``[0]``, ``['mask']``, ``.logits``.
    """

    key: Hashable
    rebuild: Callable[[Iterator[Any]], Any]
    paths: tuple[str, ...]

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The nest with these tensors, in the order in which ``flatten`` gave them."""
        return self.rebuild(iter(tensors))


def flatten(nest: Any) -> tuple[list[Any], Structure]:
    """The tensors of a nest, depth first, and the structure that holds them.

    Args:
        nest: tensors in any nest of tuples, lists, dicts, named tuples, dataclasses and objects with attributes.

    Returns:
        The tensors (and, while a model is captured, numbers that depend on a shape), and the structure.
    """
    leaves: list[Any] = []
    paths: list[str] = []
    key, rebuild = _walk(nest, "", leaves, paths, ())
    return leaves, Structure(key, rebuild, tuple(paths))


def _walk(
    nest: Any, path: str, leaves: list[Any], paths: list[str], above: tuple[int, ...]
) -> tuple[Hashable, Callable[[Iterator[Any]], Any]]:
    if isinstance(nest, (Tensor, *_NUMBERS)):
        leaves.append(nest)
        paths.append(path)
        return "*", next
    if isinstance(nest, CONSTANTS):
        return (type(nest), repr(nest)), lambda _: nest
    if id(nest) in above or _holds_nothing(nest):
        return (type(nest), id(nest)), lambda _: nest
    parts = _parts(nest)
    if parts is None:
        return (type(nest), id(nest)), lambda _: nest
    labels, children, assemble = parts
    start = len(leaves)
    walked = [
        _walk(child, f"{path}{label}", leaves, paths, (*above, id(nest)))
        for label, child in zip(labels, children, strict=True)
    ]
    if len(leaves) == start and not isinstance(nest, (tuple, list, dict)):
        return (type(nest), id(nest)), lambda _: nest  # an object without tensors passes as it is
    rebuilds = [rebuild for _, rebuild in walked]
    key = (type(nest), tuple(labels), tuple(key for key, _ in walked))
    return key, lambda flat: assemble([rebuild(flat) for rebuild in rebuilds])


class Exchange:
    """Tensors that take the places of others, for a while.

    Tuples are made anew; lists, dicts and objects stay the same ones, so that what is written to them stays there.

    Args:
        other: makes the one that takes a tensor's place, which may be itself.
    """

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        self._other = other
        self._done: list[tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = []

    def made(self, nest: Any, above: tuple[int, ...] = ()) -> Any:
        """The nest, or, of tuples, another one with the same parts."""
        if isinstance(nest, Tensor):
            return self._other(nest)
        if isinstance(nest, (*CONSTANTS, *_NUMBERS)) or id(nest) in above or _holds_nothing(nest):
            return nest
        above = (*above, id(nest))
        if isinstance(nest, tuple):
            _, children, assemble = _parts(nest) or ([], [], tuple)
            items = [self.made(child, above) for child in children]
            return nest if all(map(is_, items, children)) else assemble(items)
        if isinstance(nest, (list, dict)):
            for place, was in list(enumerate(nest) if isinstance(nest, list) else nest.items()):
                self._put(was, above, partial(_item, nest, place), partial(nest.__setitem__, place))
        else:
            for name, was in list((_attributes(nest) or {}).items()):
                self._put(was, above, partial(getattr, nest, name, None), partial(object.__setattr__, nest, name))
        return nest

    def _put(self, was: Any, above: tuple[int, ...], read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        now = self.made(was, above)
        if now is not was:
            write(now)
            self._done.append((read, write, was, now))

    def put_back(self) -> None:
        """Give every tensor that is still in another's place that place back."""
        while self._done:
            read, write, was, now = self._done.pop()
            if read() is now:
                write(was)


def _item(nest: Any, place: Any) -> Any:
    """What is there; None where it is gone."""
    try:
        return nest[place]
    except (IndexError, KeyError):
        return None


def _holds_nothing(nest: Any) -> bool:
    return isinstance(nest, _OPAQUE) or callable(nest)


def _parts(nest: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]] | None:
    """Labels, children and the way back of one container, or None for what is no container."""
    kind = type(nest)
    if isinstance(nest, PackedSequence):
        return [f".{name}" for name in kind._fields], list(nest), _packed
    if isinstance(nest, tuple) and hasattr(kind, "_fields"):
        return [f".{name}" for name in kind._fields], list(nest), lambda items: kind(*items)
    if isinstance(nest, (tuple, list)):
        return [f"[{index}]" for index in range(len(nest))], list(nest), kind
    if dataclasses.is_dataclass(nest) and isinstance(nest, dict):  # transformers' ModelOutput is both
        names = list(nest.keys())
        return [f".{name}" for name in names], list(nest.values()), lambda items: kind(**_paired(names, items))
    if isinstance(nest, dict):
        return _mapping_parts(nest)
    attributes = _attributes(nest)
    if attributes is None:
        return None
    names = list(attributes)
    template = _bare(nest, names)
    return [f".{name}" for name in names], list(attributes.values()), lambda items: _filled(template, names, items)


def _packed(items: list[Any]) -> PackedSequence:
    """A packed sequence, which takes its lengths from the host alone."""
    return PackedSequence(items[0], items[1].cpu(), *items[2:])


def _mapping_parts(nest: dict[Any, Any]) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]]:
    names = list(nest)
    template = copy.copy(nest)
    template.clear()

    def assemble(items: list[Any]) -> Any:
        filled = copy.copy(template)
        filled.update(_paired(names, items))
        return filled

    return [f"[{name!r}]" for name in names], list(nest.values()), assemble


def _attributes(nest: Any) -> Mapping[str, Any] | None:
    if dataclasses.is_dataclass(nest):
        return {
            field.name: getattr(nest, field.name) for field in dataclasses.fields(nest) if hasattr(nest, field.name)
        }
    return getattr(nest, "__dict__", None) or None


def _bare(nest: Any, names: Sequence[str]) -> Any:
    """A shallow copy of an object without the attributes that will be filled in."""
    template = copy.copy(nest)
    for name in names:
        if name in getattr(template, "__dict__", {}):
            object.__delattr__(template, name)
    return template


def _filled(template: Any, names: Sequence[str], items: Sequence[Any]) -> Any:
    filled = copy.copy(template)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(filled, name, item)
    return filled


def _paired(names: Sequence[Any], items: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(names, items, strict=True))
