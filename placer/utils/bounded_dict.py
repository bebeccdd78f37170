"""A dictionary of what is known, with a bound on the host's memory."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_ENTRIES = 1000
"""Entries of a ``BoundedDict``: more than a program has kinds of calls, unless each call is new."""


class BoundedDict(dict[Key, Value]):
    """A dictionary that forgets everything before it would get too many entries.

    Only assignments to items are counted, not ``setdefault`` and ``update``.
    """

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= MOST_ENTRIES and key not in self:
            self.clear()
        super().__setitem__(key, value)
