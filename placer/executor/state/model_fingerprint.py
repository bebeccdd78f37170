"""What a model consists of, as it was when it was last looked at: every call of a flow asks whether
it still is so.

Of a network of hundreds of modules, one look at each in Python takes longer than the first kernels
of a micro-batch. So the places to look at are gathered once, and are compared with what they held
without a step of Python for each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from placer.capture.python_state.module_hooks import has_global_hooks, module_modes

# What a module holds, each a dict that may be written to, or be another one, at any time.
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
# What is in larger ones is not looked at: every call does.
_MOST_ITEMS = 1_000

_Holder = TypeVar("_Holder")

_tables = operator.itemgetter(*_TABLES)
_trains = operator.itemgetter("training")
_dtype = operator.attrgetter("dtype")
_version = operator.attrgetter("_version")


class Census:
    """A model's modules, whether they train, their parameters, buffers, hooks, and the constants of
    torch's own.

    Args:
        module: the model.

    Attributes:
        members: its modules, their code, parameters and buffers, the same objects as long as none
            was replaced.
        state: its parameters and buffers; those of a module that is used twice are listed twice.
        dtypes: of its parameters and buffers, which ``model.to`` changes in the same objects.
        modes: of every module, whether it trains, and whether it has hooks that a captured graph
            would not run; at the end, whether all have.
        constants: what torch's own modules declare as constants of their code, such as ``p`` of a
            dropout: a captured graph holds their values. Of other modules ``Attributes`` looks at
            what captures read.
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
            # wrappers (torch.compile, torch.jit) have these as properties
            self._fields = []

    @property
    def is_quick(self) -> bool:
        """Whether ``holds`` can tell."""
        return bool(self._fields)

    def holds(self) -> bool:
        """Whether the model is as it was when this was taken; False too where that cannot be told
        quickly.
        """
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
        """Whether what was captured of the model then holds for it later, in the modes of then."""
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
    """The attributes of a model's own modules, and of objects that these have, whose values the
    captures of it hold.

    Of lists, tuples and dicts it is what is in them. Of plain tensors whose values a capture holds
    it is how often they were written to.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._was: dict[tuple[int, str], tuple[Any, list[object]]] = {}
        self._readers: list[tuple[Callable[[Any], object], list[Any]]] = []
        self._containers: list[tuple[Callable[[Any], object], list[Any]]] = []
        self._values: list[object] = []

    def add(self, read: Iterable[tuple[Any, str]], looked_at: Iterable[Tensor] = ()) -> None:
        """Look at these too; from now on they are to be what they are now.

        Args:
            read: attributes, given as holders and names.
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
        """Whether all are what they were."""
        try:
            now = self._now()
        except AttributeError:
            return False
        if are_same(now, self._values):
            return True
        if not are_equal(now, self._values):
            return False
        self._values = now  # equal, but others: the next look is quick again
        return True

    def changed(self) -> list[str]:
        """The names of those that are not what they were."""
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
    """Whether two lists are of the same objects; equal ones may be others."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def are_equal(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists are of the same objects, or of equal numbers and words."""
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
    """What a list, tuple, set or dict holds, after how much that is; anything else alone."""
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
    """What reads a name, with all that it reads it from: a few names are read from many, without a
    step for each.
    """
    holders: dict[str, list[_Holder]] = {}
    for holder, name in named:
        holders.setdefault(name, []).append(holder)
    return [(getter(name), of_it) for name, of_it in holders.items()]


def _declared(module: nn.Module) -> list[str]:
    """The constants of its code that a module declares and holds."""
    return [name for name in getattr(type(module), "__constants__", ()) if name in module.__dict__]


def _modules(root: nn.Module) -> list[nn.Module]:
    """A model's modules; one that is used twice is listed twice."""
    found, waiting = [], [root]
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting += [inner for inner in child._modules.values() if inner is not None]
    return found


def _code(
    modules: Sequence[nn.Module], fields: Iterable[dict[str, object]]
) -> tuple[Iterable[object], ...]:
    """What modules run: their classes, and what stands in some in place of their class's forward."""
    return map(type, modules), map(dict.get, fields, repeat("forward"))


def _members(modules: Sequence[nn.Module]) -> list[object]:
    """Modules with their code, parameters and buffers."""
    found = [*chain.from_iterable(_code(modules, [child.__dict__ for child in modules]))]
    for child in modules:
        found += [child, *child._parameters.values(), *child._buffers.values()]
    return found
