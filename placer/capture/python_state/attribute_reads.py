"""Recording of the attributes that a model's code reads while it is traced.

A captured graph contains their values, so a changed value requires another capture.

    self.temperature = 1.0                   # in __init__
    return self.head(x) / self.temperature   # in forward: read, so the graph depends on it
    self.calls += 1                          # in forward: written, so forward maintains it itself
    self.config.scale                        # attribute of a module's object: both are read

Comparing all attributes instead would capture too often. ``forward`` never reads many of them, and
some of those change between calls: a trainer's step count, an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from placer.utils.python_objects import is_object, is_torchs, own

_PLAIN_TYPES = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)
_MISSING = object()
# ``module.compile()`` adds the last name.
_MODULE_FIELDS = frozenset({*nn.Module().__dict__, "_compiled_call_impl"})
_MAX_DEPTH = 3
"""Maximum depth of objects in objects, such as configurations of a configuration's parts."""


class AttributeUse:
    """The attributes of a model's modules, and of their objects, that code read or wrote.

    Args:
        model: the model.

    Attributes:
        holders: modules and objects by identity.
        observed: (identity of the holder, name) of the attributes that can be observed.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [child for child in model.modules() if not is_torchs(type(child))]
        self.holders: dict[int, Any] = {
            identity(holder): holder for holder in (*modules, *nested_objects(modules))
        }
        self.observed = {
            (key, name)
            for key, holder in self.holders.items()
            for name in _observable_names(holder)
        }
        self._read: dict[tuple[int, str], None] = {}
        self._written: set[tuple[int, str]] = set()

    def read(self, holder: Any, name: str) -> None:
        """Note that the code reads an attribute."""
        self._read[identity(holder), name] = None

    def write(self, holder: Any, name: str) -> None:
        """Note that the code sets or deletes an attribute."""
        self._written.add((identity(holder), name))

    def count_as_read(self, kind: type, name: str) -> None:
        """Count an attribute as read on all objects of a class, where reads cannot be observed."""
        of_kind = ((key, name) for key, holder in self.holders.items() if type(holder) is kind)
        self._read |= dict.fromkeys(place for place in of_kind if place in self.observed)

    def count_all_as_read(self) -> None:
        """Count all attributes as read.

        torch.compile traces a branch of torch.cond, where reads cannot be observed.
        """
        self._read |= dict.fromkeys(sorted(self.observed))

    def only_read(self) -> tuple[tuple[Any, str], ...]:
        """Return the holders and names of attributes that were read and never written."""
        read = (key for key in self._read if key not in self._written)
        return tuple((self.holders[key], name) for key, name in read if key in self.holders)


class _RecordingDescriptor:
    """A descriptor that replaces an attribute on a class and notes its use by objects.

    Args:
        name: of the attribute.
        default: the value on the class, for objects without a value of their own.
        notes: receives the reads and writes.
    """

    def __init__(self, name: str, default: Any, notes: AttributeUse) -> None:
        self._name, self._default, self._notes = name, default, notes

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        default = self._default
        # The class attribute is a method here, and another object of the class has its own value.
        if owner is not None and hasattr(type(default), "__get__"):
            default = default.__get__(holder, owner)
        value = default if holder is None else own(holder).get(self._name, default)
        # A parameter or module has this name; nn.Module.__getattr__ will find it.
        if value is _MISSING:
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


def nested_objects(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the objects that modules hold, such as configurations, and objects in these.

    Args:
        modules: modules, or other objects.
    """
    known: dict[int, Any] = {}
    found: list[Any] = list(modules)
    for _ in range(_MAX_DEPTH):
        inside = [value for holder in found for value in own(holder).values() if is_object(value)]
        found = [*{id(value): value for value in inside if id(value) not in known}.values()]
        known |= {id(value): value for value in found}
    return list(known.values())


def identity(holder: Any) -> int:
    """Return a number that identifies an object among all living objects.

    While torch.export traces a model in which a module has two names, code meets a new stand-in
    object at each access. The stand-in shares the attribute dictionary of the module, so the
    dictionary identifies it.

    Args:
        holder: a module or another object.
    """
    return id(own(holder))


@contextmanager
def recorded_attributes(model: nn.Module) -> Iterator[AttributeUse]:
    """Note which attributes code reads and writes inside.

    Attributes of torch's own modules and classes are left out.

    Args:
        model: the model whose code runs inside.

    Yields:
        The notes, which grow while the code runs.
    """
    notes = AttributeUse(model)
    before: dict[tuple[type, str], Any] = {}
    try:
        places = {(type(notes.holders[key]), name) for key, name in notes.observed}
        # Collect all defaults before the first descriptor hides one.
        for cls, name, default in [(*place, _class_attribute(*place)) for place in places]:
            was = vars(cls).get(name, _MISSING)
            try:
                setattr(cls, name, _RecordingDescriptor(name, default, notes))
                before[cls, name] = was
            except Exception:
                # A class may refuse to be changed, with any exception.
                notes.count_as_read(cls, name)
        yield notes
    finally:
        for (cls, name), was in before.items():
            if was is not _MISSING:
                setattr(cls, name, was)
            elif name in vars(cls):
                delattr(cls, name)


def _observable_names(holder: Any) -> set[str]:
    """Return the names of an object's own attributes and of plain ones on its class.

    Names of properties are left out.
    """
    kind = type(holder)
    inherited = {name for cls in kind.__mro__ if not is_torchs(cls) for name in vars(cls)}
    names = {name for name in (*vars(holder), *inherited) if not name.startswith("__")}
    if isinstance(holder, nn.Module):
        # Compared in every call already: instances with a forward of their own.
        names -= {*_MODULE_FIELDS, "forward"}
    defaults = {name: _class_attribute(kind, name) for name in names}
    # Leave out properties and other data descriptors.
    free = {name for name, default in defaults.items() if not hasattr(type(default), "__set__")}
    return {name for name in free if name in vars(holder) or _is_plain(defaults[name])}


def _class_attribute(cls: type, name: str) -> Any:
    """Return a class attribute without calling descriptors."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN_TYPES
