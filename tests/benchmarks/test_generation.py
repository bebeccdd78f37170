"""The benchmark of generating runs on stand-ins, where both make the same tokens."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from model_list import transformers


@pytest.mark.integration
def test_it_runs_on_stand_ins_and_makes_the_tokens_of_the_unsplit_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    rows = importlib.import_module("benchmarks.generation").run()
    values = {row["measure"]: row["value"] for row in rows}
    assert values.pop("tokens that are those of: eager on one device") == 100.0
    measures = (
        "a token of each text, in the loop",
        "the prompt and the first token",
        "a first call, four tokens",
    )
    expected = {
        name for measure in measures for name in (measure, f"{measure}, eager on one device")
    }
    assert set(values) == expected and min(values.values()) > 0
