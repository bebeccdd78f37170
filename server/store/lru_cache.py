"""Least-recently-used cache with a size limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class LruCache(Generic[V]):
    """Least-recently-used cache of values with sizes. Any thread may use it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._values: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> V | None:
        """Return the value, or None if it is no longer there."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: str, value: V, size: int = 1) -> None:
        """Store a value, and drop those used longest ago until the sizes keep within the limit."""
        with self._lock:
            self._size += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = (value, size)
            while self._size > self._limit:
                _, (_, dropped) = self._values.popitem(last=False)
                self._size -= dropped
