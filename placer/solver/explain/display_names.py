"""Names, for people."""

from __future__ import annotations


def listed(names: tuple[str, ...]) -> str:
    """Return the first few names as a text, with the number of the others."""
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
