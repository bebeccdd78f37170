"""The benchmark of memory wherever a model is cut runs on stand-ins, which have none of their own
to count."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.integration
def test_it_runs_on_stand_ins_with_a_row_for_each_schedule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    cuts = importlib.import_module("benchmarks.cuts")
    monkeypatch.setattr(cuts, "CUTS", 2)
    *_, rows = cuts.progress(tmp_path)
    assert [row["case"].split(", ")[-3:] for row in rows] == [
        [schedule, "2 cuts of 21 layers", "2 devices"] for schedule in cuts.SCHEDULES
    ]
    assert all(row["value"] is None and row["target"] is None for row in rows)
