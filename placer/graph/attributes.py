"""Which plain attributes of its own a model's code reads while it is traced: a captured graph holds their values.

    self.temperature = 1.0                              # in __init__
    return self.head(x) / self.temperature              # in forward: read
    self.calls += 1                                     # in forward: written, so its value is forward's own affair

Every attribute could be looked at instead. But many are never read by ``forward``, and some of these change between all
calls: a trainer's count of steps, an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), Tensor)
_NONE = object()
_TRACING = threading.RLock()
"""Whoever notes attributes stands on classes, which all threads share."""


class Notes:
    """What a model's code did with plain attributes of the model's modules while it was traced."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {id(child): child for child in model.modules() if not is_torchs(type(child))}
        self.plain = {(id(child), name) for child in self.modules.values() for name in _plain_names(child)}
        self._read: dict[tuple[int, str], None] = {}
        self._written: set[tuple[int, str]] = set()

    def read(self, module: nn.Module, name: str) -> None:
        """The code reads an attribute."""
        self._read[id(module), name] = None

    def write(self, module: nn.Module, name: str) -> None:
        """The code sets an attribute, or takes it away."""
        self._written.add((id(module), name))

    def read_all(self) -> None:
        """Take all plain attributes for read: the code ran where reads are not seen, as in a branch of torch.cond."""
        self._read |= dict.fromkeys(sorted(self.plain))

    def only_read(self) -> tuple[tuple[nn.Module, str], ...]:
        """The attributes that were read and never written, as modules and names."""
        read = (key for key in self._read if key not in self._written)
        return tuple((self.modules[key], name) for key, name in read if key in self.modules)


class _Noting:
    """Stands on a class in the place of an attribute of its objects, and notes what becomes of it."""

    def __init__(self, name: str, default: Any, notes: Notes) -> None:
        self._name, self._default, self._notes = name, default, notes

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        value = self._default if module is None else module.__dict__.get(self._name, self._default)
        if value is _NONE:  # a parameter or a module has the name here
            raise AttributeError(self._name)
        if module is not None and not torch.compiler.is_dynamo_compiling():
            self._notes.read(module, self._name)
        return value

    def __set__(self, module: nn.Module, value: Any) -> None:
        self._notes.write(module, self._name)
        module.__dict__[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        self._notes.write(module, self._name)
        if self._name not in module.__dict__:
            raise AttributeError(self._name)
        del module.__dict__[self._name]


@contextmanager
def noted(model: nn.Module) -> Iterator[Notes]:
    """Note which plain attributes code reads and writes; torch's own modules and private attributes are left out."""
    notes = Notes(model)
    with _TRACING:
        stands = {
            (type(notes.modules[key]), name): _Noting(name, _default(type(notes.modules[key]), name), notes)
            for key, name in notes.plain
        }
        before = {(cls, name): vars(cls).get(name, _NONE) for cls, name in stands}
        try:
            for (cls, name), noting in stands.items():
                setattr(cls, name, noting)
            yield notes
        finally:
            for (cls, name), was in before.items():
                if was is not _NONE:
                    setattr(cls, name, was)
                elif name in vars(cls):
                    delattr(cls, name)


def _plain_names(module: nn.Module) -> set[str]:
    """A module's public plain attributes, those of its class too; what a property gives is none."""
    inherited = {name for cls in type(module).__mro__ if not is_torchs(cls) for name in vars(cls)}
    names = {name for name in (*module.__dict__, *inherited) if not name.startswith("_") and name != "training"}
    return {
        name
        for name in names
        if _is_plain(default := _default(type(module), name)) or default is _NONE
        if _is_plain(module.__dict__.get(name, default))
    }


def _default(cls: type, name: str) -> Any:
    """What a class has under a name, as it is written there."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _NONE)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def is_torchs(cls: type) -> bool:
    """Whether a class is torch's own."""
    return cls is object or cls.__module__.split(".")[0] == "torch"
