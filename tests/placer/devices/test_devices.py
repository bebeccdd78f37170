from __future__ import annotations

import pytest
import torch

from placer import devices
from placer.errors import InputError
from placer.testing import logical_devices


@pytest.mark.parametrize("given", [1, "1", "cpu:1", torch.device("cpu", 1)])
def test_a_device_is_parsed_from_every_form(given: devices.DeviceLike) -> None:
    assert devices.parse(given, "cpu") == torch.device("cpu", 1)


def test_a_device_without_an_index_is_the_first_of_its_kind() -> None:
    assert devices.parse("cpu") == torch.device("cpu", 0)
    assert devices.parse("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize("given", [-1, "tpu-ish", "cpu:x", "", "meta", True])
def test_what_names_no_device_is_refused_by_name(given: devices.DeviceLike) -> None:
    with pytest.raises(InputError):
        devices.parse(given)


def test_inside_logical_devices_all_of_them_are_available() -> None:
    with logical_devices(3):
        if not torch.cuda.is_available():
            assert devices.available() == [torch.device("cpu", index) for index in range(3)]
        with pytest.raises(InputError, match="cpu:3"):
            devices.resolve(["cpu:3"])


@pytest.mark.parametrize("count", [0, -1, True, False, 1000])
def test_resolve_refuses_a_number_that_is_not_a_count_of_devices(count: int) -> None:
    with pytest.raises(InputError, match=f"devices is {count}"):
        devices.resolve(count)


def test_resolve_refuses_none_and_twice() -> None:
    with pytest.raises(InputError, match="devices is an empty list"):
        devices.resolve([])
    with pytest.raises(InputError, match="twice"):
        devices.resolve(["cpu:0", torch.device("cpu", 0)])


def test_stand_ins_are_one_device_outside_of_logical_devices() -> None:
    zero, one = torch.device("cpu", 0), torch.device("cpu", 1)
    assert devices.same(zero, one)
    with logical_devices(2):
        assert not devices.same(zero, one)


def test_move_gives_the_tensor_itself_where_it_is_there() -> None:
    x = torch.ones(2)
    assert devices.move(x, torch.device("cpu", 3)) is x
    with logical_devices(2):
        y = torch.ones(2, device="cpu:1")
        assert devices.move(y, torch.device("cpu:1")) is y


def test_move_brings_the_gradient_back() -> None:
    with logical_devices(2):
        x = torch.ones(2, device="cpu:1", requires_grad=True)
        y = devices.move(x, torch.device("cpu:0"))
        (y * 3).sum().backward()
        assert devices.location(x.grad) == torch.device("cpu:1")
        assert x.grad.tolist() == [3.0, 3.0]


def test_move_without_gradients_keeps_no_graph() -> None:
    with logical_devices(2), torch.no_grad():
        x = torch.ones(2, device="cpu:1", requires_grad=True)
        assert not devices.move(x, torch.device("cpu:0")).requires_grad


def test_copy_is_detached_and_of_another_storage() -> None:
    with logical_devices(2):
        x = torch.ones(2, device="cpu:1", requires_grad=True)
        made = devices.copy(x, torch.device("cpu:0"))
        assert not made.requires_grad
        assert made.data_ptr() != x.data_ptr()


def test_unobserved_looks_away() -> None:
    with logical_devices(2):
        with devices.unobserved():
            assert (torch.ones(2, device="cpu:0") + torch.ones(2, device="cpu:1")).tolist() == [
                2.0,
                2.0,
            ]
            assert not devices.observed()
        assert devices.observed()
