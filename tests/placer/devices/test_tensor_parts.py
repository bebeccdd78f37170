"""The plain tensors inside weights: which there are, and weights like others over other plain
tensors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from weight_kinds import KINDS, Around, Functional, Packed, Scaled, Slots, State, model_of

from placer import devices
from placer.capture.layers import tensor_bytes
from placer.testing import logical_devices

META = torch.device("meta")


def doubled(part: Tensor) -> Tensor:
    return part * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_layers_tensors_are_what_it_stores(kind: str) -> None:
    layer: Any = model_of(KINDS[kind])[0]
    own = [
        *layer.parameters(),
        *layer.buffers(),
        *(held for _, held in devices.named_tensors(getattr(layer, "state", 0))),
    ]
    expected = {part.data_ptr() for part in KINDS[kind].stored(layer)}
    assert {part.data_ptr() for tensor in own for part in devices.parts(tensor)} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_shares_no_memory_and_has_the_same_values_and_class(kind: str) -> None:
    for tensor in model_of(KINDS[kind]).state_dict(keep_vars=True).values():
        copied = devices.copy(tensor, torch.device("cpu"))
        for part, copied_part in zip(devices.parts(tensor), devices.parts(copied), strict=True):
            assert copied_part.data_ptr() != part.data_ptr()
            assert torch.equal(copied_part, part)
        assert type(copied) is (Tensor if type(tensor) is nn.Parameter else type(tensor))
        assert not copied.requires_grad


def test_memory_that_two_names_share_is_copied_and_counted_once() -> None:
    weight = Packed(torch.ones(4, 4), SimpleNamespace(again=None, scale=torch.ones(4)))
    weight.state.again = weight.data
    copied: Any = devices.copy(weight, torch.device("cpu"))
    assert copied.state.again.data_ptr() == copied.data_ptr() != weight.data_ptr()
    assert tensor_bytes(weight) == 4 * (16 + 4)


def test_tensors_in_attributes_are_replaced_and_other_attributes_are_shared() -> None:
    class Pair(NamedTuple):
        one: Tensor
        word: str

    shared = State(torch.ones(2))
    words = {"plain": [1, 2]}
    weight = Packed(
        torch.ones(2),
        [Pair(torch.ones(2), "x"), shared, {"again": shared}, words, Slots(torch.ones(2))],
    )
    made: Any = devices.rebuilt(weight, doubled)
    pair, state, again, plain, slots = made.state
    assert type(pair) is Pair
    assert pair.one.tolist() == slots.scale.tolist() == state.scale.tolist() == [2, 2]
    assert again["again"] is state
    assert plain is words
    assert weight.state[0].one.tolist() == shared.scale.tolist() == [1, 1]


def test_an_object_that_refers_to_itself_is_copied_with_its_reference() -> None:
    state: Any = State(torch.ones(2))
    state.itself = state
    weight = Packed(torch.ones(2), state)
    made: Any = devices.rebuilt(weight, doubled)
    assert made.state.itself is made.state
    assert made.state.scale.tolist() == [2, 2]
    devices.take_over(weight, made)
    assert weight.state is state is state.itself
    assert state.scale.tolist() == [2, 2]


def test_tensors_that_refer_to_one_another_are_followed_once() -> None:
    one: Any = torch.ones(2)
    one.other = torch.ones(3)
    one.other.back = one
    assert [len(part) for part in devices.parts(one)] == [3, 2]
    made: Any = devices.rebuilt(one, doubled)
    assert made.other.back is made
    assert made.other.tolist() == [2, 2, 2]


def test_a_conjugate_is_told_from_the_tensor_that_it_is_a_view_of() -> None:
    whole = torch.tensor([1 + 1j, 2 - 1j])
    made: Any = devices.copy(Packed(whole, whole.conj()), torch.device("cpu"))
    assert torch.equal(made.state, whole.conj())
    assert torch.equal(made.data, whole)


@pytest.mark.parametrize(
    "value",
    [
        nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
        nn.Linear(2, 2),
        SimpleNamespace(a=nn.Linear(2, 2)),
    ],
    ids=["parameter", "history", "module", "object with a module"],
)
def test_what_belongs_to_somebody_else_is_no_part(value: Any) -> None:
    weight = Packed(torch.ones(2), value)
    assert devices.attached(weight) == ()
    made: Any = devices.rebuilt(weight, doubled)
    assert made.state is value


@dataclasses.dataclass(frozen=True)
class Facts:
    device: torch.device
    bits: int = 8


class WithFacts(Functional):
    """A wrapper that makes its tensors on the device that its context names."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], Facts(self.device)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Any:
        assert context == Facts(inner["scale"].device)
        return cls(inner["numbers"], inner["scale"])


@pytest.mark.parametrize("kind", [Functional, WithFacts])
def test_a_device_in_the_context_of_a_wrapper_is_the_device_of_what_it_wraps(
    kind: type[Functional],
) -> None:
    wrapper: Any = devices.copy(kind(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)), META)
    assert wrapper.device == wrapper.numbers.device == META
    assert devices.location(wrapper) == META


def test_a_device_in_an_attached_object_follows_the_tensors_there() -> None:
    """A copy on another device that remembers the old one would make its next tensors there."""
    # The field comes before the tensor that tells where it has gone.
    state = SimpleNamespace(device=torch.device("cpu"), scale=torch.ones(2))
    made: Any = devices.copy(Packed(torch.ones(2), state), META)
    assert made.state.device == META
    assert state.device == torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_takes_data_over_and_stays_the_same_object(kind: str) -> None:
    """``tensor.data = other`` does not change compressed sparse tensors or wrapped tensors."""
    for tensor in model_of(KINDS[kind]).state_dict(keep_vars=True).values():
        made = devices.copy(tensor, torch.device("cpu"))
        new, before = [part.data_ptr() for part in devices.parts(made)], tensor.requires_grad
        inner = vars(tensor).get("state")
        devices.take_over(tensor, made)
        assert [part.data_ptr() for part in devices.parts(tensor)] == new
        assert tensor.requires_grad == before
        if isinstance(inner, State | SimpleNamespace | Slots | list | dict):
            assert vars(tensor)["state"] is inner


def test_logical_devices_sees_where_each_inner_tensor_is() -> None:
    with logical_devices(2):
        one, other = torch.device("cpu", 0), torch.device("cpu", 1)
        whole = Around(Scaled.of(torch.randn(4, 4)))
        moved: Any = devices.copy(whole, other)
        assert devices.location(whole) == torch.device("cpu")
        for part in (moved, moved.inner, moved.inner.numbers, moved.inner.scale):
            assert devices.location(part) == part.device == other
        moved.inner.scale = moved.inner.scale.to(one)
        assert not devices.is_at(moved, other)


def test_a_tensor_with_attributes_is_filled() -> None:
    """Transformers attaches tensors to inputs, such as positions."""
    target, source = torch.zeros(3), torch.ones(3)
    target.positions = torch.arange(3)  # type: ignore[attr-defined]
    devices.fill(target, source)
    assert target.tolist() == [1, 1, 1]
