"""Workspaces of CUDA's libraries, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from placer.devices.allocator.storage_watch import StorageLog
from placer.estimator.cuda_operations import CudaOperations
from placer.estimator.cuda_workspaces import CudaWorkspaces

BATCH, INSIDE, OUTSIDE, SIZE = 2, 8, 16, 12


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode(), CudaOperations():
        yield


def _images(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Tensor:
    return torch.empty(BATCH, INSIDE, SIZE, SIZE, dtype=dtype, **options)


def _weight(kernel: int, dtype: torch.dtype = torch.bfloat16, inside: int = INSIDE) -> Tensor:
    return torch.empty(OUTSIDE, inside, kernel, kernel, dtype=dtype)


def _extra_bytes(x: Tensor, weight: Tensor, groups: int = 1) -> int:
    """Return the peak of a convolution beyond its result."""
    log = StorageLog(x.device, [weight], [x])
    with log, CudaWorkspaces():
        result = functional.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=groups)
    return log.peak_bytes() - result.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_convolution_copies_its_operands_to_channels_last(dtype: torch.dtype) -> None:
    x, weight = _images(dtype), _weight(3, dtype)
    result_bytes = BATCH * OUTSIDE * SIZE * SIZE * dtype.itemsize
    assert _extra_bytes(x, weight) == x.nbytes + weight.nbytes + result_bytes


def test_a_convolution_of_channels_last_images_copies_nothing() -> None:
    x = _images().to(memory_format=torch.channels_last)
    assert _extra_bytes(x, _weight(3)) == 0


def test_a_convolution_by_single_pixels_in_float32_copies_nothing() -> None:
    assert _extra_bytes(_images(torch.float32), _weight(1, torch.float32)) == 0


def test_a_depthwise_convolution_copies_nothing() -> None:
    assert _extra_bytes(_images(), _weight(3, inside=1), groups=INSIDE) == 0


def test_double_precision_has_no_tensor_cores() -> None:
    assert _extra_bytes(_images(torch.float64), _weight(3, torch.float64)) == 0


def test_the_backward_pass_of_a_convolution_copies_the_operands_of_one_half_at_a_time() -> None:
    x, weight = _images(requires_grad=True), _weight(3).requires_grad_()
    result = functional.conv2d(x, weight, padding=1)
    gradient = torch.empty_like(result)
    log = StorageLog(x.device, [weight], [x, result, gradient])
    with log, CudaWorkspaces():
        gradients = torch.autograd.grad(result, [x, weight], gradient)
    assert [made.shape for made in gradients] == [x.shape, weight.shape]
    # both halves read the result's gradient, and one of input and weight; they make the other
    copies = gradient.nbytes + x.nbytes + weight.nbytes
    assert log.peak_bytes() == x.nbytes + weight.nbytes + copies


def test_flash_attention_sums_the_gradient_of_queries_in_float32() -> None:
    batch, heads, length, size = 2, 4, 200, 40
    query = torch.empty(batch, heads, length, size, dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(batch, 2, length, size, dtype=torch.bfloat16, requires_grad=True)
    seen = functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    gradient = torch.empty_like(seen)
    log = StorageLog(query.device, [], [query, key, seen, gradient])
    with log, CudaWorkspaces():
        torch.autograd.grad(seen, [query], gradient)
    # 200 queries are 2 blocks of 128, and 40 numbers of a head 2 parts of 32
    sums_bytes = 4 * batch * heads * 256 * (64 + 1)
    expanded_bytes = 2 * 2 * batch * heads * length * size
    results_bytes = query.nbytes + 2 * key.nbytes
    assert log.peak_bytes() == results_bytes + sums_bytes + expanded_bytes
