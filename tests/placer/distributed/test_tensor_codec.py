from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placer.capture.layers import Value
from placer.distributed.autograd_boundary import enter, leave
from placer.distributed.tensor_codec import Parcel
from placer.errors import InputError

CPU = torch.device("cpu")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
]


def parcel(like: Any, flows: bool = False) -> Parcel:
    tensor = isinstance(like, torch.Tensor)
    value = Value(
        "v",
        tuple(like.shape) if tensor else (),
        like.dtype if tensor else None,
        0,
        None,
        flows,
        "layer",
    )
    return Parcel.for_value(value, flows=True)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**32))
def test_any_tensor_comes_out_as_it_went_in(
    dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 100).to(dtype)
    packed = parcel(tensor).pack(tensor, CPU)
    assert packed.shape == parcel(tensor).example(True).shape and packed.dtype == torch.float32
    assert torch.equal(parcel(tensor).unpack(packed), tensor)


def test_bits_that_are_no_number_as_float32_survive() -> None:
    tensor = torch.tensor([0x7FA0000100000001, -1, 0x7F800001FFFFFFFF])
    assert torch.equal(parcel(tensor).unpack(parcel(tensor).pack(tensor, CPU).clone()), tensor)


def test_a_part_of_a_tensor_that_begins_anywhere_crosses() -> None:
    tensor = torch.arange(40).to(torch.uint8)[3:15].view(3, 4).t()
    assert torch.equal(parcel(tensor).unpack(parcel(tensor).pack(tensor, CPU)), tensor)


def test_one_element_crosses_whatever_its_stride() -> None:
    tensor = torch.tensor(2.5).expand(1)
    assert tensor.stride() == (0,)
    assert torch.equal(parcel(tensor).unpack(parcel(tensor).pack(tensor, CPU)), tensor)


@pytest.mark.parametrize("number", [0, 7, -(2**62), 3.5, float("inf"), True, False])
def test_numbers_keep_their_type_and_value(number: Any) -> None:
    found = parcel(number).unpack(parcel(number).pack(number, CPU))
    assert found == number and type(found) is type(number)


def test_complex_numbers_cross_as_pairs_with_their_gradient() -> None:
    leaf = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    packed = parcel(leaf, flows=True).pack(leaf, CPU)
    assert packed.shape == (3, 2) and packed.dtype == torch.float64
    parcel(leaf, flows=True).unpack(packed).abs().square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


def test_another_shape_than_the_stages_were_built_for_is_named() -> None:
    with pytest.raises(
        InputError, match=r"'v' has shape \(3,\), and the stages were built for \(2,\)"
    ):
        parcel(torch.zeros(2)).pack(torch.zeros(3), CPU)


def test_what_autocast_made_crosses_in_the_type_that_was_agreed() -> None:
    assert (
        parcel(torch.zeros(2), flows=True).pack(torch.zeros(2, dtype=torch.bfloat16), CPU).dtype
        == torch.float32
    )


def test_every_received_value_gets_a_gradient_also_one_that_nobody_read() -> None:
    leaves = [
        torch.ones(2, requires_grad=True),
        torch.ones(3, requires_grad=True),
        torch.ones(4, requires_grad=True),
    ]
    token, (read, _, plain) = enter(leaves, [True, True, False])
    assert not plain.requires_grad
    (sent,) = leave(token, [read * 3])
    sent.sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None] == [
        [3.0, 3.0],
        [0.0] * 3,
        [0.0] * 4,
    ]


def test_what_was_received_may_be_written_to() -> None:
    leaf = torch.full((2,), -1.0, requires_grad=True)
    token, (value,) = enter([leaf], [True])
    (sent,) = leave(token, [value.mul_(2).relu_()])
    sent.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [0.0, 0.0]


def test_what_is_sent_without_reading_what_was_received_asks_for_its_gradient_all_the_same() -> (
    None
):
    leaf = torch.ones(2, requires_grad=True)
    token, _ = enter([leaf], [True])
    (sent,) = leave(token, [torch.zeros(3)])
    sent.backward(torch.ones(3))
    assert leaf.grad is not None and leaf.grad.tolist() == [0.0, 0.0]
