"""Stands in the image for pandas, which OR-Tools imports for a way to build models that Placer does
not take.

OR-Tools asks of what it is given whether it is a Series or an Index; nothing is. Whoever makes one
is told.
"""

from __future__ import annotations


class Index:
    """Nothing is one."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ImportError(
            "pandas is left out of this image; a model is built from variables, not from a Series"
        )


class Series(Index):
    """Nothing is one."""
