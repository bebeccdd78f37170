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
from torch import Tensor

from placer import devices
from placer.executor.generation.cache_view import LENGTHS, CacheView, UnsupportedCacheError

_KEPT_KINDS = 64

_HOST_SHARE = 0.5
"""Least share of a prompt's time during which the host issues it, for a recording."""


@dataclass(frozen=True)
class LayerLayout:
    """A layer of a cache without its tokens.

    Attributes:
        keys: of no tokens.
        values: of no tokens.
        place: their device.
    """

    keys: Tensor
    values: Tensor
    place: torch.device

    @classmethod
    def of(cls, layer: Any) -> LayerLayout:
        """Return the layout of a layer that holds tokens."""
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (
                torch.empty_like(one.narrow(LENGTHS, 0, 0)) for one in (layer.keys, layer.values)
            )
        return cls(keys, values, devices.location(keys))

    def open(self, layer: Any) -> None:
        """Give a layer of the same kind keys and values of no tokens.

        Args:
            layer: not initialised.
        """
        layer.dtype, layer.device = self.keys.dtype, self.place
        layer.keys, layer.values = self.keys, self.values
        layer.is_initialized = True


@dataclass
class _Kind:
    """What the first prompt of a kind showed.

    Attributes:
        layers: of the cache that it filled; empty if there is no static copy of such a cache.
        issued_s: the host's time to issue it, in seconds.
        marks: its begin and its end on the device of the results.
    """

    layers: Sequence[LayerLayout]
    issued_s: float
    marks: tuple[devices.Mark, devices.Mark]

    def is_slow_on_host(self) -> bool:
        """Return whether the devices wait for the host most of the time; False if unknown yet."""
        if not devices.has_passed(self.marks[1]):
            return False
        return self.issued_s >= _HOST_SHARE * devices.elapsed_s(*self.marks)


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

    def note(self, key: Hashable, cache: Any, target: torch.device, run: Callable[[], Any]) -> Any:
        """Run the first prompt of a kind through hooks, and return its result.

        Args:
            key: of its kind.
            cache: that it fills.
            target: the device of the result.
            run: runs it.
        """
        lane = devices.Lane(target, caller=True)
        first, began = lane.mark(timed=True), perf_counter()
        result = run()
        issued_s = perf_counter() - began
        while len(self._kinds) >= _KEPT_KINDS:
            self._kinds.popitem(last=False)
        self._kinds[key] = _Kind(_layouts(cache), issued_s, (first, lane.mark(timed=True)))
        return result

    def opened(self, key: Hashable, cache: Any) -> CacheView | None:
        """Give an empty cache layers without tokens; return None for a prompt not to record.

        Args:
            key: of a kind that is not new.
            cache: empty; a pass through hooks may fill it afterwards, too.
        """
        self._kinds.move_to_end(key)
        kind = self._kinds[key]
        if not kind.is_slow_on_host() or len(kind.layers) != len(cache.layers):
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
