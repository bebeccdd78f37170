"""Rows of the benchmark of estimates, from given numbers and from the recorded measurements."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def _part(name: str) -> Any:
    return importlib.import_module(f"benchmarks.estimate.{name}")


@pytest.mark.usefixtures("_benchmarks")
def test_rows_count_close_cases_and_name_the_worst() -> None:
    estimates = [
        _part("cases").Estimate("a", 100.0, 104.0, {"peer": 50.0}),
        _part("cases").Estimate("b", 200.0, 180.0, {"peer": 202.0}),
    ]
    close, worst, *each = _part("rows").rows(estimates)
    assert (close["value"], close["target"], close["met"], close["peers"]) == (
        1,
        2,
        False,
        {"peer": 1},
    )
    assert (worst["value"], worst["met"], worst["peers"]) == (-10.0, True, {"peer": -50.0})
    assert [row["value"] for row in each] == [4.0, -10.0]


@pytest.mark.usefixtures("_benchmarks")
def test_every_case_of_the_profiler_was_measured_on_one_gpu() -> None:
    cases, profiler = _part("cases"), importlib.import_module("benchmarks.profiler.cases")
    known = {row["case"] for row in cases._recorded()}
    labels = {
        f"{cases._label(case)}, 1 devices for want of {case.wanted}"
        for model in profiler.FULL
        for case in profiler.of(model)
    }
    assert len(labels) == 24
    assert labels <= known


@pytest.mark.usefixtures("_benchmarks")
def test_the_head_of_the_large_model_makes_the_last_stage_shorter() -> None:
    # a head is 0.8 of a block, so a last stage of 7 blocks takes 7.8, and one of 8 takes too long
    assert _part("large")._fastest(4) == [
        (7, 8, 8, 7),
        (8, 7, 8, 7),
        (8, 8, 7, 7),
        (8, 8, 8, 6),
    ]
