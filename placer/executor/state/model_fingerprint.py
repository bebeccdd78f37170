"""A snapshot of a model's structure, to detect changes before every call of a flow.

For hundreds of modules, visiting each in Python would take longer than the first kernels of a
micro-batch. So the places to inspect are collected once, and are compared with their earlier
content by vectorised builtins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from placer.capture.python_state.module_hooks import has_global_hooks, module_modes

# Dictionaries of a module that may be written to, or replaced, at any time.
_TABLES = (
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, tuple, dict, set)
# Larger containers are not inspected, because every call would do so.
_MOST_ITEMS = 1_000

_Holder = TypeVar("_Holder")

_tables = operator.itemgetter(*_TABLES)
_trains = operator.itemgetter("training")
_dtype = operator.attrgetter("dtype")
_version = operator.attrgetter("_version")


class Census:
    """A snapshot of a model's modules, modes, parameters, buffers, hooks and constants.

    Args:
        module: the model.

    Attributes:
        members: its modules, their code, parameters and buffers, compared by identity.
        state: its parameters and buffers; tensors of a module that occurs twice are listed twice.
        dtypes: of its parameters and buffers, which ``model.to`` changes in place.
        modes: for every module, whether it is in training mode and has hooks that a captured graph
            would not run; at the end, the same for global hooks.
        constants: values that torch's own modules declare as constants, such as ``p`` of a dropout:
            a captured graph contains them. ``Attributes`` covers other modules.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = _modules(module)
        self.members = _members(modules)
        self.state = [item for item in self.members if isinstance(item, Tensor)]
        self.dtypes = self._now_dtypes()
        self.modes = tuple(module_modes(module))
        self._modules = modules
        self._fields = [child.__dict__ for child in modules]
        declared = ((child.__dict__, name) for child in modules for name in _declared(child))
        self._readers = _readers(operator.itemgetter, declared)
        self.constants = self._now_constants()
        try:
            self._training, self._contents = self._now_training(), self._now_contents()
        except (KeyError, TypeError):
            # wrappers (torch.compile, torch.jit) define these as properties
            self._fields = []

    @property
    def is_quick(self) -> bool:
        """Return whether ``holds`` can decide."""
        return bool(self._fields)

    def holds(self) -> bool:
        """Return whether the model is unchanged; False, too, if this cannot be decided quickly."""
        if not self.is_quick:
            return False
        try:
            return (
                self._now_training() == self._training
                and self._now_dtypes() == self.dtypes
                and has_global_hooks() == self.modes[-1][1]
                and are_same(self._now_contents(), self._contents)
                and are_same(self._now_constants(), self.constants)
            )
        except (KeyError, TypeError):
            return False

    def describes(self, later: Census) -> bool:
        """Return whether captures of this snapshot hold for a later one, in the same modes."""
        known = self.dtypes == later.dtypes and are_equal(self.constants, later.constants)
        return known and are_same(self.members, later.members)

    def _now_dtypes(self) -> list[torch.dtype]:
        return [*map(_dtype, self.state)]

    def _now_training(self) -> list[bool]:
        return [*map(_trains, self._fields)]

    def _now_constants(self) -> list[object]:
        return [*chain.from_iterable([map(read, fields) for read, fields in self._readers])]

    def _now_contents(self) -> list[object]:
        tables = chain.from_iterable(map(_tables, self._fields))
        code = _code(self._modules, self._fields)
        return [
            *chain.from_iterable(map(dict.values, filter(None, tables))),
            *chain.from_iterable(code),
        ]


