"""Quota of clients: how many of a bounded number of places one client may occupy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .problem import queue_full


class Quota:
    """Bounded places, of which one client may occupy a share.

    Without it one client could occupy all places.

    Args:
        places: Number of places for all clients together.
        share: Share of the places that one client may occupy, from 0 to 1.
        noun: What occupies places, in the plural, for messages: ``event streams``.
        retry_s: Seconds until a place may be free again.
    """

    def __init__(self, places: int, share: float, noun: str, retry_s: int) -> None:
        self._places = places
        self._each = math.ceil(places * share)
        self._noun = noun
        self._retry_s = retry_s
        self._held: Counter[str] = Counter()

    def take(self, client: str) -> None:
        """Occupy a place.

        Raises:
            Problem: No place is free, or the client occupies its share.
        """
        total, own = self._held.total(), self._held[client]
        if total >= self._places:
            reason = f"{total} {self._noun} are active, which is the limit of this service"
            raise queue_full(reason, self._retry_s)
        if own >= self._each:
            reason = (
                f"{own} {self._noun} of this client are active, which is the limit for one client"
            )
            raise queue_full(reason, self._retry_s)
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
