"""Static copies of the key/value caches of transformers.

A dynamic cache has new tensors after every token. A recorded pass needs memory that stays, so it
works on a static cache with room for ``capacity`` tokens, on the device of each layer. The user's
cache then holds views of it, and is what it would be after the same tokens without a recording:

    static keys   [batch, heads, capacity, size]
    user's keys   static keys[:, :, :length]                   after ``follow``
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placer import devices

_MODULE = "transformers.cache_utils"
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
    kinds = sys.modules.get(_MODULE)
    base = getattr(kinds, "Cache", None)
    if base is None:
        return None
    return next(((name, one) for name, one in kwargs.items() if isinstance(one, base)), None)


def cache_tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the keys and values of a cache.

    Args:
        cache: of transformers; anything else has none.
    """
    base = getattr(sys.modules.get(_MODULE), "Cache", None)
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
    kinds = sys.modules.get(_MODULE)
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
        kinds = sys.modules[_MODULE]
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
            (_window(layer), home, *_kind(layer, capacity))
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
        windows = {_window(layer) for layer in self.layers} - {None}
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


def _window(layer: Any) -> int | None:
    """Return the number of tokens that a layer keeps; None if it keeps all."""
    window = getattr(layer, "sliding_window", None)
    return None if window is None else max(0, int(window) - 1)


