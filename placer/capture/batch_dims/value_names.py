"""Names of values in nested inputs, targets and results: ``images``, ``targets.0.boxes``."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from placer.capture.pytrees import container_parts, flatten
from placer.utils.units import listed

MAX_NAMES = 12
"""Maximum number of names in a message: results such as caches have hundreds of values."""


_STEP = re.compile(r"\[(?:'((?:[^'\\]|\\.)*)'|\"([^\"]*)\"|([^\]]*))\]|\.(\w+)")
"""A step of a path in ``Structure.paths``: ``[0]``, ``['mask']`` or ``.logits``."""


MISSING = object()
"""Instead of a value that does not exist; None is a value."""


def name_from_path(path: str) -> str:
    """Return the name of a value from its path: ``['loss'][0]`` becomes ``loss.0``."""
    return ".".join(next(filter(None, step.groups()), "") for step in _STEP.finditer(path))


def name_of_part(name: str, label: str) -> str:
    """Return the name of a part from the names of the whole and the part, such as ``[0]``."""
    return f"{name}.{name_from_path(label)}" if name else name_from_path(label)


def has_value(nest: Any, name: str) -> bool:
    """Return whether a nested value has a value of this name, which may be None.

    Args:
        nest: nested tensors.
        name: with parts after dots, such as ``targets.0.boxes``.
    """
    return value_named(nest, name) is not MISSING


def value_named(nest: Any, name: str) -> Any:
    """Return the value of this name in a nested value, or ``MISSING``."""
    # The attributes of a tensor are not parts of it.
    if isinstance(nest, Tensor):
        return MISSING
    labels, children, _ = container_parts(nest) or ([], [], None)
    for label, child in zip(labels, children, strict=True):
        one = name_from_path(label)
        if name == one:
            return child
        found = value_named(child, name[len(one) + 1 :]) if name.startswith(f"{one}.") else MISSING
        if found is not MISSING:
            return found
    return MISSING


def names_in(nest: Any, name: str = "") -> str:
    """Return the names of the tensors in a nested value, for messages.

    Args:
        nest: nested tensors.
        name: of the nested value itself.
    """
    found = [
        ".".join(filter(None, (name, name_from_path(path)))) for path in flatten(nest)[1].paths
    ]
    if not any(found):
        return "no values that have a name"
    return listed(found, MAX_NAMES)
