"""Checks of options with simple types: flags, counts and functions.

Python would accept a value of another type silently: the text "no" is true, and True counts as 1.
"""

from __future__ import annotations

import math
from typing import Any

from placer.errors import InputError, kind_of


def require_flags(**flags: Any) -> None:
    """Raise an InputError if a flag is neither True nor False.

    Args:
        flags: the value of each flag, by its name.

    Raises:
        InputError: one of the flags is something else.
    """
    for name, flag in flags.items():
        if not _is_flag(flag):
            raise InputError(f"{name} is {_shown(flag)}; give True or False")


def require_count(name: str, value: Any, of: str) -> None:
    """Raise an InputError if a value is not a positive whole number.

    Args:
        name: of the value, for the message.
        value: the caller's.
        of: the unit that is counted, for the message.

    Raises:
        InputError: it is not an integer, or is below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}={_shown(value)}: give a whole number of {of}, 1 or more")


def require_functions(**functions: Any) -> None:
    """Raise an InputError if an optional function cannot be called.

    Args:
        functions: each function or None, by its name.

    Raises:
        InputError: one of them is something else.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InputError(f"{name} is {_shown(function)}; give a function, or leave it out")


def refuse_converted(name: str, given: Any, made: Any) -> None:
    """Raise an InputError if validation made a flag or number of a value of another kind.

    A text or a flag that becomes a number is a mistake of the caller, and so is a number that
    becomes a flag. A whole number may be given as a float: ``24e9`` bytes. A field that accepts
    sizes with units, such as ``"24GiB"``, reads them itself.

    Args:
        name: of the option, for the message.
        given: the caller's value.
        made: the validated value.

    Raises:
        InputError: the kinds differ.
    """
    is_number = isinstance(made, int | float) and not isinstance(made, bool)
    if isinstance(made, bool) and isinstance(given, str | bytes | int | float):
        if not isinstance(given, bool):
            raise InputError(f"{name}: should be True or False, not {_shown(given)}")
    elif is_number and isinstance(given, str | bytes | bool) and not _has_unit(given):
        whole = isinstance(made, int) or (math.isfinite(made) and made.is_integer())
        number = int(made) if whole else made
        raise InputError(f"{name}: should be a number, not {_shown(given)}; give {number!r}")


def _has_unit(given: str | bytes | bool) -> bool:
    """Return whether a text is not a plain number, so that its field has read it by intention."""
    try:
        float(given)
    except ValueError:
        return True
    return False


def _is_flag(value: Any) -> bool:
    # NumPy's flags behave as Python's, and the base install has no NumPy.
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | bytes | int | float | None) else kind_of(value)
