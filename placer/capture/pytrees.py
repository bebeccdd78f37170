"""Nested inputs and outputs as a flat list of tensors, and back.

    (x, {"mask": m}, Cache(k, v), None)   <->   [x, m, k, v]  +  Structure

torch's pytree handles registered containers only. Models also take and return dataclasses, caches
and other objects with tensors, which users should not have to register.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Symbolic numbers of a captured graph; one without a hint was read from a tensor's values."""
CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
)
Parts = tuple[list[str], list[Any], Callable[[list[Any]], Any]]
"""Labels of a container's children, the children, and a function from new children to a copy."""

# Types whose attributes are not searched for tensors.
_OPAQUE = (nn.Module, type, torch.Generator)


@dataclasses.dataclass(frozen=True)
class Structure:
    """A nested value without its tensors.

    Attributes:
        key: equal for nested values with equal containers, types and constants.
        rebuild: makes the nested value again from an iterator over its tensors.
        paths: path of each tensor, for messages: ``[0]``, ``['mask']``, ``.logits``.
        numbers: the integers among the constants, with their paths, except in attributes of
            objects.
    """

    key: Hashable
    rebuild: Callable[[Iterator[Any]], Any]
    paths: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...] = ()

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """Return the nested value with these tensors, in the order of ``flatten``."""
        return self.rebuild(_TensorIterator(tensors))


def flatten(nest: Any, copied: Collection[int] = ()) -> tuple[list[Any], Structure]:
    """Return the tensors of a nested value, depth first, and its structure.

    Args:
        nest: tensors in nested tuples, lists, dicts, named tuples, dataclasses and objects with
            attributes.
        copied: identities of objects to copy even without tensors; other such objects are
            passed on unchanged.

    Returns:
        The tensors, and during a capture also symbolic numbers; and the structure.
    """
    return _Traversal(lambda one: id(one) in copied, None).flatten(nest)


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """Return the tensors and the structure of ``(args, kwargs)``, which forward may write to.

    An object that occurs several times occurs as one object in the copy. Objects without tensors
    are copied if they have room for tensors, like an empty cache: a list, a dict or None.
    """
    return _Traversal(_has_room_for_tensors, {}).flatten((args, kwargs))


def lazy_part(result: Any) -> str:
    """Return the type name of a generator or another iterator in a result; empty without one.

    Its code would run after the call, and would find the model unplaced.
    """
    items = result.values() if isinstance(result, dict) else result
    for item in [result, *(items if isinstance(result, (tuple, list, dict)) else ())]:
        if isinstance(item, Iterator):
            return type(item).__name__
    return ""


