"""Limits on how many of a bounded number of places one client may occupy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .problem import Problem


class Shares:
    """Bounded places, of which one client may occupy a share.

    Args:
        places: Number of places for all clients together.
        share: Share of the places that one client may occupy, from 0 to 1.
        what: What occupies places, for messages: ``evaluations run or wait``.
        retry_s: Seconds until a place may be free again.
    """

    def __init__(self, places: int, share: float, what: str, retry_s: int) -> None:
        self._places = places
        self._each = math.ceil(places * share)
        self._what = what
        self._retry_s = retry_s
        self._held: Counter[str] = Counter()

    def take(self, client: str) -> None:
        """Occupy a place.

        Raises:
            Problem: No place is free, or the client occupies its share.
        """
        if self._held.total() >= self._places:
            self._refuse(f"{self._held.total()} {self._what}, which is all that this service takes")
        if self._held[client] >= self._each:
            self._refuse(
                f"{self._held[client]} {self._what} for you, which is all that one client may have"
            )
        self._held[client] += 1

    def give_back(self, client: str) -> None:
        """Release a place."""
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    @contextmanager
    def held(self, client: str) -> Iterator[None]:
        """Occupy a place while the context is open; see ``take`` for the errors."""
        self.take(client)
        try:
            yield
        finally:
            self.give_back(client)

    def _refuse(self, why: str) -> None:
        detail = f"{why}; try again in {self._retry_s} s"
        raise Problem(
            429,
            "queue-full",
            "The queue is full",
            detail,
            headers={"Retry-After": str(self._retry_s)},
        )