class StaticCopy:
    """A static cache that follows a user's cache.

    Args:
        view: the user's cache.
        capacity: in tokens.

    Attributes:
        cache: the static cache, for the model's passes.
        capacity: in tokens.
        signature: of the user's cache at this capacity.
        length: the number of tokens in it; None if only a device knows the number.
    """

    def __init__(self, view: CacheView, capacity: int) -> None:
        kinds = sys.modules[_MODULE]
        self.capacity = capacity
        self.signature = view.signature(capacity)
        self.length: int | None = None
        # Inference tensors could not be written to outside of inference mode later.
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [
                _static_layer(kinds, layer, capacity, home)
                for layer, home in zip(view.layers, view.homes or view.places(), strict=True)
            ]
            self._cross = [_fixed_layer(kinds, layer) for layer in view.cross]
        self.cache = kinds.Cache(layers=self._layers)
        if view.cross:
            self.cache = kinds.EncoderDecoderCache(self.cache, kinds.Cache(layers=self._cross))
            self.cache.is_updated = dict.fromkeys(range(len(view.cross)), True)
        self._owner: Any = None
        # the tensors that the owner's layers hold, to see whether it was changed
        self._given: list[tuple[Any, Any]] = []
        self._is_followed = False
        self._crossed: list[Tensor] = []
        self._counts: list[Tensor] = []

    @property
    def tensors(self) -> list[Tensor]:
        """Return the keys and values, which a pass overwrites with equal contents if run twice."""
        return [tensor for layer in self._layers for tensor in (layer.keys, layer.values)]

    @property
    def places(self) -> list[torch.device]:
        """Return the device of each layer."""
        return [layer.device for layer in self._layers]

    def sizes(self) -> dict[torch.device, int]:
        """Return the bytes of the keys and values on each device."""
        found: dict[torch.device, int] = {}
        for layer in self._layers:
            found[layer.device] = (
                found.get(layer.device, 0) + layer.keys.nbytes + layer.values.nbytes
            )
        return found

    def current_view(self, cache: Any) -> CacheView | None:
        """Return the layers of a cache that is as ``follow`` left it, and that has room.

        Otherwise, and for any other cache, return None. For every token, this saves a second look
        at every layer.
        """
        if self._owner is None or self._owner() is not cache:
            return None
        view = CacheView.known(cache, self.length)
        has_room = self.length is None or self.length < self.capacity
        return view if has_room and self._is_current(view) else None

    def belongs_to(self, cache: Any) -> bool:
        """Return whether a cache has views of this memory.

        Args:
            cache: of transformers.
        """
        return self._owner is not None and self._owner() is cache

    def adopt(self, cache: Any, view: CacheView) -> None:
        """Take the contents of the user's cache, unless they are here already.

        Args:
            cache: the user's cache.
            view: its layers.
        """
        owner = None if self._owner is None else self._owner()
        if owner is not cache:
            self.release()
            self._owner = weakref.ref(cache)
        if owner is not cache or not self._is_current(view):
            with torch.no_grad():
                self._take(view)
        with torch.no_grad():
            self._take_cross(view)
        # until ``follow``: a pass that is broken off leaves another number of tokens
        self._is_followed = False

    def _is_current(self, view: CacheView) -> bool:
        return (
            self._is_followed
            and len(self._given) == len(view.layers)
            and view.length == self.length
            and all(
                layer.keys is keys
                and layer.values is values
                and not getattr(layer, "record_past", False)
                for layer, (keys, values) in zip(view.layers, self._given, strict=True)
            )
        )

    def _take(self, view: CacheView) -> None:
        self.length = view.length
        if view.length is not None:
            self._set_counts(view.length)
        for own, layer in zip(self._layers, view.layers, strict=True):
            end = view.length
            if end is None:
                end = self.capacity
                _copy_count(own, layer)
            start = end - layer.keys.shape[LENGTHS]
            if start == end:
                continue  # the cache of a prompt is empty
            for target, source in ((own.keys, layer.keys), (own.values, layer.values)):
                part = target.narrow(LENGTHS, start, end - start)
                # a cropped view of this very memory needs no copy
                if not _is_same_memory(part, source):
                    shares = source.untyped_storage()._cdata == target.untyped_storage()._cdata
                    devices.fill(part, source.clone() if shares else source)

    def _take_cross(self, view: CacheView) -> None:
        given = [tensor for layer in view.cross for tensor in (layer.keys, layer.values)]
        known = self._crossed
        if len(known) == len(given) and all(a is b for a, b in zip(given, known, strict=True)):
            return
        for own, layer in zip(self._cross, view.cross, strict=True):
            devices.fill(own.keys, layer.keys)
            devices.fill(own.values, layer.values)
        self._crossed = given

    def follow(self, view: CacheView, tokens: int = 1) -> None:
        """Let the user's cache have the contents after a pass.

        Args:
            view: the layers of the cache that was adopted.
            tokens: of the pass.
        """
        self._given = []
        self._is_followed = True
        if view.is_static:
            for own, layer in zip(self._layers, view.layers, strict=True):
                layer.keys, layer.values = own.keys, own.values
                _share_count(own, layer)
                self._given.append((layer.keys, layer.values))
            return
        assert self.length is not None
        self.length += tokens
        for own, layer in zip(self._layers, view.layers, strict=True):
            window = _window(layer)
            start = 0 if window is None else max(0, self.length - window)
            count = self.length - start
            layer.keys = own.keys.narrow(LENGTHS, start, count)
            layer.values = own.values.narrow(LENGTHS, start, count)
            if window is not None:
                layer.cumulative_length = self.length
            self._given.append((layer.keys, layer.values))

    def save(self) -> None:
        """Keep the number of tokens for ``undo``."""
        self._counts = [one.clone() for one in self._lengths()]

    def undo(self) -> None:
        """Forget a pass since ``save``: the user's cache goes on without it."""
        with torch.no_grad():
            for count, was in zip(self._lengths(), self._counts, strict=False):
                count.copy_(was)
        self._is_followed = False

    def _lengths(self) -> list[Tensor]:
        counts = (getattr(layer, "cumulative_length", None) for layer in self._layers)
        return [count for count in counts if isinstance(count, Tensor)]

    def _counts_by_device(self) -> Iterable[list[Tensor]]:
        """Return the layers' numbers of tokens that are on one device, for each device."""
        found = defaultdict[torch.device, list[Tensor]](list)
        for count in self._lengths():
            found[devices.location(count)].append(count)
        return found.values()

    def _set_counts(self, length: int) -> None:
        """Set the number of tokens of all layers."""
        for counts in self._counts_by_device():
            # at once: a GPU takes longer to start the work for each of many layers than to do it
            torch._foreach_zero_(counts)
            if length:
                torch._foreach_add_(counts, length)
        if not self.counts_tokens:
            # versions of transformers without a count take all tokens that are not zero
            for own in self._layers:
                own.keys.narrow(LENGTHS, length, self.capacity - length).zero_()

    def rewind(self, tokens: int = 1) -> None:
        """Undo the count of a pass whose results are not used.

        Args:
            tokens: of the pass.
        """
        with torch.no_grad():
            for counts in self._counts_by_device():
                torch._foreach_sub_(counts, tokens)
        self._is_followed = False

    @property
    def counts_tokens(self) -> bool:
        """Return whether each layer counts its tokens on its device, so that one can be undone."""
        return len(self._lengths()) == len(self._layers)

    def take_back(self, view: CacheView, tokens: int = 1) -> None:
        """Undo a pass that ``follow`` gave to the user's cache.

        Args:
            view: the layers of the cache.
            tokens: of the pass.
        """
        self.rewind(tokens)
        if self.length is not None:
            self.length -= tokens
        self.follow(view, 0)

    def release(self) -> None:
        """Give the owner tensors of its own where it has views, before the next owner's come."""
        owner = None if self._owner is None else self._owner()
        given, self._given = self._given, []
        self._owner, self._crossed = None, []
        if owner is None:
            return
        own = getattr(owner, "self_attention_cache", owner)
        for layer, (keys, values) in zip(own.layers, given, strict=False):
            if layer.keys is keys:
                layer.keys = keys.clone()
            if layer.values is values:
                layer.values = values.clone()
            count = getattr(layer, "cumulative_length", None)
            if isinstance(count, Tensor):
                layer.cumulative_length = count.clone()
        if given:
            # the next owner's work may be in other streams than these copies
            for place in set(self.places):
                devices.finish(place)


