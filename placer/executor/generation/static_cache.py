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
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.executor.generation.cache_view import (
    LENGTHS,
    TRANSFORMERS_CACHES,
    CacheView,
    sliding_window,
)


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
        kinds = sys.modules[TRANSFORMERS_CACHES]
        self.capacity = capacity
        self.signature = view.signature(capacity)
        self.length: int | None = None
        homes = view.homes or view.places()
        # the layers of a user's static cache count apart, after Placer's passes too
        kind = kinds.StaticLayer if view.is_static else _counting_together(kinds)
        # Inference tensors could not be written to outside of inference mode later.
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [
                _static_layer(kind(max_cache_len=capacity), layer, home)
                for layer, home in zip(view.layers, homes, strict=True)
            ]
            self._cross = [_fixed_layer(kinds, layer) for layer in view.cross]
        self._counters = [] if view.is_static else _share_counters(self._layers)
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
        for counter in self._counters:
            counter.begin()
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
            kept = sliding_window(layer)
            start = 0 if kept is None else max(0, self.length - kept)
            count = self.length - start
            layer.keys = own.keys.narrow(LENGTHS, start, count)
            layer.values = own.values.narrow(LENGTHS, start, count)
            if kept is not None:
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
        """Return the numbers of tokens; layers may share one."""
        counts = {id(layer.cumulative_length): layer for layer in filter(_counts, self._layers)}
        return [layer.cumulative_length for layer in counts.values()]

    def _counts_by_device(self) -> Iterable[list[Tensor]]:
        """Return the numbers of tokens that are on one device, for each device."""
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
        return all(map(_counts, self._layers))

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
            if _counts(layer):
                layer.cumulative_length = layer.cumulative_length.clone()
        if given:
            # the next owner's work may be in other streams than these copies
            for place in set(self.places):
                devices.finish(place)


class _Counter:
    """Counts the tokens of all layers on a device, once in each pass.

    It has no reference to the layers, which have one to it: without a cycle, the memory of a cache
    is free as soon as nobody uses it.

    Args:
        count: the number of tokens, on the device.

    Attributes:
        count: see above.
        layers: how many layers count here.
    """

    def __init__(self, count: Tensor) -> None:
        self.count = count
        self.layers = 0
        self._positions: Tensor | None = None
        self._counted = set[int]()

    def begin(self) -> None:
        """Count the tokens of the next pass when its first layer is updated."""
        self._positions = None

    def positions(self, layer: int, tokens: int) -> Tensor:
        """Return the positions of a pass in the cache.

        Args:
            layer: that is updated.
            tokens: of the pass.
        """
        positions = self._positions
        if positions is None or layer in self._counted:
            positions = torch.arange(tokens, device=self.count.device) + self.count
            self.count.add_(tokens)
            self._counted.clear()
        self._counted.add(layer)
        # after the last layer, the memory is free for the rest of the pass
        self._positions = positions if len(self._counted) < self.layers else None
        return positions


@cache
def _counting_together(kinds: Any) -> Any:
    """Return a static layer of transformers of which many count their tokens once."""

    class SharedCountLayer(kinds.StaticLayer):  # type: ignore[misc]
        counter: _Counter | None = None

        def update(
            self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if self.counter is None:
                updated: tuple[Tensor, Tensor] = super().update(keys, values, *args, **kwargs)
                return updated
            positions = self.counter.positions(id(self), keys.shape[LENGTHS])
            self.keys.index_copy_(LENGTHS, positions, keys)
            self.values.index_copy_(LENGTHS, positions, values)
            return self.keys, self.values

    return SharedCountLayer


def _share_counters(layers: Iterable[Any]) -> list[_Counter]:
    """Return a counter for each device, which its layers share."""
    found: dict[torch.device, _Counter] = {}
    for layer in filter(_counts, layers):
        layer.counter = found.setdefault(layer.device, _Counter(layer.cumulative_length))
        layer.counter.layers += 1
        layer.cumulative_length = layer.counter.count
    return [*found.values()]


def _counts(layer: Any) -> bool:
    """Return whether a layer counts its tokens on its device, as recent transformers do."""
    return isinstance(getattr(layer, "cumulative_length", None), Tensor)


def _static_layer(made: Any, layer: Any, place: torch.device) -> Any:
    """Give a static layer of transformers memory on a device, and return it.

    ``lazy_initialization`` would do the same, but import torch's compiler, which takes seconds.
    """
    keys, values = layer.keys, layer.values
    made.keys, made.values = (_zeros(one, made.max_cache_len, place) for one in (keys, values))
    made.dtype, made.device = keys.dtype, place
    made.batch_size, made.num_heads = keys.shape[:2]
    made.max_batch_size = made.batch_size
    made.k_head_dim = made.head_dim = keys.shape[-1]
    made.v_head_dim = values.shape[-1]
    if _counts(made):
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
    if _counts(layer) and layer.cumulative_length is not own.cumulative_length:
        devices.fill(own.cumulative_length, layer.cumulative_length)


def _share_count(own: Any, layer: Any) -> None:
    if _counts(layer):
        layer.cumulative_length = own.cumulative_length


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and devices.same(devices.location(one), devices.location(other))
    )
