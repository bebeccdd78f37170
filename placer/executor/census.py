"""What a model consists of, as it was when it was last looked at: every call of a flow asks whether it still is so.

Of a network of hundreds of modules, one look at each in Python takes longer than the first kernels of a micro-batch. So
the places to look at are gathered once, and are compared with what they held without a step of Python for each.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain

from torch import nn

from placer.graph.export import modes

_TABLES = (
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""What a module holds, each a dict that may be written to, or be another one, at any time."""

_PLAIN = (bool, int, float, str, tuple)

_tables = operator.itemgetter(*_TABLES)
_trains = operator.itemgetter("training")


class Census:
    """A model's modules, whether they train, their parameters, buffers, hooks, and the constants of torch's own.

    Args:
        module: the model.

    Attributes:
        members: its modules, parameters and buffers, the same objects as long as none was replaced.
        modes: of every module, whether it trains, and whether it has hooks that a captured graph would not run.
        constants: what torch's own modules declare as constants of their code, such as ``p`` of a dropout: a captured
            graph holds their values. Attributes of other modules may be anything, counters of calls too, and are not
            looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = _modules(module)
        self.members = _members(modules)
        self.modes = tuple(modes(module))
        self._fields = [child.__dict__ for child in modules]
        declared = [(child.__dict__, _declared(child)) for child in modules]
        # Each name twice: the getter of a single one would not give a tuple.
        self._readers = [(operator.itemgetter(*names, *names), fields) for fields, names in declared if names]
        self.constants = self._now_constants()
        try:
            self._training, self._contents = self._now_training(), self._now_contents()
        except (KeyError, TypeError):  # wrappers (torch.compile, torch.jit) have these as properties
            self._fields = []

    def holds(self) -> bool:
        """Whether the model is as it was when this was taken; False too where that cannot be told quickly."""
        if not self._fields:
            return False
        try:
            return (
                self._now_training() == self._training
                and are_same(self._now_contents(), self._contents)
                and are_same(self._now_constants(), self.constants)
            )
        except (KeyError, TypeError):
            return False

    def describes(self, later: Census) -> bool:
        """Whether what was captured of the model then holds for it later, in the modes of then."""
        return are_same(self.members, later.members) and are_equal(self.constants, later.constants)

    def _now_training(self) -> list[bool]:
        return [*map(_trains, self._fields)]

    def _now_constants(self) -> list[object]:
        return [*chain.from_iterable([read(fields) for read, fields in self._readers])]

    def _now_contents(self) -> list[object]:
        tables = chain.from_iterable(map(_tables, self._fields))
        return [*chain.from_iterable(map(dict.values, filter(None, tables)))]


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists are of the same objects; equal ones may be others."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def are_equal(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists are of the same objects, or of equal numbers and words."""
    return are_same(some, others) or (
        len(some) == len(others)
        and all(a is b or (type(a) is type(b) in _PLAIN and a == b) for a, b in zip(some, others, strict=True))
    )


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


def _members(modules: Sequence[nn.Module]) -> list[object]:
    """Modules with their parameters and buffers."""
    found: list[object] = []
    for child in modules:
        found += [child, *child._parameters.values(), *child._buffers.values()]
    return found