def _static_layer(kinds: Any, layer: Any, capacity: int, place: torch.device) -> Any:
    """Return a static layer of transformers with memory on a device.

    ``lazy_initialization`` would do the same, but import torch's compiler, which takes seconds.
    """
    made = kinds.StaticLayer(max_cache_len=capacity)
    keys, values = layer.keys, layer.values
    made.keys, made.values = (_zeros(one, capacity, place) for one in (keys, values))
    made.dtype, made.device = keys.dtype, place
    made.batch_size, made.num_heads = keys.shape[:2]
    made.max_batch_size = made.batch_size
    made.k_head_dim = made.head_dim = keys.shape[-1]
    made.v_head_dim = values.shape[-1]
    if isinstance(getattr(made, "cumulative_length", None), Tensor):
        made.cumulative_length = devices.copy(made.cumulative_length, place)
    made.is_initialized = True
    return made


def _zeros(like: Tensor, length: int, place: torch.device) -> Tensor:
    """Return memory for more tokens on a device.

    It must be finite: a masked value counts zero times, and zero times NaN is NaN.
    """
    shape = (*like.shape[:LENGTHS], length, *like.shape[LENGTHS + 1 :])
    return torch.zeros(shape, dtype=like.dtype, device=place)


def _fixed_layer(kinds: Any, layer: Any) -> Any:
    """Return a layer with memory for the keys and values of an encoder."""
    made = kinds.DynamicLayer()
    made.keys, made.values = torch.empty_like(layer.keys), torch.empty_like(layer.values)
    made.dtype, made.device = layer.keys.dtype, devices.location(made.keys)
    made.is_initialized = True
    return made


def _copy_count(own: Any, layer: Any) -> None:
    count = getattr(layer, "cumulative_length", None)
    if isinstance(count, Tensor) and count is not own.cumulative_length:
        devices.fill(own.cumulative_length, count)


def _share_count(own: Any, layer: Any) -> None:
    if isinstance(getattr(layer, "cumulative_length", None), Tensor):
        layer.cumulative_length = own.cumulative_length


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and devices.same(devices.location(one), devices.location(other))
    )
