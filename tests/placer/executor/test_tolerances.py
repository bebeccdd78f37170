"""Equality up to rounding, by the coarsest type that takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from placer.executor.checks.tolerances import Closeness, shown

ONE = torch.linspace(-1, 1, 12)


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (ONE * (1 + 1e-6), True),
        (ONE + 1e-2 * (ONE == ONE[3]), False),
        (ONE.reshape(3, 4), False),
        (ONE * torch.tensor(float("nan")), False),
    ],
)
def test_tensors_are_equal_up_to_rounding(other: torch.Tensor, equal: bool) -> None:
    assert Closeness.for_tensors([ONE])(other, ONE) is equal


def test_infinite_and_missing_numbers_have_to_stand_in_the_same_places() -> None:
    one = torch.tensor([1.0, float("inf"), float("nan")])
    assert Closeness.for_tensors([one])(one.clone(), one)
    assert not Closeness.for_tensors([one])(one.flip(0), one)


@pytest.mark.parametrize(
    ("kind", "step"),
    [(torch.float64, 1e-8), (torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.2)],
)
def test_the_tolerance_is_that_of_the_coarsest_type(kind: torch.dtype, step: float) -> None:
    close = (
        Closeness.for_tensors([ONE, ONE.to(kind)])
        if kind != torch.float64
        else Closeness.for_tensors([ONE.to(kind)])
    )
    assert close(ONE.double() * (1 + step / 100), ONE.double())
    assert not close(ONE.double() * (1 + step * 2), ONE.double())


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (3, 3, True),
        (3, 4, False),
        (1.0, 1.0 + 1e-7, True),
        (1.0, 1.1, False),
        ("a", "a", True),
        (True, False, False),
    ],
)
def test_numbers_and_words_are_compared(one: Any, other: Any, equal: bool) -> None:
    assert Closeness.for_tensors([ONE])(one, other) is equal


def test_flags_are_equal_or_not_and_indices_may_fall_either_way_in_ties() -> None:
    indices = torch.arange(10_000)
    tied = indices.clone()
    tied[0] = 7
    assert Closeness.for_tensors([ONE])(tied, indices)
    assert not Closeness.for_tensors([ONE])(indices.flip(0), indices)
    assert not Closeness.for_tensors([ONE])(torch.tensor([True, False]), torch.tensor([True, True]))


def test_the_entry_that_is_furthest_apart_is_shown() -> None:
    other = ONE.clone()
    other[3] = 5.0
    assert shown(ONE, other) == f"{ONE[3].item():.6g} and 5 at [3]"
    assert shown(torch.tensor(1.5), torch.tensor(2)) == "1.5 and 2"
    assert shown(ONE, ONE[:3]) == "tensors of shape (12,) and (3,)"
