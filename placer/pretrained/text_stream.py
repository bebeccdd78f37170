"""Text that a thread generates, piece by piece, and how fast it came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from typing import Any

from placer.estimator.checkpoints import transformers_library


class TextStream(Iterator[str]):
    """An iterator over the pieces of a text, which a thread generates meanwhile.

    A piece is at least a word. Leaving the loop early, or ``close``, ends the generation after the
    present token.

    Args:
        tokenizer: of the model.
        generate: generates one text; it takes a streamer of transformers.

    Attributes:
        tokens: the number of new tokens so far.
    """

    def __init__(self, tokenizer: Any, generate: Callable[[Any], None]) -> None:
        self.tokens = 0
        self._began_s = self._first_s = self._last_s = 0.0
        self._pieces = self._streamed(tokenizer, generate)

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def first_token_s(self) -> float:
        """Return the seconds from the start to the first token; 0 before it."""
        return self._first_s - self._began_s if self.tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second after the first token; 0 before the second one."""
        seconds = self._last_s - self._first_s
        return (self.tokens - 1) / seconds if seconds > 0 else 0.0

    def close(self) -> None:
        """End the generation after the present token, and wait for that."""
        self._pieces.close()

    def _streamed(
        self, tokenizer: Any, generate: Callable[[Any], None]
    ) -> Generator[str, None, None]:
        left = threading.Event()
        failures: list[BaseException] = []
        streamer = _streamer(tokenizer, lambda: self._count(left))

        def run() -> None:
            try:
                generate(streamer)
            except _LeftError:
                pass
            except BaseException as error:  # the reader's thread raises it
                failures.append(error)
            finally:
                # ``streamer.end`` decodes, and may be what failed
                streamer.text_queue.put(streamer.stop_signal)

        thread = threading.Thread(target=run, name="placer-text", daemon=True)
        self._began_s = perf_counter()
        thread.start()
        try:
            yield from filter(None, streamer)
        finally:
            left.set()
            thread.join()
        if failures:
            raise failures[0]

    def _count(self, left: threading.Event) -> None:
        if left.is_set():
            raise _LeftError
        self._last_s = perf_counter()
        if not self.tokens:
            self._first_s = self._last_s
        self.tokens += 1


class _LeftError(Exception):
    """Ends a generation whose reader has left."""


def _streamer(tokenizer: Any, count: Callable[[], None]) -> Any:
    """Return transformers' streamer of text without the prompt.

    Args:
        tokenizer: of the model.
        count: called for each new token.
    """

    class Counting(transformers_library().TextIteratorStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                count()
            super().put(value)

    return Counting(tokenizer, skip_prompt=True, skip_special_tokens=True)