class Attributes:
    """The attributes of a model's own modules and objects whose values its captures contain.

    Lists, tuples and dictionaries are compared by content. Plain tensors whose values a capture
    contains are compared by version.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._was: dict[tuple[int, str], tuple[Any, list[object]]] = {}
        self._readers: list[tuple[Callable[[Any], object], list[Any]]] = []
        self._containers: list[tuple[Callable[[Any], object], list[Any]]] = []
        self._values: list[object] = []

    def add(self, read: Iterable[tuple[Any, str]], looked_at: Iterable[Tensor] = ()) -> None:
        """Add attributes with their current values.

        Args:
            read: attributes, as holders and names.
            looked_at: plain tensors.
        """
        self._tensors += looked_at
        for holder, name in read:
            self._was[id(holder), name] = holder, [*_inside(getattr(holder, name))]
        named = [(holder, name) for (_, name), (holder, _) in self._was.items()]
        contain = [isinstance(getattr(holder, name, None), _CONTAINERS) for holder, name in named]
        self._readers = _readers(operator.attrgetter, named)
        self._containers = _readers(operator.attrgetter, compress(named, contain))
        self._values = self._now()

    def hold(self) -> bool:
        """Return whether all values are unchanged."""
        try:
            now = self._now()
        except AttributeError:
            return False
        # identity first: it is faster than equality, and usually sufficient
        if are_same(now, self._values):
            return True
        if not are_equal(now, self._values):
            return False
        self._values = now  # equal but new objects: the next comparison is fast again
        return True

    def changed(self) -> list[str]:
        """Return the names of the changed attributes."""
        return [
            name
            for (_, name), (holder, was) in self._was.items()
            if not are_equal([*_inside(getattr(holder, name, None))], was)
        ]

    def _now(self) -> list[object]:
        values = [*chain.from_iterable([map(read, holders) for read, holders in self._readers])]
        for read, holders in self._containers:
            values += chain.from_iterable(map(_inside, map(read, holders)))
        return [*values, *map(_version, self._tensors)]


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def are_equal(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects, or equal numbers and strings."""
    return are_same(some, others) or (
        len(some) == len(others)
        and all(a is b or _is_equal(a, b) for a, b in zip(some, others, strict=True))
    )


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or not (type(one) in _PLAIN or isinstance(one, _CONTAINERS)):
        return False
    if isinstance(one, _CONTAINERS):
        return len(one) <= _MOST_ITEMS and are_equal([*_inside(one)], [*_inside(other)])
    return bool(one == other)


def _inside(value: Any) -> Iterable[object]:
    """Return the length and content of a container; other values as a single item."""
    if not isinstance(value, _CONTAINERS):
        return (value,)
    if len(value) > _MOST_ITEMS:
        return (len(value), value)
    return (
        (len(value), *value, *value.values()) if isinstance(value, dict) else (len(value), *value)
    )


def _readers(
    getter: Callable[[str], Callable[[_Holder], object]], named: Iterable[tuple[_Holder, str]]
) -> list[tuple[Callable[[_Holder], object], list[_Holder]]]:
    """Group holders by the name that is read from them, to read them without a Python loop."""
    holders: dict[str, list[_Holder]] = {}
    for holder, name in named:
        holders.setdefault(name, []).append(holder)
    return [(getter(name), of_it) for name, of_it in holders.items()]


def _declared(module: nn.Module) -> list[str]:
    """Return the constants that a module's class declares and the module holds."""
    return [name for name in getattr(type(module), "__constants__", ()) if name in module.__dict__]


def _modules(root: nn.Module) -> list[nn.Module]:
    """Return a model's modules; a module that occurs twice is listed twice."""
    found, waiting = [], [root]
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting += [inner for inner in child._modules.values() if inner is not None]
    return found


def _code(
    modules: Sequence[nn.Module], fields: Iterable[dict[str, object]]
) -> tuple[Iterable[object], ...]:
    """Return the modules' classes, and instance attributes that replace ``forward``."""
    return map(type, modules), map(dict.get, fields, repeat("forward"))


def _members(modules: Sequence[nn.Module]) -> list[object]:
    """Return modules with their code, parameters and buffers."""
    found = [*chain.from_iterable(_code(modules, [child.__dict__ for child in modules]))]
    for child in modules:
        found += [child, *child._parameters.values(), *child._buffers.values()]
    return found
