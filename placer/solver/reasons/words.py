"""Bytes and names, for people."""

from __future__ import annotations


def readable(size_bytes: int) -> str:
    """Bytes for people: ``9.2 GiB``."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def listed(names: tuple[str, ...]) -> str:
    """Names for people: the first few, and how many more."""
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
