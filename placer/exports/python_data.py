"""Python data in texts: lists and dictionaries as users of Python engines write and print them."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from placer.errors import InputError

_ASSIGNED = re.compile(r"\s*\w+\s*=(?!=)")
_DICT = re.compile(r"OrderedDict\((.*)\)", re.DOTALL)
_DEVICE = re.compile(
    r"(?:torch\.)?device\((?:type=)?['\"](\w+(?::\d+)?)['\"](?:, ?(?:index=)?(\d+))?\)"
)
_SPLIT = re.compile(r"<?SplitPoint\.(\w+)(?:: ?\d+>)?")


def python_data(text: str, title: str, example: str) -> Any:
    """Return the data that a text contains.

    Args:
        text: JSON or a Python literal, alone or assigned to a name. It may contain
            ``OrderedDict(...)``, ``torch.device(...)``, which becomes the device's name, and
            ``SplitPoint.BEGINNING``, which becomes ``"BEGINNING"``.
        title: the format's name, for the message.
        example: a text of the format, for the message.

    Raises:
        InputError: the text is neither JSON nor a Python literal.
    """
    bare = _ASSIGNED.sub("", text, count=1) if _ASSIGNED.match(text) else text
    bare = bare.strip()
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        pass
    ordered = _DICT.fullmatch(bare)
    literal = _DEVICE.sub(_device, ordered[1] if ordered else bare)
    try:
        found = ast.literal_eval(_SPLIT.sub(r'"\1"', literal))
        repr(found)  # fails for a number of too many digits, which no message could show
        return dict(found) if ordered else found
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    raise InputError(
        f"{title} is {text.strip()!r:.80}, which is neither JSON nor a Python literal; give a text "
        f"such as {example}"
    )


def _device(found: re.Match[str]) -> str:
    name, index = found.groups()
    return f'"{name}"' if index is None else f'"{name}:{index}"'


def whole_numbers(data: Any) -> list[int] | None:
    """Return a list or tuple of integers as a list; None for other data."""
    if not isinstance(data, list | tuple):
        return None
    return list(data) if all(type(each) is int for each in data) else None
