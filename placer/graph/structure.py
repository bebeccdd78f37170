"""Any nest of inputs or outputs as a flat list of tensors, and back.

torch's pytree knows containers that were registered with it. A model may also take or return dataclasses, caches and
other objects that hold tensors, and these must not have to be registered by the user.

    (x, {"mask": m}, Cache(k, v), None)   <->   [x, m, k, v]  +  Structure
"""

from __future__ import annotations

import copy
import dataclasses
import sys
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
    return _flat(nest, anew=False)


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The same of ``(args, kwargs)``; objects without tensors are made anew as well, as forward may write into them."""
    return _flat((args, kwargs), anew=True)


def _flat(nest: Any, anew: bool) -> tuple[list[Any], Structure]:
    leaves: list[Any] = []
    paths: list[str] = []
    key, rebuild = _walk(nest, "", leaves, paths, (), anew)
    return leaves, Structure(key, rebuild, tuple(paths))


def _walk(
    nest: Any, path: str, leaves: list[Any], paths: list[str], above: tuple[int, ...], anew: bool
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
        _walk(child, f"{path}{label}", leaves, paths, (*above, id(nest)), anew)
        for label, child in zip(labels, children, strict=True)
    ]
    if len(leaves) == start and not isinstance(nest, (tuple, list, dict)) and not (anew and _is_of_a_user(nest)):
        return (type(nest), id(nest)), lambda _: nest  # an object without tensors passes as it is
    rebuilds = [rebuild for _, rebuild in walked]
    key = (type(nest), tuple(labels), tuple(key for key, _ in walked))
    return key, lambda flat: assemble([rebuild(flat) for rebuild in rebuilds])


def give_back(nest: Any, after: Any) -> Any:
    """Let the lists, dicts and objects of a nest hold what those of another one in their places hold.

    Args:
        nest: what a caller gave.
        after: a copy of it, into which forward may have written.

    Returns:
        The nest, or what stands for it: of tuples another one, of anything else what is there after.
    """
    if nest is after or type(nest) is not type(after) or isinstance(nest, (Tensor, *CONSTANTS, *_NUMBERS)):
        return after
    if _holds_nothing(nest):
        return after
    if isinstance(nest, tuple):
        _, children, assemble = _parts(nest) or ([], [], tuple)
        items = list(map(give_back, children, after))
        return nest if len(nest) == len(after) and all(map(is_, items, children)) else assemble(items)
    if isinstance(nest, list):
        items = [*map(give_back, nest, after), *after[len(nest) :]]
        if len(items) != len(nest) or not all(map(is_, items, nest)):
            nest[:] = items
    elif isinstance(nest, dict):
        for key in [key for key in nest if key not in after]:
            del nest[key]
        for key, value in after.items():
            held = give_back(nest[key], value) if key in nest else value
            if key not in nest or held is not nest[key]:
                nest[key] = held
    else:
        had, has = dict(_attributes(nest) or {}), _attributes(after) or {}
        for name in had.keys() - has.keys():
            object.__delattr__(nest, name)
        for name, value in has.items():
            held = give_back(had[name], value) if name in had else value
            if name not in had or held is not had[name]:
                object.__setattr__(nest, name, held)
    return nest


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


def _is_of_a_user(nest: Any) -> bool:
    """Whether an object is of a class that neither Python nor torch has."""
    owner = type(nest).__module__.split(".")[0]
    return owner != "torch" and owner not in sys.stdlib_module_names


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
    if template is None:
        return None
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
    """A shallow copy of an object without the attributes that will be filled in; None of one that allows no copy."""
    try:
        template = copy.copy(nest)
    except Exception:  # whatever its own code raises
        return None
    if template is nest:
        return None
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
