"""The benchmark of generating runs on stand-ins, where both make the same tokens."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from model_list import transformers


def test_it_runs_on_stand_ins_and_makes_the_tokens_of_the_unsplit_model(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    rows = importlib.import_module("benchmarks.generation").run()
    values = {row["measure"]: row["value"] for row in rows}
    assert values.pop("tokens that are those of: eager on one device") == 100.0
    assert len(values) == 3 and min(values.values()) > 0
