"""The times of a model that generates one group of texts after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .models import options


@dataclass(frozen=True)
class Way:
    """A model that is ready to generate.

    Attributes:
        model: the model.
        options: further options of ``generate``.
        recorded: returns the numbers of tokens through recorded passes, and of all others.
    """

    model: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    recorded: Callable[[], tuple[int, int]] | None = None


class Engine:
    """The times of a model that generates, in ms.

    Args:
        way: the model, ready to generate.
        ids: the prompts.

    Attributes:
        way: the model.
        first_ms: the time of the very first call, which makes four tokens.
        prompt_ms: the time of the prompt with the first token, by turn.
        whole_ms: the time of the whole text, by turn.
        tokens: the latest text.
    """

    def __init__(self, way: Way, ids: Any) -> None:
        self.way, self._ids = way, ids
        self.first_ms, self.tokens = self._once(4)
        self._once(4)  # a second call may record passes that the first has met
        self.prompt_ms: list[float] = []
        self.whole_ms: list[float] = []

    def turn(self, new: int) -> None:
        """Generate the prompt's first token, then a whole text."""
        self.prompt_ms.append(self._once(1)[0])
        ms, self.tokens = self._once(new)
        self.whole_ms.append(ms)

    def token_ms(self, new: int) -> list[float]:
        """Return the time of a token in the loop, by turn."""
        pairs = zip(self.whole_ms, self.prompt_ms, strict=True)
        return [(whole - prompt) / (new - 1) for whole, prompt in pairs]

    def _once(self, count: int) -> tuple[float, Any]:
        began = perf_counter()
        # copying to the host waits for the devices
        tokens = self.way.model.generate(self._ids, **options(count), **self.way.options).tolist()
        return 1e3 * (perf_counter() - began), tokens


def equal_share(texts: Iterable[list[int]], others: Iterable[list[int]]) -> float:
    """Return the percentage of tokens that are equal in two series of texts."""
    pairs = [
        one == other
        for text, twin in zip(texts, others, strict=True)
        for one, other in zip(text, twin, strict=True)
    ]
    return 100.0 * sum(pairs) / len(pairs)


def shown(value: float) -> float:
    """Return a value with four digits."""
    return float(f"{value:.4g}")
