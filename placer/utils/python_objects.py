"""Python objects of user-defined classes: recognition and attributes."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)


def is_object(value: Any) -> bool:
    """Return whether a value is an instance of a user's or library's class."""
    return _has_own_class(value) and isinstance(getattr(value, "__dict__", None), dict)


def is_torchs(cls: type) -> bool:
    """Return whether a class is torch's own."""
    return cls is object or cls.__module__.split(".")[0] == "torch"


def own(holder: Any) -> dict[str, Any]:
    """Return the instance attributes of an object, bypassing a custom attribute lookup."""
    kind = type(holder)
    is_usual = (
        issubclass(kind, nn.Module)
        or getattr(kind, "__getattribute__", None) is object.__getattribute__
    )
    # torch.cond's compiler supports only the usual lookup
    found: dict[str, Any] = (
        holder.__dict__ if is_usual else object.__getattribute__(holder, "__dict__")
    )
    return found


def fields(value: Any) -> dict[str, Any]:
    """Return the fields of an object by name, ``__slots__`` included.

    Empty unless a user's class defines it.
    """
    if not _has_own_class(value):
        return {}
    found = dict(own(value)) if isinstance(getattr(value, "__dict__", None), dict) else {}
    # ``__slots__`` of all base classes; ``__dict__`` was read above
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


@contextmanager
def attribute_set(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own inside the block, then restore the previous value."""
    attributes = vars(holder)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)


def _has_own_class(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, nn.Module, type, Enum)) or callable(value):
        return False
    kind = type(value)
    is_theirs = not is_torchs(kind) and kind.__module__.split(".")[0] not in sys.stdlib_module_names
    return is_theirs or isinstance(value, argparse.Namespace | types.SimpleNamespace)
