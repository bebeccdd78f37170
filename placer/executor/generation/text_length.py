"""The length of a text that ``generate`` makes, as far as its arguments limit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class TextLength:
    """The maximum length of a text, from the arguments of ``generate``."""

    def __init__(self) -> None:
        self._new: int | None = None
        self._total: int | None = None

    def announce(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Note the limits of a text.

        Args:
            module: the model.
            options: arguments of ``generate``.
        """
        configs = (options.get("generation_config"), getattr(module, "generation_config", None))

        def limit(name: str) -> int | None:
            given = (options.get(name), *(getattr(config, name, None) for config in configs))
            return next((one for one in given if isinstance(one, int)), None)

        self._new, self._total = limit("max_new_tokens"), None
        if self._new is None:
            self._total = limit("max_length")

    def forget(self) -> None:
        """Note that the text is finished."""
        self._new = self._total = None

    def expected(self, length: int | None) -> int | None:
        """Return the number of tokens at the end of the text; None if it is unknown.

        Args:
            length: tokens in the cache.
        """
        if self._total is None and self._new is not None and length is not None:
            self._total = length + self._new
        return self._total

    def is_reached(self, length: int) -> bool:
        """Return whether a text has all tokens that it may have, as far as is known.

        Args:
            length: tokens in its cache, which has all but the latest one.
        """
        return self._total is not None and length + 1 >= self._total
