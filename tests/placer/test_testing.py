"""The test bench itself: a stand-in behaves like a device of its own."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from weight_kinds import Scaled

from placer import devices, testing
from placer.errors import InputError
from placer.testing import MixedDevicesError, _tensors, logical_devices

ZERO, ONE = torch.device("cpu:0"), torch.device("cpu:1")


def _on(device: torch.device, *shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.ones(*(shape or (3,)), device=device, requires_grad=requires_grad)


def test_it_yields_its_devices() -> None:
    with logical_devices(3) as devices:
        assert devices == [torch.device("cpu", index) for index in range(3)]


@pytest.mark.parametrize("count", [0, -2, "2", 1.5, None])
def test_at_least_one_device_is_needed(count: Any) -> None:
    with pytest.raises(InputError, match=str(count)), logical_devices(count):
        pass


OPERATIONS = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b,
    "in_place": lambda a, b: a.add_(b),
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "stack": lambda a, b: torch.stack([a, b]),
    "mse_loss": nn.functional.mse_loss,
    "linear": lambda a, b: nn.functional.linear(a, b[None]),
    "setitem": lambda a, b: a.__setitem__(slice(0, 3), b * 1 + a),
    "out": lambda a, b: torch.mul(a, b, out=a),
    "compare": lambda a, b: a == b,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_tensors_of_two_devices_raises_and_names_both(name: str) -> None:
    with logical_devices(2), pytest.raises(MixedDevicesError, match=r"cpu:0.*cpu:1|cpu:1.*cpu:0"):
        OPERATIONS[name](_on(ZERO), _on(ONE))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_operation_on_one_device_runs_and_stays_there(name: str) -> None:
    with logical_devices(2):
        result = OPERATIONS[name](_on(ONE), _on(ONE))
        assert result is None or result.device == ONE


def test_the_tensors_of_any_nest_are_found() -> None:
    a, b, c = torch.ones(3), nn.Parameter(torch.ones(2)), torch.ones(())
    pair = namedtuple("pair", "first second")
    known = [
        (a, [b, {"c": c, "n": None}]),
        OrderedDict(x=a, y=(b, 1.5)),
        pair(a, [b, "text"]),
        torch.max(a, 0),
        a,
        3,
    ]
    for nest in [
        *known,
        {"all": known},
        (torch.float64, slice(1), torch.Size([2]), {"p": pair(c, c)}, object()),
    ]:
        expected = [id(leaf) for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
        assert [id(tensor) for tensor in _tensors(nest)] == expected


def test_a_host_tensor_does_not_mix_with_a_device() -> None:
    with logical_devices(1), pytest.raises(MixedDevicesError, match="host"):
        _on(ZERO) + torch.ones(3)


def test_a_number_on_the_host_mixes_with_every_device() -> None:
    with logical_devices(2):
        assert (_on(ONE) * torch.tensor(2.0)).device == ONE
        assert (_on(ONE) * 2.0).device == ONE


def test_a_number_on_a_device_does_not_mix_with_another_device() -> None:
    with logical_devices(2), pytest.raises(MixedDevicesError):
        _on(ONE) * _on(ZERO).sum()


def test_a_host_tensor_indexes_a_device_and_a_tensor_of_the_device_does_too() -> None:
    with logical_devices(1):
        x = _on(ZERO, 4)
        assert x[torch.tensor([0, 2])].device == ZERO
        assert x[torch.tensor([0, 2], device=ZERO)].device == ZERO
        assert x[x > 0].device == ZERO


def test_factories_land_on_the_device_that_they_name() -> None:
    with logical_devices(2):
        assert torch.zeros(2, device="cpu:1").device == ONE
        assert torch.arange(3, device=ONE).device == ONE
        assert torch.zeros_like(_on(ONE)).device == ONE
        assert _on(ONE).new_ones(2).device == ONE
        assert torch.zeros(2).device == torch.device("cpu")


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.to("cpu:0"),
        lambda x: x.to(ZERO, torch.float64),
        lambda x: x.to(device=ZERO, non_blocking=True),
        lambda x: x.to(_on(ZERO)),
    ],
)
def test_a_copy_lands_on_the_device_that_it_names_and_its_gradient_comes_back(copy) -> None:
    with logical_devices(2):
        x = _on(ONE, requires_grad=True)
        y = copy(x * 2)
        assert y.device == ZERO
        (y * y).sum().backward()
        assert x.grad.device == ONE
        assert x.grad.tolist() == [8.0] * 3


def test_copies_keep_values_and_copy_underscore_keeps_the_place() -> None:
    with logical_devices(2):
        target = torch.zeros(3, device=ZERO)
        target.copy_(_on(ONE))
        assert target.device == ZERO
        assert target.tolist() == [1.0] * 3
        assert _on(ONE).cpu().device == torch.device("cpu")
        assert _on(ONE).double().device == ONE


def test_views_and_clones_stay_where_their_source_is() -> None:
    with logical_devices(2):
        x = _on(ONE, 2, 3)
        for made in (
            x[0],
            x.t(),
            x.reshape(6),
            x.clone(),
            x.detach(),
            x.chunk(2)[1],
            x.expand(2, 2, 3),
            x.contiguous(),
        ):
            assert made.device == ONE


def test_a_gradient_that_comes_back_from_another_device_raises() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.detach().to(ZERO)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    with logical_devices(2):
        x = _on(ONE, requires_grad=True)
        y = Careless.apply(torch.exp(x))
        with pytest.raises(MixedDevicesError):
            (y * y).sum().backward()


def test_modules_and_optimizers_work_on_several_devices() -> None:
    for foreach in (False, True):
        with logical_devices(2):
            first, second = nn.Linear(3, 3).to("cpu:0"), nn.Linear(3, 2).to("cpu:1")
            parameters = [*first.parameters(), *second.parameters()]
            optimizer = torch.optim.Adam(parameters, foreach=foreach)
            for _ in range(2):
                optimizer.zero_grad()
                second(first(_on(ZERO, 2, 3)).to("cpu:1")).pow(2).sum().backward()
                nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)
                optimizer.step()
            assert [parameter.device for parameter in parameters] == [ZERO, ZERO, ONE, ONE]
            assert all(state["exp_avg"].device == p.device for p, state in optimizer.state.items())


def test_contexts_nest_and_the_inner_one_ends_with_its_block() -> None:
    with logical_devices(4):
        outer = _on(torch.device("cpu:3"))
        with logical_devices(2):
            assert _on(ONE).device == ONE
        assert outer.device == torch.device("cpu:3")
        with pytest.raises(MixedDevicesError):
            outer + _on(ONE)


def test_after_the_context_tensors_are_plain_again() -> None:
    with logical_devices(2):
        a, b = _on(ZERO, requires_grad=True), _on(ONE, requires_grad=True)
        (a * a).sum().backward()
    assert a.device == torch.device("cpu")
    (a + b).sum().backward()
    assert b.grad is not None


def test_an_error_inside_leaves_the_context() -> None:
    with pytest.raises(ZeroDivisionError), logical_devices(2):
        raise ZeroDivisionError
    assert (
        torch.ones(2, device="cpu:0").device.index is None
        or (_on(ZERO) + _on(ONE)).tolist() == [2.0] * 3
    )


def test_a_freed_tensor_leaves_no_tag_to_its_successor() -> None:
    with logical_devices(2):
        for _ in range(50):
            _on(ONE, 1000)
            assert torch.ones(1000).device == torch.device("cpu")


def test_attention_with_dropout_makes_its_mask_where_its_inputs_are() -> None:
    # On the CPU it is made of other operations, and its causal mask from nothing.
    with logical_devices(2):
        q = torch.randn(1, 2, 4, 4, device=ONE)
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5)
        assert y.device == ONE


def test_lengths_of_packed_sequences_are_on_the_host_as_on_gpus() -> None:
    with logical_devices(2):
        x, lengths = _on(ONE, 3, 5, 4, requires_grad=True), torch.tensor([5, 3, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        assert packed.data.device == ONE and packed.batch_sizes.device == torch.device("cpu")
        y, _ = nn.utils.rnn.pad_packed_sequence(nn.LSTM(4, 4).to(ONE)(packed)[0])
        assert y.device == ONE
        y.sum().backward()
        with pytest.raises(
            MixedDevicesError,
            match=r"takes lengths from the host, and met them on cpu:1.*\.cpu\(\)",
        ):
            nn.utils.rnn.pack_padded_sequence(x, lengths.to(ONE), batch_first=True)


@pytest.mark.parametrize("device", [ONE, "cpu:1"])
def test_a_tensor_made_of_numbers_is_on_the_device_that_it_names(device) -> None:
    with logical_devices(2):
        assert (torch.tensor([1.0, 2.0], device=device) + _on(ONE, 2)).device == ONE
        assert torch.tensor([1.0]).device == torch.device("cpu")


def test_a_sparse_gradient_is_where_its_values_are() -> None:
    with logical_devices(2):
        table = nn.Embedding(5, 3, sparse=True).to(ONE)
        before = table.weight.detach().clone()
        table(torch.tensor([1, 2], device=ONE)).sum().backward()
        torch.optim.SGD(table.parameters(), lr=1.0).step()
        assert not torch.equal(before, table.weight.detach())


def test_lazy_parameters_are_no_obstacle() -> None:
    with logical_devices(2):
        lazy = nn.LazyLinear(2)
        assert lazy.weight.device == torch.device("cpu")


def test_tensors_without_data_say_so_and_are_not_moved() -> None:
    with logical_devices(2):
        assert torch.empty(2, device="meta").device == torch.device("meta")
        with torch.device("meta"):
            layer = nn.Linear(2, 2)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            layer.to("cpu:1")
        assert layer.to_empty(device="cpu:1").weight.device == torch.device("cpu:1")


def test_an_inner_tensor_of_a_wrapper_that_was_left_behind_is_seen() -> None:
    """The wrapper itself has no storage; what it wraps meets in operations that its class calls."""
    whole = Scaled.of(torch.randn(4, 4))
    with logical_devices(2):
        weight: Any = devices.copy(whole, ONE)
        assert (weight @ _on(ONE, 4)).device == weight.device == ONE
        weight.scale = weight.scale.to(ZERO)
        with pytest.raises(MixedDevicesError, match="aten::mul met tensors on two devices"):
            weight @ _on(ONE, 4)


def test_a_wrapper_is_copied_to_a_device_with_what_it_wraps() -> None:
    with logical_devices(2):
        moved: Any = Scaled.of(torch.randn(4, 4)).to(ONE)
        assert type(moved) is Scaled
        assert moved.numbers.device == moved.scale.device == moved.device == ONE
        assert (moved @ _on(ONE, 4)).cpu().device == torch.device("cpu")


def test_threads_do_not_lose_the_devices_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge of dead storages dropped what another thread recorded meanwhile."""
    monkeypatch.setattr(testing, "_PURGE_EVERY", 2)
    before = sys.getswitchinterval()

    def places(_: int) -> set[str]:
        with devices.joined():
            return {str(devices.location(torch.ones(2, device="cpu:1") + 1)) for _ in range(200)}

    with logical_devices(2), ThreadPoolExecutor(4) as pool:
        kept = [torch.ones(1, device="cpu:1") for _ in range(500)]
        sys.setswitchinterval(1e-6)
        try:
            found = set().union(*pool.map(places, range(4)))
        finally:
            sys.setswitchinterval(before)
    assert found == {"cpu:1"} and kept
