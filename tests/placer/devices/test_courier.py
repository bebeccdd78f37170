"""Sums of what comes from several devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from placer import devices
from placer.devices import Courier, routes
from placer.testing import logical_devices

PLACES = [torch.device("cpu", index) for index in range(3)]


@pytest.fixture(autouse=True)
def no_detours_left() -> Iterator[None]:
    yield
    routes._detours.clear()


@pytest.mark.parametrize("detoured", [False, True])
def test_what_comes_from_several_devices_is_added_up(detoured: bool) -> None:
    courier = Courier()
    first, second, target = PLACES
    if detoured:
        devices.detour(second, target)
    with logical_devices(3):
        total, beside = torch.zeros(4).to(target), torch.zeros(2).to(target)
        for step in (1.0, 10.0):  # each step begins anew
            courier.send(torch.full((4,), step).to(first), None, total, None, "gradients")
            sources = [torch.full((4,), 2 * step).to(second), torch.full((2,), step).to(second)]
            courier.send_all(sources, None, [total, beside], None, "gradients", adds=[True, False])
            assert total.tolist() == [3 * step] * 4
            assert beside.tolist() == [step] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["cuda:0", "cpu"])
def test_sums_on_gpus_wait_for_one_another(end: str) -> None:
    """Large enough that a sum which did not wait would be of what is still on its way."""
    places = [torch.device("cuda", index % torch.cuda.device_count()) for index in range(2)]
    target, courier = torch.device(end), Courier()
    total = torch.zeros(1 << 24, device=target)
    free = None
    for value in range(1, 20):
        marks = []
        for number, place in enumerate(places):
            caller = devices.Lane(place, caller=True)
            source = torch.full((1 << 24,), float(value), device=place)
            waits = [free, *marks]
            marks.append(
                courier.send_all(
                    [source], caller.mark(), [total], waits, str(number), adds=[number > 0]
                )
            )
            caller.wait(*marks)  # else its memory would be taken for the next
        reader = devices.Lane(target, caller=True)
        reader.wait(*marks)
        assert bool((total == 2 * value).all())
        free = reader.mark()
