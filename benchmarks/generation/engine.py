"""The times of a model that generates one group of texts after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .models import options

_STEPS = 64
"""New prompts are shorter by one such part of the prompt each: an odd number of tokens would need
kernels that are loaded first."""


@dataclass(frozen=True)
class Way:
    """A model that is ready to generate.

    Attributes:
        model: the model.
        options: further options of ``generate``.
        entered: a context for each turn, outside of which this way slows down no other.
        recorded: returns the numbers of tokens through recorded passes, and of all others.
    """

    model: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    recorded: Callable[[], tuple[int, int]] | None = None


class Engine:
    """The times of a model that generates, in ms.

    Args:
        way: the model, ready to generate.
        ids: the prompts.

    Attributes:
        way: the model.
        first_ms: the time of the very first call, which makes four tokens.
        prompt_ms: the time of the prompt with the first token, by turn. Prompts of its length came
            before.
        new_prompt_ms: the same for a length that did not come before.
        whole_ms: the time of the whole text, by turn.
        tokens: the latest text.
    """

    def __init__(self, way: Way, ids: Any) -> None:
        self.way, self._ids = way, ids
        with way.entered():
            self.first_ms, self.tokens = self._once(4)
            for _ in range(2):
                self._once(4)  # later calls may record passes that the first has met
        self.prompt_ms: list[float] = []
        self.new_prompt_ms: list[float] = []
        self.whole_ms: list[float] = []

    def turn(self, new: int) -> None:
        """Generate first tokens of the prompt and of a shorter one, then a whole text."""
        step = max(1, self._ids.shape[1] // _STEPS)
        with self.way.entered():
            self.prompt_ms.append(self._once(1)[0])
            self.new_prompt_ms.append(self._once(1, step * len(self.prompt_ms))[0])
            ms, self.tokens = self._once(new)
        self.whole_ms.append(ms)

    def token_ms(self, new: int) -> list[float]:
        """Return the time of a token in the loop, by turn."""
        pairs = zip(self.whole_ms, self.prompt_ms, strict=True)
        return [(whole - prompt) / (new - 1) for whole, prompt in pairs]

    def _once(self, count: int, left_out: int = 0) -> tuple[float, Any]:
        ids = self._ids[:, left_out:]
        began = perf_counter()
        # copying to the host waits for the devices
        tokens = self.way.model.generate(ids, **options(count), **self.way.options).tolist()
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
