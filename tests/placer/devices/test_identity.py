from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placer import devices
from placer.devices import identity

CPU, GPU = torch.device("cpu", 0), torch.device("cuda", 3)


def test_the_speed_of_a_stand_in_depends_on_the_threads_it_may_use() -> None:
    before, threads = devices.speed_facts(CPU), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        after = devices.speed_facts(CPU)
    finally:
        torch.set_num_threads(threads)
    assert {name for name in before if before[name] != after[name]} == {"threads"}


def test_all_stand_ins_are_in_one_place() -> None:
    assert devices.place(CPU) == devices.place(torch.device("cpu", 5)) == "cpu"


def test_the_power_limit_is_asked_for_by_the_cards_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def handle(name: str) -> str:
        asked.append(name)
        return name

    library = SimpleNamespace(
        nvmlDeviceGetHandleByUUID=handle, nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000
    )
    monkeypatch.setattr(identity, "_management", lambda: library)
    monkeypatch.setattr(identity, "place", lambda device: "8a1c-of-this-card")
    assert identity._power_limit_mw(GPU) == "700000"
    assert asked == ["GPU-8a1c-of-this-card"]


@pytest.mark.parametrize(
    "failure", [ModuleNotFoundError("pynvml"), RuntimeError("no right to ask")]
)
def test_without_an_answer_the_power_limit_is_unknown(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail() -> Any:
        raise failure

    monkeypatch.setattr(identity, "_management", fail)
    monkeypatch.setattr(identity, "place", str)
    assert identity._power_limit_mw(GPU) == "unknown"
