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
    monkeypatch.setenv("PLACER_GENERATION_ENGINES", "ours,hooks,eager")
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


@pytest.mark.integration
def test_weights_on_the_host_give_the_tokens_of_weights_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PLACER_GENERATION_ENGINES", "host")
    module = importlib.import_module("benchmarks.generation")
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module.record, "known", lambda name: [])
    first, same = module.run()
    assert "3 of 7 layers on the host" in first["case"]
    assert first["value"] > 0 and list(first["peers"]) == [same["measure"].partition(": ")[2]]
    assert same["value"] == 100.0


@pytest.mark.integration
def test_several_groups_in_flight_have_the_tokens_of_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PLACER_GENERATION_ENGINES", "in_flight")
    module = importlib.import_module("benchmarks.generation")
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module.record, "known", lambda name: [])
    values = {row["measure"]: row["value"] for row in module.run()}
    assert values.pop("tokens in flight that equal the tokens of one group at a time") == 100.0
    assert set(values) == {
        "tokens per second, several groups in flight",
        "several groups in flight, in tokens per second of one group at a time",
    }
    assert min(values.values()) > 0
