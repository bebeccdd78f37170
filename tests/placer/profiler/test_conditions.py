from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from placer.profiler import conditions as module
from placer.profiler.conditions import conditions, optimizer_facts

CPU = torch.device("cpu", 0)


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_nothing_changes_by_itself() -> None:
    assert conditions(CPU) == conditions(CPU)


@pytest.mark.parametrize(
    "name", ["CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF"]
)
def test_variables_that_libraries_read_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = conditions(CPU)
    monkeypatch.setenv(name, "1")
    assert changed(before, conditions(CPU)) == {"environment"}


def test_precision_and_autocast_count() -> None:
    before = conditions(CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert changed(before, conditions(CPU)) == {"settings"}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert changed(before, conditions(CPU)) == {"settings"}
    finally:
        torch.set_float32_matmul_precision(precision)


def test_better_measuring_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = conditions(CPU)
    monkeypatch.setattr(module, "_code", lambda *packages: "new sources")
    assert changed(before, conditions(CPU)) == {"measured_by"}


def test_the_code_that_counts_includes_subpackages() -> None:
    for package in ("capture", "profiler", "devices"):
        folders = {path.parent.name for path in module.source_files(package)}
        assert package in folders and len(folders) > 1


def test_a_switch_that_torch_does_not_tell_stops_nothing() -> None:
    def refuse() -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    assert module._setting(refuse) == "unknown"


def parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


def test_numbers_of_an_optimizer_count_only_as_zero_or_not() -> None:
    def sgd(**options: Any) -> Any:
        return optimizer_facts(torch.optim.SGD(parameter(), **options))

    assert sgd(lr=0.1) == sgd(lr=0.2)
    assert sgd(lr=0.1) != sgd(lr=0.1, momentum=0.9)
    assert sgd(lr=0.1, foreach=True) != sgd(lr=0.1, foreach=False)


def test_names_classes_and_partials_of_torch_are_known() -> None:
    assert optimizer_facts(None) != optimizer_facts("adam") != optimizer_facts("sgd")
    assert optimizer_facts("Adam") == optimizer_facts("adam")
    assert optimizer_facts(torch.optim.Adam) is not None
    assert optimizer_facts(partial(torch.optim.Adam, lr=0.1)) == optimizer_facts(
        partial(torch.optim.Adam, lr=0.2)
    )
    assert optimizer_facts(partial(torch.optim.Adam, amsgrad=True)) != optimizer_facts(
        partial(torch.optim.Adam)
    )


class Own(torch.optim.SGD):
    """An optimizer of a user's."""


def test_a_users_own_class_is_known_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = optimizer_facts(Own)
    assert before is not None
    monkeypatch.setattr(module.inspect, "getsource", lambda kind: "edited")
    assert optimizer_facts(Own) != before


def test_a_function_that_may_use_anything_is_not_known() -> None:
    assert optimizer_facts(lambda parameters: torch.optim.SGD(parameters, lr=0.1)) is None
    assert optimizer_facts(type("Typed", (torch.optim.SGD,), {"__module__": "nowhere"})) is None
