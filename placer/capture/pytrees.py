"""Any nest of inputs or outputs as a flat list of tensors, and back.

torch's pytree knows containers that were registered with it. A model may also take or return
dataclasses, caches and other objects that hold tensors, and these must not have to be registered by
the user.

    (x, {"mask": m}, Cache(k, v), None)   <->   [x, m, k, v]  +  Structure
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

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers as they stand in a captured graph; one without a hint was taken from a tensor's values.
"""
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
_OPAQUE = (nn.Module, type, torch.Generator)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is left of a nest once its tensors are taken out.

    Attributes:
        key: equal for equal nests: containers, their types, and plain constants by value.
        rebuild: makes the nest again from an iterator over its tensors.
        paths: where each tensor stands, for messages: ``[0]``, ``['mask']``, ``.logits``.
        numbers: the whole numbers among the constants, and where they stand; none that an object
            keeps as attributes.
    """

    key: Hashable
    rebuild: Callable[[Iterator[Any]], Any]
    paths: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...] = ()

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The nest with these tensors, in the order in which ``flatten`` gave them."""
        return self.rebuild(_Leaves(tensors))


def flatten(nest: Any, anew: Collection[int] = ()) -> tuple[list[Any], Structure]:
    """The tensors of a nest, depth first, and the structure that holds them.

    Args:
        nest: tensors in any nest of tuples, lists, dicts, named tuples, dataclasses and objects
            with attributes.
        anew: the identities of objects that are made anew where they have no tensors; others pass
            as they are.

    Returns:
        The tensors (and, while a model is captured, numbers that depend on a shape), and the
        structure.
    """
    return _Walk(lambda one: id(one) in anew, None).over(nest)


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The same of ``(args, kwargs)``, into which forward may write.

    What is in several places is one in the copy, too. Objects without tensors are made anew where
    they have room for some, as an empty cache has: a list, a dict or None.
    """
    return _Walk(_has_room, {}).over((args, kwargs))


def detached_nest(nest: Any) -> Any:
    """Return a nest with the same values, whose tensors have no graph of autograd."""
    leaves, structure = flatten(nest)
    return structure.unflatten(
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    )


def outline(structure: Structure) -> Any:
    """Return a nest of this structure, with empty tensors."""
    return structure.unflatten([torch.empty(0)] * len(structure.paths))


def parts_of_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collection[int]:
    """The identities of all lists, dicts and objects in ``(args, kwargs)``."""
    known: dict[int, int] = {}
    _Walk(_has_room, known).over((args, kwargs))
    return known.keys()


class _Leaves:
    """An iterator over tensors, and what was made of them so far."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = iter(tensors)
        self.made: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._tensors)


class _Walk:
    """A way through a nest.

    Args:
        anew: whether an object without tensors is made anew.
        known: the numbers of the lists, dicts and objects that were met; None where each place has
            one of its own.
    """

    def __init__(self, anew: Callable[[Any], bool], known: dict[int, int] | None) -> None:
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.numbers: list[tuple[str, int]] = []
        self._anew, self._known = anew, known

    def over(self, nest: Any) -> tuple[list[Any], Structure]:
        """The tensors of a nest, and the structure that holds them."""
        key, rebuild = self.go(nest, "", ())
        return self.leaves, Structure(key, rebuild, tuple(self.paths), tuple(self.numbers))

    def go(
        self, nest: Any, path: str, above: tuple[int, ...]
    ) -> tuple[Hashable, Callable[[Any], Any]]:
        """The key of a nest, and what makes it again."""
        if isinstance(nest, (Tensor, *NUMBERS)):
            self.leaves.append(nest)
            self.paths.append(path)
            return "*", next
        if isinstance(nest, CONSTANTS) and not _has_numbers(nest):
            numbers = (
                [nest] if type(nest) is int else nest[:1] if isinstance(nest, torch.Size) else ()
            )
            self.numbers += [(path, number) for number in numbers]
            return (type(nest), repr(nest)), lambda _: nest
        if id(nest) in above or holds_nothing(nest):
            return (type(nest), id(nest)), lambda _: nest
        if self._known is not None and id(nest) in self._known:
            again = self._known[id(nest)]
            return ("again", again), lambda flat: flat.made[again]
        parts = parts_of(nest)
        if parts is None:
            return (type(nest), id(nest)), lambda _: nest
        labels, children, assemble = parts
        start, before, above = len(self.leaves), len(self.numbers), (*above, id(nest))
        walked = [
            self.go(child, path + label, above)
            for label, child in zip(labels, children, strict=True)
        ]
        if not isinstance(nest, (tuple, list, dict)) and not dataclasses.is_dataclass(nest):
            del self.numbers[before:]
        if (
            len(self.leaves) == start
            and not isinstance(nest, (tuple, list, dict))
            and not self._anew(nest)
        ):
            # an object without tensors passes as it is
            return (type(nest), id(nest)), lambda _: nest
        rebuilds = [rebuild for _, rebuild in walked]
        key = (type(nest), tuple(labels), tuple(key for key, _ in walked))
        if self._known is None or isinstance(nest, tuple):
            return key, lambda flat: assemble([rebuild(flat) for rebuild in rebuilds])
        number = self._known[id(nest)] = len(self._known)

        def build(flat: _Leaves) -> Any:
            flat.made[number] = assemble([rebuild(flat) for rebuild in rebuilds])
            return flat.made[number]

        return key, build


