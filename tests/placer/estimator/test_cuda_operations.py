"""Decisions of CUDA, on fake tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from placer.estimator.cuda_operations import (
    EFFICIENT,
    FLASH,
    MATH,
    CudaOperations,
    attention_backend,
)

BATCH, HEADS, LENGTH, SIZE = 2, 4, 64, 32


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode(), CudaOperations():
        yield


def _heads(
    dtype: torch.dtype, size: int = SIZE, heads: int = HEADS, length: int = LENGTH
) -> Tensor:
    return torch.empty(BATCH, heads, length, size, dtype=dtype, requires_grad=True)


def _saved_bytes(result: Tensor) -> int:
    """Return the bytes of all distinct storages that the history of a result holds."""
    storages: dict[int, int] = {}
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        for name in dir(node):
            saved = getattr(node, name) if name.startswith(("_saved_", "saved_tensors")) else None
            for item in saved if isinstance(saved, tuple) else (saved,):
                if isinstance(item, Tensor):
                    storage = item.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
        nodes += [following for following, _ in node.next_functions]
    return sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.bfloat16, FLASH),
        (torch.float16, FLASH),
        (torch.float32, EFFICIENT),
        (torch.float64, MATH),
    ],
)
def test_the_dtype_decides_on_the_attention(dtype: torch.dtype, backend: str) -> None:
    x = _heads(dtype)
    assert attention_backend(x, x, x, is_causal=True) == backend


def test_a_mask_needs_the_memory_efficient_attention() -> None:
    x = _heads(torch.bfloat16)
    assert attention_backend(x, x, x, torch.empty(LENGTH, LENGTH)) == EFFICIENT


def test_a_causal_attention_to_more_keys_than_queries_is_not_flash() -> None:
    x, memory = _heads(torch.bfloat16), _heads(torch.bfloat16, length=2 * LENGTH)
    assert attention_backend(x, memory, memory, is_causal=True) == EFFICIENT
    assert attention_backend(x, memory, memory) == FLASH


def test_grouped_queries_run_as_flash_in_half_precision_and_as_math_in_float32() -> None:
    for dtype, backend in ((torch.bfloat16, FLASH), (torch.float32, MATH)):
        x, memory = _heads(dtype), _heads(dtype, heads=1)
        assert attention_backend(x, memory, memory) == backend


def test_large_heads_are_not_flash() -> None:
    x = _heads(torch.bfloat16, size=320)
    assert attention_backend(x, x, x) == EFFICIENT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_attention_saves_no_scores(dtype: torch.dtype) -> None:
    query, key, value = (_heads(dtype) for _ in range(3))
    seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    rows = BATCH * HEADS * LENGTH
    # the reads, the result, a float32 logarithm of each row's sum, and random numbers' seeds
    expected = 4 * rows * SIZE * dtype.itemsize + 4 * rows
    assert expected <= _saved_bytes(seen) <= expected + 64


def test_math_attention_saves_the_scores() -> None:
    query, key = _heads(torch.float32), _heads(torch.float32, heads=1)
    seen = functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert _saved_bytes(seen) >= 4 * BATCH * HEADS * LENGTH * LENGTH


def test_flash_attention_pads_heads_to_a_multiple_of_8() -> None:
    x = _heads(torch.bfloat16, size=30)
    seen = functional.scaled_dot_product_attention(x, x, x)
    assert seen.shape == x.shape
    assert seen.untyped_storage().nbytes() == 2 * BATCH * HEADS * LENGTH * 32


def test_dropout_saves_a_byte_per_element() -> None:
    x = torch.empty(BATCH, LENGTH, requires_grad=True)
    assert _saved_bytes(functional.dropout(x, 0.1)) == BATCH * LENGTH


@pytest.mark.parametrize("options", [{"p": 0.0}, {"training": False}])
def test_a_dropout_without_effect_saves_nothing(options: Any) -> None:
    x = torch.empty(BATCH, LENGTH, requires_grad=True)
    assert _saved_bytes(functional.dropout(x, **options)) == 0


def test_rms_normalisation_saves_its_input_and_a_number_per_row() -> None:
    x = torch.empty(BATCH, LENGTH, SIZE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(SIZE, dtype=torch.bfloat16, requires_grad=True)
    normed = functional.rms_norm(x, (SIZE,), weight)
    assert _saved_bytes(normed) == x.nbytes + weight.nbytes + 4 * BATCH * LENGTH


def test_captured_operations_are_replaced_like_functions() -> None:
    x = torch.empty(BATCH, LENGTH, requires_grad=True)
    dropped = torch.ops.aten.dropout.default(x, 0.1, True)
    assert type(dropped.grad_fn).__name__ == "NativeDropoutBackward0"


def test_whole_numbers_are_counted_as_on_cuda() -> None:
    counted = torch.histc(torch.empty(6, dtype=torch.int32), bins=4, min=0, max=3)
    assert counted.shape == (4,) and counted.dtype == torch.int32
