"""The key/value caches of transformers that a model is called with, and what is known of them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placer import devices

TRANSFORMERS_CACHES = "transformers.cache_utils"
"""The module of the caches; a process that has not imported it has none."""

LENGTHS = -2
"""The dimension of tokens in the keys and values of every cache."""

_SMALLEST = 64
"""Smallest capacity, in tokens."""

_LARGEST_GUESS = 4096
"""Largest capacity, in tokens, that is allocated because ``generate`` may need it later."""


def cache_of(kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the name and the cache among a call's keyword arguments; None without one.

    Args:
        kwargs: of the call.
    """
    kinds = sys.modules.get(TRANSFORMERS_CACHES)
    base = getattr(kinds, "Cache", None)
    if base is None:
        return None
    return next(((name, one) for name, one in kwargs.items() if isinstance(one, base)), None)


def cache_tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the keys and values of a cache.

    Args:
        cache: of transformers; anything else has none.
    """
    base = getattr(sys.modules.get(TRANSFORMERS_CACHES), "Cache", None)
    parts = (getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross"))
    for part in (cache, *parts):
        if base is None or not isinstance(part, base):
            continue
        for layer in getattr(part, "layers", ()):
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(tensor, Tensor):
                    yield tensor


def capacity_for(length: int, expected: int | None) -> int:
    """Return the capacity of the static copy of a dynamic cache, in tokens.

    For an expected length there are four sizes per doubling, so that texts of similar lengths share
    a recording. Otherwise the capacity doubles whenever it is exceeded.

    Args:
        length: tokens in the cache, to which one more is added.
        expected: tokens at the end of the text; None if unknown.
    """
    # Attention reads the whole capacity, also of a text that ends long before the limit.
    if expected is None or not length < expected <= max(_LARGEST_GUESS, 2 * length):
        return max(_SMALLEST, 1 << length.bit_length())
    step = max(_SMALLEST, 1 << max(0, expected.bit_length() - 3))
    return -(-expected // step) * step


def capacity_at_end(prompt_tokens: int, new_tokens: int) -> int:
    """Return the capacity of the static copy when the last token is generated, in tokens.

    Args:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens that ``generate`` makes after it.
    """
    total = prompt_tokens + new_tokens
    capacity = capacity_for(prompt_tokens, total)
    # the last token is not stored, because no pass follows it
    while capacity < total - 1:
        capacity = capacity_for(capacity, total)
    return capacity


def is_empty(cache: Any) -> bool:
    """Return whether a cache of transformers grows with the text, and holds no tokens yet.

    Args:
        cache: any object.
    """
    kinds = sys.modules.get(TRANSFORMERS_CACHES)
    return (
        type(cache) is getattr(kinds, "DynamicCache", None)
        and not getattr(cache, "offloading", False)
        and bool(cache.layers)
        and not any(map(_is_initialized, cache.layers))
    )


class UnsupportedCacheError(Exception):
    """A cache of which there is no static copy; the message says why."""


class CacheView:
    """The layers of a user's cache, as tensors.

    Args:
        cache: of transformers.

    Attributes:
        layers: of the self-attention cache.
        cross: the layers of an encoder-decoder's cross-attention cache; empty for other models.
        is_filled: whether a prompt was processed with it.
        length: the number of tokens in it; None if only a device knows the number.
        homes: the devices of the layers that fill it; None where the tensors are.

    Raises:
        UnsupportedCacheError: if there is no static copy of such a cache.
    """

    def __init__(self, cache: Any) -> None:
        kinds = sys.modules[TRANSFORMERS_CACHES]
        self.cross: Sequence[Any] = ()
        self.is_filled = True
        self.homes: Sequence[torch.device] | None = None
        own = cache
        # Compare exact types: a subclass may keep keys and values in another way.
        if type(cache) is getattr(kinds, "EncoderDecoderCache", None):
            own = cache.self_attention_cache
            crossing = cache.cross_attention_cache
            self.cross = getattr(crossing, "layers", ())
            updated = cache.is_updated
            self.is_filled = bool(self.cross) and all(
                updated.get(number, False) for number in range(len(self.cross))
            )
        names = ("Cache", "DynamicCache", "StaticCache")
        if not any(type(own) is getattr(kinds, name, None) for name in names):
            raise UnsupportedCacheError(f"the cache is a {type(own).__name__}")
        if getattr(own, "offloading", False):
            raise UnsupportedCacheError("the cache rests on the host")
        self.layers: Sequence[Any] = getattr(own, "layers", ())
        if not self.layers or not all(map(_is_initialized, self.layers)):
            self.is_filled = False
        if self.is_filled:
            self._require_known_layers(kinds)
        self.length = self._length() if self.is_filled else None

    def _require_known_layers(self, kinds: Any) -> None:
        dynamic = [getattr(kinds, name, None) for name in _DYNAMIC]
        static = getattr(kinds, "StaticLayer", None)
        for layer in self.layers:
            if type(layer) is not static and type(layer) not in dynamic:
                raise UnsupportedCacheError(f"a layer of the cache is a {type(layer).__name__}")
            if getattr(layer, "record_past", False):
                raise UnsupportedCacheError("the cache keeps tokens beyond its sliding window")
        if len({type(layer) is static for layer in self.layers}) > 1:
            raise UnsupportedCacheError("some layers of the cache are static and others dynamic")

    @classmethod
    def known(cls, cache: Any, length: int | None) -> CacheView:
        """Return the layers of a cache whose kinds of layers were seen before.

        Args:
            cache: of transformers.
            length: the number of tokens in it; None if only a device knows the number.
        """
        view = cls.__new__(cls)
        view.layers = getattr(cache, "self_attention_cache", cache).layers
        view.cross = getattr(getattr(cache, "cross_attention_cache", None), "layers", ())
        view.is_filled, view.length = True, length
        view.homes = None
        return view

    @property
    def is_static(self) -> bool:
        """Return whether the user's cache has static tensors itself."""
        return type(self.layers[0]).__name__ == "StaticLayer"

    def _length(self) -> int | None:
        if self.is_static:
            return None
        lengths = {int(layer.get_seq_length()) for layer in self.layers}
        if len(lengths) > 1:
            raise UnsupportedCacheError("the layers of the cache hold different numbers of tokens")
        return lengths.pop()

    def capacity(self, expected: int | None) -> int:
        """Return the capacity of the static copy.

        Args:
            expected: tokens that the cache is expected to hold at the end; None if unknown.
        """
        if self.is_static:
            return int(self.layers[0].keys.shape[LENGTHS])
        assert self.length is not None
        return capacity_for(self.length, expected)

    def signature(self, capacity: int) -> Hashable:
        """Return what distinguishes static copies: shapes, dtypes and devices.

        Args:
            capacity: of the static copy, in tokens.
        """
        homes = self.homes or self.places()
        own = tuple(
            (sliding_window(layer), home, *_kind(layer, capacity))
            for layer, home in zip(self.layers, homes, strict=True)
        )
        cross = tuple(
            (devices.location(layer.keys), *_kind(layer, layer.keys.shape[LENGTHS]))
            for layer in self.cross
        )
        return self.is_static, own, cross

    def places(self) -> list[torch.device]:
        """Return the device of each layer's tensors."""
        return [devices.location(layer.keys) for layer in self.layers]

    def kinds(self) -> Hashable:
        """Return what distinguishes caches of the same model apart from sizes.

        A text beyond a sliding window is another kind, so that it is compared with the model, too:
        the static copy keeps all tokens, and the model's mask must hide the oldest ones.
        """
        windows = {sliding_window(layer) for layer in self.layers} - {None}
        passed = sum(1 for window in windows if (self.length or 0) >= (window or 0))
        return passed, tuple(map(type, (*self.layers, *self.cross)))


def _is_initialized(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.numel() > 0


_DYNAMIC = ("DynamicLayer", "DynamicSlidingWindowLayer")


def _kind(layer: Any, length: int) -> tuple[Hashable, ...]:
    kinds = []
    for tensor in (layer.keys, layer.values):
        shape = (*tensor.shape[:LENGTHS], length, *tensor.shape[LENGTHS + 1 :])
        kinds.append((shape, tensor.dtype))
    return tuple(kinds)


def sliding_window(layer: Any) -> int | None:
    """Return the number of earlier tokens that a layer keeps; None if it keeps all.

    Args:
        layer: of a cache.
    """
    window = getattr(layer, "sliding_window", None)
    return None if window is None else max(0, int(window) - 1)
