"""Which attributes of its own a model's code reads while it is traced: a captured graph holds their
values.

    self.temperature = 1.0                              # in __init__
    return self.head(x) / self.temperature              # in forward: read
    self.calls += 1                                     # in forward: written, so its value is forward's own affair
    self.config.scale                                   # of an object that a module has: read of both

Every attribute could be looked at instead. But many are never read by ``forward``, and some of
these change between all
calls: a trainer's count of steps, an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from placer.utils.python_objects import is_object, is_torchs, own

_PLAIN = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)
_NONE = object()
# this one module.compile() adds
_OF_EVERY_MODULE = frozenset({*nn.Module().__dict__, "_compiled_call_impl"})
_DEEPEST = 3
"""So many objects inside one another are looked into: a module's configuration may have one for
each of its parts."""


class Notes:
    """What a model's code did with attributes of the model's modules, and of objects that these
    have.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [child for child in model.modules() if not is_torchs(type(child))]
        self.holders: dict[int, Any] = {
            identity(holder): holder for holder in (*modules, *objects_of(modules))
        }
        self.noted = {
            (key, name) for key, holder in self.holders.items() for name in _names(holder)
        }
        self._read: dict[tuple[int, str], None] = {}
        self._written: set[tuple[int, str]] = set()

    def read(self, holder: Any, name: str) -> None:
        """The code reads an attribute."""
        self._read[identity(holder), name] = None

    def write(self, holder: Any, name: str) -> None:
        """The code sets an attribute, or takes it away."""
        self._written.add((identity(holder), name))

    def read_unseen(self, kind: type, name: str) -> None:
        """Take an attribute for read of all objects of a class, where that is not seen."""
        of_kind = ((key, name) for key, holder in self.holders.items() if type(holder) is kind)
        self._read |= dict.fromkeys(place for place in of_kind if place in self.noted)

    def read_all(self) -> None:
        """Take all attributes for read: the code ran where reads are not seen, as in a branch of
        torch.cond.
        """
        self._read |= dict.fromkeys(sorted(self.noted))

    def only_read(self) -> tuple[tuple[Any, str], ...]:
        """The attributes that were read and never written, as holders and names."""
        read = (key for key in self._read if key not in self._written)
        return tuple((self.holders[key], name) for key, name in read if key in self.holders)


class _Noting:
    """Stands on a class in the place of an attribute of its objects, and notes what becomes of it."""

    def __init__(self, name: str, default: Any, notes: Notes) -> None:
        self._name, self._default, self._notes = name, default, notes

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        default = self._default
        # a method, where another object has its own
        if owner is not None and hasattr(type(default), "__get__"):
            default = default.__get__(holder, owner)
        value = default if holder is None else own(holder).get(self._name, default)
        if value is _NONE:  # a parameter or a module has the name here
            raise AttributeError(self._name)
        if holder is not None and not torch.compiler.is_dynamo_compiling():
            self._notes.read(holder, self._name)
        return value

    def __set__(self, holder: Any, value: Any) -> None:
        self._notes.write(holder, self._name)
        own(holder)[self._name] = value

    def __delete__(self, holder: Any) -> None:
        self._notes.write(holder, self._name)
        if self._name not in own(holder):
            raise AttributeError(self._name)
        del own(holder)[self._name]


def objects_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The objects that modules have, configurations say, and those that these have."""
    known: dict[int, Any] = {}
    found: list[Any] = list(modules)
    for _ in range(_DEEPEST):
        inside = [value for holder in found for value in own(holder).values() if is_object(value)]
        found = [*{id(value): value for value in inside if id(value) not in known}.values()]
        known |= {id(value): value for value in found}
    return list(known.values())


def identity(holder: Any) -> int:
    """Return a number that tells an object from all others that live now.

    While torch.export traces a model in which a module has two names, code meets each module as a
    stand-in object, a new one for each access. A stand-in shares the attribute dictionary of its
    module, so that dictionary counts.
    """
    return id(own(holder))


@contextmanager
def noted(model: nn.Module) -> Iterator[Notes]:
    """Note which attributes code reads and writes; those of torch's own modules and classes are
    left out.
    """
    notes = Notes(model)
    before: dict[tuple[type, str], Any] = {}
    try:
        places = {(type(notes.holders[key]), name) for key, name in notes.noted}
        # all before any is another
        for cls, name, default in [(*place, _default(*place)) for place in places]:
            was = vars(cls).get(name, _NONE)
            try:
                setattr(cls, name, _Noting(name, default, notes))
                before[cls, name] = was
            except Exception:
                # a class may allow nothing else in its place, and say so as it likes
                notes.read_unseen(cls, name)
        yield notes
    finally:
        for (cls, name), was in before.items():
            if was is not _NONE:
                setattr(cls, name, was)
            elif name in vars(cls):
                delattr(cls, name)


def _names(holder: Any) -> set[str]:
    """The attributes of a module or another object, plain ones of its class too; what a property
    gives is none.
    """
    kind = type(holder)
    inherited = {name for cls in kind.__mro__ if not is_torchs(cls) for name in vars(cls)}
    names = {name for name in (*vars(holder), *inherited) if not name.startswith("__")}
    if isinstance(holder, nn.Module):
        # which has a place of its own among what calls look at
        names -= {*_OF_EVERY_MODULE, "forward"}
    defaults = {name: _default(kind, name) for name in names}
    # no property, say
    free = {name for name, default in defaults.items() if not hasattr(type(default), "__set__")}
    return {name for name in free if name in vars(holder) or _is_plain(defaults[name])}


def _default(cls: type, name: str) -> Any:
    """What a class has under a name, as it is written there."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _NONE)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN
