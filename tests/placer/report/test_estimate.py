from __future__ import annotations

import pytest

from placer.report import explain
from placer.report.estimate import estimate_table, headline
from placer.report.rendering import plain_text
from placer.schema import CardCount, Change, DeviceEstimate, Estimate, MemoryUse

GIB = 2**30


def device(used_gib: float, memory_gib: int | None = 24, **parts: int) -> DeviceEstimate:
    memory = None if memory_gib is None else memory_gib * GIB
    return DeviceEstimate(
        device="cuda:0",
        layers=3,
        memory=MemoryUse(**parts),
        total_bytes=int(used_gib * GIB),
        memory_bytes=memory,
        limit_bytes=None if memory is None else memory - GIB // 2,
    )


def test_the_first_line_says_that_it_fits_and_how_closely() -> None:
    found = Estimate(fits=True, devices=(device(21.3), device(20.0)))
    expected = "fits on two 24 GiB devices: the fullest uses 21.3 GiB of 23.5 GiB"
    assert headline(found) == expected


def test_the_fullest_device_is_the_one_with_the_least_free_memory() -> None:
    found = Estimate(fits=True, devices=(device(40.0, 80), device(11.0, 12)))
    assert headline(found).endswith("the fullest uses 11.0 GiB of 11.5 GiB")


@pytest.mark.parametrize(
    ("fits", "weights_only", "words"),
    [
        (False, False, "does not fit on one 24 GiB device: the fullest needs 30.0 GiB of"),
        (False, True, "the weights do not fit on one 24 GiB device"),
        (None, False, "no placement on one 24 GiB device was found in time"),
    ],
)
def test_the_first_line_says_what_is_missing(
    fits: bool | None, weights_only: bool, words: str
) -> None:
    found = Estimate(fits=fits, weights_only=weights_only, devices=(device(30.0),))
    assert headline(found).startswith(words)


def test_without_devices_the_first_line_names_the_cards() -> None:
    cards = tuple(
        CardCount(memory_bytes=size * GIB, devices=count, total_bytes=GIB, limit_bytes=GIB)
        for size, count in ((24, 2), (48, 1))
    )
    found = Estimate(devices=(device(30.0, None),), cards=cards)
    expected = "needs 30.0 GiB on one device; fits on two 24 GiB cards or one 48 GiB card"
    assert headline(found) == expected


def test_the_table_shows_the_parts_that_there_are_and_the_changes() -> None:
    change = Change(
        kind="recompute",
        change="recompute on cuda:0",
        batch_size=1,
        chunks=1,
        devices=1,
        memory_bytes=(24 * GIB,),
        total_bytes=20 * GIB,
        limit_bytes=23 * GIB,
    )
    found = Estimate(
        fits=False,
        training=True,
        optimizer="AdamW",
        devices=(device(30.0, param_bytes=GIB, grad_bytes=2 * GIB),),
        changes=(change,),
        notes=("something was left out",),
    )
    text = explain(found)
    assert "gradients" in text and "2.0 GiB" in text
    assert "cache" not in text
    assert "would fit   recompute on cuda:0: the fullest uses 20.0 GiB of 23.0 GiB" in text
    assert "training with AdamW" in text
    assert "something was left out" in text


@pytest.mark.parametrize(("width", "first_heading"), [(120, "device"), (80, "memory")])
def test_the_kinds_of_memory_are_shown_on_a_terminal_of_80_columns(
    width: int, first_heading: str
) -> None:
    parts = dict.fromkeys(
        ("param_bytes", "grad_bytes", "optimizer_bytes", "activation_bytes", "workspace_bytes"),
        GIB,
    )
    found = Estimate(fits=True, training=True, devices=(device(20.0, **parts),) * 2)
    lines = plain_text(estimate_table(found), width).splitlines()
    assert lines[3].split()[1] == first_heading
    for kind in ("parameters", "gradients", "optimizer", "activations", "workspace"):
        assert any(kind in line for line in lines), kind
    assert max(map(len, lines)) <= width