def _has_numbers(constant: Any) -> bool:
    """Whether a size or a slice has numbers that depend on a shape."""
    if isinstance(constant, slice):
        constant = (constant.start, constant.stop, constant.step)
    return isinstance(constant, tuple) and any(isinstance(number, NUMBERS) for number in constant)


def _has_room(nest: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether an object of a user's class has a list, a dict or None, so that forward may put
    tensors there.
    """
    owner = type(nest).__module__.split(".")[0]
    if owner == "torch" or owner in sys.stdlib_module_names or not _is_usual(type(nest)):
        return False
    found = (attributes_of(nest) or {}).values()
    if any(value is None or isinstance(value, (list, dict, set)) for value in found):
        return True
    above = (*above, id(nest))
    inside = (
        value for value in found if not isinstance(value, CONSTANTS) and not holds_nothing(value)
    )
    return any(id(value) not in above and _has_room(value, above) for value in inside)


def _is_usual(kind: type) -> bool:
    """Whether objects of a class can be made from their attributes: it has no way of its own to
    copy or to end them.
    """
    ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    own = any(getattr(kind, way, None) is not getattr(object, way, None) for way in ways)
    return not own and not hasattr(kind, "__copy__") and not hasattr(kind, "__del__")


def holds_nothing(nest: Any) -> bool:
    """Whether it is a module, a class, a function or the like, of which a nest takes no parts."""
    return isinstance(nest, _OPAQUE) or callable(nest)


def parts_of(nest: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]] | None:
    """Labels, children and the way back of one container, or None for what is no container."""
    kind = type(nest)
    if isinstance(nest, PackedSequence):
        return [f".{name}" for name in kind._fields], list(nest), _packed
    if isinstance(nest, tuple) and hasattr(kind, "_fields"):
        return [f".{name}" for name in kind._fields], list(nest), lambda items: kind(*items)
    if isinstance(nest, (tuple, list)):
        return [f"[{index}]" for index in range(len(nest))], list(nest), kind
    if isinstance(nest, slice):
        return (
            [".start", ".stop", ".step"],
            [nest.start, nest.stop, nest.step],
            lambda items: slice(*items),
        )
    # transformers' ModelOutput is both
    if dataclasses.is_dataclass(nest) and isinstance(nest, dict):
        names = list(nest.keys())
        return (
            [f".{name}" for name in names],
            list(nest.values()),
            lambda items: kind(**_paired(names, items)),
        )
    if isinstance(nest, dict):
        return _mapping_parts(nest)
    attributes = attributes_of(nest)
    if attributes is None:
        return None
    names = list(attributes)
    make = _maker(nest, names)
    if make is None:
        return None
    return (
        [f".{name}" for name in names],
        list(attributes.values()),
        lambda items: _filled(make(), names, items),
    )


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


def attributes_of(nest: Any) -> Mapping[str, Any] | None:
    """What an object holds by name; None where that is nothing."""
    own: dict[str, Any] = getattr(nest, "__dict__", None) or {}
    if dataclasses.is_dataclass(nest):
        names = [field.name for field in dataclasses.fields(nest) if hasattr(nest, field.name)]
        return {name: getattr(nest, name) for name in names} | own
    return own or None


def _maker(nest: Any, names: Sequence[str]) -> Callable[[], Any] | None:
    """Makes objects like this one without the attributes that will be filled in; None where that
    cannot be.
    """
    kind = type(nest)
    try:
        if _is_usual(kind):
            object.__new__(kind)
            return lambda: object.__new__(kind)
        template = copy.copy(nest)
        if template is nest:
            return None
        for name in names:
            if name in getattr(template, "__dict__", {}):
                object.__delattr__(template, name)
    except Exception:  # whatever its own code raises
        return None
    return lambda: copy.copy(template)


def _filled(made: Any, names: Sequence[str], items: Sequence[Any]) -> Any:
    for name, item in zip(names, items, strict=True):
        object.__setattr__(made, name, item)
    return made


def _paired(names: Sequence[Any], items: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(names, items, strict=True))
