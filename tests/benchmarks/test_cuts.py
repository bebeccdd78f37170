"""The benchmark of memory wherever a model is cut runs on stand-ins, which have none of their own to count."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_it_runs_on_stand_ins_with_a_row_for_each_model_and_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    cuts = importlib.import_module("benchmarks.cuts")
    monkeypatch.setattr(cuts, "MODELS", ("gpt",))
    monkeypatch.setattr(cuts, "CUTS", 2)
    rows = cuts.run()
    assert [row["case"].split(", ")[-2:] for row in rows] == [
        [schedule, "2 cuts of 21 layers"] for schedule in cuts.SCHEDULES
    ]
    assert all(row["value"] is None and row["target"] is None for row in rows)
