"""Prompts of one shape that come again, and the layout of the caches that they fill.

    first prompt of a kind   through hooks; here the layers of its cache are noted
    second                   traced on a static cache, and compared with the hooks' result
    third                    traced again and recorded
    later ones               replayed

A recording saves the host's time, so it is made only for prompts that the host issues for most of
the time that they take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from placer import devices
from placer.executor.generation.static_cache import CacheView, LayerLayout, UnsupportedCacheError

_KEPT_KINDS = 64

_HOST_SHARE = 0.5
"""Least share of a prompt's time during which the host issues it, for a recording."""


@dataclass(frozen=True)
class _Kind:
    """What the first prompt of a kind showed.

    Attributes:
        layers: of the cache that it filled; empty if there is no static copy of such a cache.
        is_slow_on_host: whether the devices wait for the host.
    """

    layers: Sequence[LayerLayout]
    is_slow_on_host: bool


class Prompts:
    """The kinds of prompts that came lately."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def clear(self) -> None:
        """Forget all prompts."""
        self._kinds.clear()

    def is_new(self, key: Hashable) -> bool:
        """Return whether no such prompt came lately.

        Args:
            key: of its kind.
        """
        return key not in self._kinds

    def note(self, key: Hashable, cache: Any, run: Callable[[], Any]) -> Any:
        """Run the first prompt of a kind through hooks, and return its result.

        Args:
            key: of its kind.
            cache: that it fills.
            run: runs it.
        """
        began = perf_counter()
        result = run()
        issued_s = perf_counter() - began
        layers = _layouts(cache)
        for place in {one.place for one in layers}:
            devices.synchronise(place)
        taken_s = perf_counter() - began
        while len(self._kinds) >= _KEPT_KINDS:
            self._kinds.popitem(last=False)
        self._kinds[key] = _Kind(layers, issued_s >= _HOST_SHARE * taken_s)
        return result

    def opened(self, key: Hashable, cache: Any) -> CacheView | None:
        """Give an empty cache layers without tokens; return None for a prompt not to record.

        Args:
            key: of a kind that is not new.
            cache: empty; a pass through hooks may fill it afterwards, too.
        """
        self._kinds.move_to_end(key)
        kind = self._kinds[key]
        if not kind.is_slow_on_host or len(kind.layers) != len(cache.layers):
            return None
        with torch.no_grad():
            for layer, layout in zip(cache.layers, kind.layers, strict=True):
                layout.open(layer)
        view = CacheView.known(cache, 0)
        view.homes = [layout.place for layout in kind.layers]
        return view


def _layouts(cache: Any) -> Sequence[LayerLayout]:
    """Return the layers of a cache; none if there is no static copy of it."""
    try:
        view = CacheView(cache)
    except UnsupportedCacheError:
        return ()
    return [LayerLayout.of(layer) for layer in view.layers] if view.is_filled else ()
