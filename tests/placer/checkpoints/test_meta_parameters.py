"""Models that are built inside ``placer.on_meta`` have buffers with values, and no parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import placer


def test_parameters_are_on_meta_and_buffers_have_values() -> None:
    with placer.on_meta():
        norm = nn.BatchNorm1d(4)
    assert norm.weight.is_meta and norm.bias.is_meta
    assert torch.equal(norm.get_buffer("running_var"), torch.ones(4))


def test_a_parameter_keeps_its_shape_dtype_and_gradient_flag() -> None:
    with placer.on_meta():
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float16), requires_grad=False)
    weight = model.weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((2, 3), torch.float16, False)


def test_a_shared_parameter_stays_one_parameter() -> None:
    with placer.on_meta():
        shared = nn.Parameter(torch.ones(3))
        model: Any = nn.ModuleList([nn.Module(), nn.Module()])
        model[0].weight = shared
        model[1].weight = shared
        model[1].tied = model[0].weight
    assert model[0].weight is model[1].weight is model[1].tied


def test_modules_made_after_the_block_have_values() -> None:
    with pytest.raises(ValueError, match="stop"), placer.on_meta():
        raise ValueError("stop")
    assert not nn.Linear(2, 2).weight.is_meta


def test_modules_that_another_thread_makes_have_values() -> None:
    with placer.on_meta(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(nn.Linear, 2, 2).result()
    assert not other.weight.is_meta