def detached_nest(nest: Any) -> Any:
    """Return a nested value with the same values, detached from autograd."""
    leaves, structure = flatten(nest)
    return structure.unflatten(
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def outline(structure: Structure) -> Any:
    """Return a nest of this structure, with empty tensors."""
    return structure.unflatten([torch.empty(0)] * len(structure.paths))


def parts_of_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collection[int]:
    """Return the identities of all lists, dicts and objects in ``(args, kwargs)``."""
    known: dict[int, int] = {}
    _Traversal(_has_room_for_tensors, known).flatten((args, kwargs))
    return known.keys()


class _TensorIterator:
    """An iterator over tensors, with the objects made from them so far."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = iter(tensors)
        self.made: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._tensors)


class _Traversal:
    """A traversal of a nested value.

    Args:
        is_copied: whether to copy an object without tensors.
        known: numbers of the lists, dicts and objects met so far, by identity; None to treat every
            occurrence as another object.
    """

    def __init__(self, is_copied: Callable[[Any], bool], known: dict[int, int] | None) -> None:
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.numbers: list[tuple[str, int]] = []
        self._is_copied, self._known = is_copied, known

    def flatten(self, nest: Any) -> tuple[list[Any], Structure]:
        """Return the tensors of a nested value, and its structure."""
        key, rebuild = self.visit(nest, "", ())
        return self.leaves, Structure(key, rebuild, tuple(self.paths), tuple(self.numbers))

    def visit(
        self, nest: Any, path: str, above: tuple[int, ...]
    ) -> tuple[Hashable, Callable[[Any], Any]]:
        """Return the key of a nested value and a function that rebuilds it."""
        if isinstance(nest, (Tensor, *SYMBOLIC_NUMBERS)):
            self.leaves.append(nest)
            self.paths.append(path)
            return "*", next
        if isinstance(nest, CONSTANTS) and not _has_symbolic_numbers(nest):
            self._note_numbers(nest, path)
            return (type(nest), repr(nest)), lambda _: nest
        if id(nest) in above or is_constant(nest):
            return (type(nest), id(nest)), lambda _: nest
        if self._known is not None and id(nest) in self._known:
            # The second occurrence of an object: rebuild it as the first one.
            again = self._known[id(nest)]
            return ("again", again), lambda flat: flat.made[again]
        parts = container_parts(nest)
        if parts is None:
            return (type(nest), id(nest)), lambda _: nest
        return self._visit_container(nest, parts, path, (*above, id(nest)))

    def _note_numbers(self, constant: Any, path: str) -> None:
        """Note an integer, or the first number of a size."""
        if type(constant) is int:
            self.numbers.append((path, constant))
        elif isinstance(constant, torch.Size):
            self.numbers += [(path, number) for number in constant[:1]]

    def _visit_container(
        self, nest: Any, parts: Parts, path: str, above: tuple[int, ...]
    ) -> tuple[Hashable, Callable[[Any], Any]]:
        """Return the key of a container or object and a function that rebuilds it."""
        labels, children, assemble = parts
        start, before = len(self.leaves), len(self.numbers)
        is_container = isinstance(nest, (tuple, list, dict))
        walked = [
            self.visit(child, path + label, above)
            for label, child in zip(labels, children, strict=True)
        ]
        if not is_container and not dataclasses.is_dataclass(nest):
            # An object's integers, such as a cache's length, are its own business.
            del self.numbers[before:]
        if len(self.leaves) == start and not is_container and not self._is_copied(nest):
            # An object without tensors is passed on unchanged.
            return (type(nest), id(nest)), lambda _: nest
        rebuilds = [rebuild for _, rebuild in walked]
        key = (type(nest), tuple(labels), tuple(key for key, _ in walked))
        if self._known is None or isinstance(nest, tuple):
            return key, lambda flat: assemble([rebuild(flat) for rebuild in rebuilds])
        number = self._known[id(nest)] = len(self._known)

        def build(flat: _TensorIterator) -> Any:
            flat.made[number] = assemble([rebuild(flat) for rebuild in rebuilds])
            return flat.made[number]

        return key, build


def _has_symbolic_numbers(constant: Any) -> bool:
    """Return whether a size or a slice contains symbolic numbers."""
    if isinstance(constant, slice):
        constant = (constant.start, constant.stop, constant.step)
    return isinstance(constant, tuple) and any(
        isinstance(number, SYMBOLIC_NUMBERS) for number in constant
    )


def _has_room_for_tensors(nest: Any, above: tuple[int, ...] = ()) -> bool:
    """Return whether a user's object has a list, dict or None that forward may put tensors into."""
    owner = type(nest).__module__.split(".")[0]
    if (
        owner == "torch"
        or owner in sys.stdlib_module_names
        or not _is_made_from_attributes(type(nest))
    ):
        return False
    found = (attributes_of(nest) or {}).values()
    if any(value is None or isinstance(value, (list, dict, set)) for value in found):
        return True
    above = (*above, id(nest))
    inside = (
        value for value in found if not isinstance(value, CONSTANTS) and not is_constant(value)
    )
    return any(id(value) not in above and _has_room_for_tensors(value, above) for value in inside)


def _is_made_from_attributes(kind: type) -> bool:
    """Return whether objects of a class can be made from their attributes.

    The class has no methods of its own for copying or destruction.
    """
    ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    own = any(getattr(kind, way, None) is not getattr(object, way, None) for way in ways)
    return not own and not hasattr(kind, "__copy__") and not hasattr(kind, "__del__")


def is_constant(nest: Any) -> bool:
    """Return whether a value counts as a constant: a module, a class, a function and so on."""
    return isinstance(nest, _OPAQUE) or callable(nest)


def container_parts(nest: Any) -> Parts | None:
    """Return a container's labels, children and rebuilding function; None for other values."""
    kind = type(nest)
    if isinstance(nest, (tuple, list)):
        return _sequence_parts(nest)
    if isinstance(nest, slice):
        return (
            [".start", ".stop", ".step"],
            [nest.start, nest.stop, nest.step],
            lambda items: slice(*items),
        )
    # transformers' ModelOutput is both; its constructor sets attributes and items.
    if dataclasses.is_dataclass(nest) and isinstance(nest, dict):
        names = list(nest.keys())
        return (
            [f".{name}" for name in names],
            list(nest.values()),
            lambda items: kind(**_zip_dict(names, items)),
        )
    if isinstance(nest, dict):
        return _mapping_parts(nest)
    attributes = attributes_of(nest)
    if attributes is None:
        return None
    names = list(attributes)
    make = _object_factory(nest, names)
    if make is None:
        return None
    return (
        [f".{name}" for name in names],
        list(attributes.values()),
        lambda items: _set_attributes(make(), names, items),
    )


def _sequence_parts(nest: tuple[Any, ...] | list[Any]) -> Parts:
    kind: Any = type(nest)
    if isinstance(nest, PackedSequence):
        return [f".{name}" for name in kind._fields], list(nest), _make_packed
    if isinstance(nest, tuple) and hasattr(kind, "_fields"):
        return [f".{name}" for name in kind._fields], list(nest), lambda items: kind(*items)
    return [f"[{index}]" for index in range(len(nest))], list(nest), kind


def _make_packed(items: list[Any]) -> PackedSequence:
    """Return a packed sequence, whose lengths torch requires on the host."""
    return PackedSequence(items[0], items[1].cpu(), *items[2:])


def _mapping_parts(nest: dict[Any, Any]) -> Parts:
    names = list(nest)
    template = copy.copy(nest)
    template.clear()

    def assemble(items: list[Any]) -> Any:
        filled = copy.copy(template)
        filled.update(_zip_dict(names, items))
        return filled

    return [f"[{name!r}]" for name in names], list(nest.values()), assemble


def attributes_of(nest: Any) -> Mapping[str, Any] | None:
    """Return an object's attributes by name; None without any."""
    own: dict[str, Any] = getattr(nest, "__dict__", None) or {}
    if dataclasses.is_dataclass(nest):
        names = [field.name for field in dataclasses.fields(nest) if hasattr(nest, field.name)]
        return {name: getattr(nest, name) for name in names} | own
    return own or None


def _object_factory(nest: Any, names: Sequence[str]) -> Callable[[], Any] | None:
    """Return a function that makes objects like this one without these attributes.

    Returns:
        The function; None if such objects cannot be made.
    """
    kind = type(nest)
    try:
        if _is_made_from_attributes(kind):
            object.__new__(kind)
            return lambda: object.__new__(kind)
        template = copy.copy(nest)
        if template is nest:
            return None
        for name in names:
            if name in getattr(template, "__dict__", {}):
                object.__delattr__(template, name)
    # The object's own code may raise anything.
    except Exception:
        return None
    return lambda: copy.copy(template)


def _set_attributes(made: Any, names: Sequence[str], items: Sequence[Any]) -> Any:
    for name, item in zip(names, items, strict=True):
        object.__setattr__(made, name, item)
    return made


def _zip_dict(names: Sequence[Any], items: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(names, items, strict=True))
