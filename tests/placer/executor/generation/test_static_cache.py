"""Static copies of caches: their capacities, and the lengths that ``generate`` tells."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_list import transformers
from torch import nn

from placer.executor.generation.cache_view import CacheView, capacity_at_end, capacity_for
from placer.executor.generation.static_cache import StaticCopy
from placer.executor.generation.text_length import TextLength


@pytest.mark.parametrize(
    ("length", "expected", "capacity"),
    [
        (1, None, 64),
        (63, None, 64),
        (64, None, 128),
        (1000, None, 1024),
        (1024, None, 2048),
        (512, 576, 640),
        (5, 17, 64),
        (700, 1025, 1280),
        (100, 100_000, 128),  # a limit that a text rarely reaches
        (3000, 5000, 5120),
        (600, 576, 1024),
    ],
)
def test_capacities_have_room_for_the_text_or_double(
    length: int, expected: int | None, capacity: int
) -> None:
    assert capacity_for(length, expected) == capacity


def test_every_capacity_has_room_for_one_more_token() -> None:
    for length in range(1, 3000):
        for expected in (None, length, length + 1, length + 64, 2 * length):
            capacity = capacity_for(length, expected)
            assert capacity > length and capacity >= min(expected or 0, 4096)


@pytest.mark.parametrize(
    ("prompt", "new"), [(512, 64), (7, 1), (63, 2), (64, 2), (100, 9000), (5000, 4000), (1, 4200)]
)
def test_the_capacity_at_the_end_is_the_last_one_that_decoding_needs(prompt: int, new: int) -> None:
    capacity = 0
    for length in range(prompt, prompt + new - 1):  # tokens before each pass of one token
        if length >= capacity:
            capacity = capacity_for(length, prompt + new)
    assert capacity_at_end(prompt, new) == (capacity or capacity_for(prompt, prompt + 1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 20}, 27),
        ({"max_length": 30}, 30),
        ({"generation_config": SimpleNamespace(max_new_tokens=5, max_length=None)}, 12),
        ({}, 100),
    ],
)
def test_the_length_of_a_text_follows_from_the_limits(
    options: dict[str, Any], expected: int
) -> None:
    model = nn.Module()
    model.generation_config = SimpleNamespace(max_new_tokens=None, max_length=100)
    length = TextLength()
    assert length.expected(7) is None
    length.announce(model, options)
    assert [length.expected(tokens) for tokens in (7, 8, 9)] == [expected] * 3
    length.forget()
    assert length.expected(7) is None


def test_a_static_copy_gives_its_memory_back_without_a_garbage_collection() -> None:
    """A GPU may need the memory before Python looks for cycles."""
    transformers()
    kinds = pytest.importorskip("transformers.cache_utils")
    cache = kinds.DynamicCache()
    for number in range(2):
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), number)
    copy = StaticCopy(CacheView(cache), 64)
    tensors = [weakref.ref(one) for one in copy.tensors]
    gc.disable()
    try:
        del copy
        assert [one() for one in tensors] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("prompt", [3, 9])
def test_a_cache_follows_as_after_its_own_updates_within_and_beyond_its_window(prompt: int) -> None:
    transformers()
    kinds = pytest.importorskip("transformers.cache_utils")
    caches = [
        kinds.Cache(layers=[kinds.DynamicSlidingWindowLayer(6), kinds.DynamicLayer()])
        for _ in range(2)
    ]
    keys = torch.arange(2.0 * (prompt + 5)).reshape(1, 2, prompt + 5, 1)
    for cache in caches:
        for number in range(2):
            cache.update(keys[:, :, :prompt], -keys[:, :, :prompt], number)
    own, expected = caches
    view = CacheView(own)
    copy = StaticCopy(view, 64)
    copy.adopt(own, view)
    for token in range(prompt, prompt + 5):
        new = keys[:, :, token : token + 1]
        for cache in (copy.cache, expected):
            for number in range(2):
                cache.update(new, -new, number)
        current = copy.current_view(own)
        copy.follow(view if current is None else current)
        for layer, other in zip(own.layers, expected.layers, strict=True):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
            assert layer.get_seq_length() == other.get_seq_length() == token + 1
