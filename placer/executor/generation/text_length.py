"""The length of a text that ``generate`` makes, as far as its arguments limit it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def announced_by_generate(module: nn.Module, length: TextLength) -> Iterator[None]:
    """Let a model's ``generate`` note the limits of its texts, inside the block.

    Args:
        module: the model; nothing happens if it has no such method.
        length: where the limits are noted.
    """
    own, name = vars(module), "generate"
    if not callable(getattr(module, name, None)):
        yield
        return
    before = {name: own[name]} if name in own else {}
    own[name] = _AnnouncedGenerate(module, length)
    try:
        yield
    finally:
        own.pop(name, None)
        own.update(before)


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


class _AnnouncedGenerate:
    """A model's ``generate`` that first notes how long the text may become.

    A copy of the model gets the method of its class instead.

    Args:
        module: the model.
        length: where the limits are noted.
    """

    def __init__(self, module: nn.Module, length: TextLength) -> None:
        self._module, self._length = module, length
        self._generate: Any = module.generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate texts."""
        self._length.announce(self._module, kwargs)
        try:
            return self._generate(*args, **kwargs)
        finally:
            self._length.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "generate")
