"""Replacement of pandas in the image.

OR-Tools imports pandas to build models from a Series, which Placer does not do. OR-Tools only tests
whether its arguments are a Series or an Index, and none is. Making one raises an error.
"""

from __future__ import annotations


class Index:
    """Index that cannot be made."""

    def __init__(self, *_: object, **__: object) -> None:
        raise ImportError(
            "this image does not contain pandas; build the model from variables, not from a Series"
        )


class Series(Index):
    """Series that cannot be made."""
