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
    others = ("eager on one device", "ours, not recorded")
    for name in others:
        assert values.pop(f"tokens that are those of: {name}") == 100.0
    assert values.pop("tokens after the prompt that replayed a recording") > 80
    measures = (
        "a token of each text, in the loop",
        "the prompt and the first token",
        "a first call, four tokens",
    )
    expected = {
        name
        for measure in measures
        for name in (measure, *(f"{measure}, {other}" for other in others))
    }
    assert set(values) == expected and min(values.values()) > 0
