"""The benchmark of generating runs on stand-ins, where both make the same tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_list import transformers

import placer
from placer.schema import base


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """A function that runs cases once each, on quick measurements, and returns rows by measure."""
    transformers()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))

    def run(asked: str) -> dict[str, Any]:
        monkeypatch.setenv("PLACER_GENERATION_ENGINES", asked)
        module = importlib.import_module("benchmarks.generation")
        monkeypatch.setattr(module, "ROUNDS", 1)
        monkeypatch.setattr(placer, "suggest", partial(placer.suggest, repeats=1))
        monkeypatch.setattr(module.record, "known", lambda name: [])
        return {row["measure"]: row for row in module.run()}

    return run


@pytest.mark.integration
def test_it_runs_on_stand_ins_and_makes_the_tokens_of_the_unsplit_model(
    rows_of: Callable[[str], dict[str, Any]],
) -> None:
    rows = rows_of("ours,ours_compiled,hooks,eager,alone")
    values = {name: row["value"] for name, row in rows.items()}
    others = (
        "eager on one device",
        "ours, not recorded",
        "ours, compiled",
        "ours on one device",
    )
    for name in others:
        assert values.pop(f"tokens equal to the tokens of: {name}") == 100.0
    assert values.pop("tokens after the prompt that replayed a recording") > 80
    reads = "a token, in times of reading all weights once"
    assert min(values.pop(reads), values.pop(f"{reads}, ours, compiled")) > 1
    assert values.pop("a token, in times of Placer on one device") > 0
    measures = (
        "a token of each text, in the loop",
        "the prompt and the first token",
        "a prompt of a new length and its first token",
        "a first call, four tokens",
    )
    expected = {
        name
        for measure in measures
        for name in (measure, *(f"{measure}, {other}" for other in others))
    }
    assert set(values) == expected and min(values.values()) > 0


def test_a_wrong_engine_is_named_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PLACER_GENERATION_ENGINES", "ours,hots")
    module = importlib.import_module("benchmarks.generation")
    with pytest.raises(ValueError, match=r"'hots' is neither an engine nor a case; there are "):
        module.run()


@pytest.mark.integration
def test_on_a_single_device_the_whole_model_is_there(
    rows_of: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = importlib.import_module("benchmarks.executor.cases")
    monkeypatch.setattr(cases, "STAND_INS", 1)
    rows = rows_of("ours,eager,alone,predicted")
    assert {row["case"].rpartition(", ")[2] for row in rows.values()} == {"1 device"}
    assert rows["tokens equal to the tokens of: eager on one device"]["value"] == 100.0
    assert rows["a token, predicted"]["figures"]["measured ms"] > 0
    assert not any("ours on one device" in measure for measure in rows)


@pytest.mark.integration
@pytest.mark.parametrize(
    "case, what",
    [
        ("host", "Llama, 3 of 7 layers on the host"),
        ("disk", "Llama, 3 of 7 layers on the disk"),
        ("experts", "mixture, 4 of 7 layers on the host"),
        ("cpu_layers", "Llama, 2 layers computed by the CPU, 1 of 7 layers on the host"),
    ],
)
def test_weights_that_rest_give_the_tokens_of_weights_on_the_device(
    case: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("PLACER_GENERATION_ENGINES", case)
    monkeypatch.setattr(base, "LEAST_EXPERT_BYTES", 1)
    module = importlib.import_module("benchmarks.generation")
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module.record, "known", lambda name: [])
    *times, same = module.run()
    for row in times:
        assert what in row["case"]
        assert row["value"] > 0 and list(row["peers"]) == [same["measure"].partition(": ")[2]]
    assert times and same["value"] == 100.0


@pytest.mark.integration
def test_a_large_model_generates_one_text_and_several_groups_in_flight(
    rows_of: Callable[[str], dict[str, Any]],
) -> None:
    values = {name: row["value"] for name, row in rows_of("large,in_flight").items()}
    assert values.pop("tokens in flight that equal the tokens of one group at a time") == 100.0
    assert set(values) == {
        "a token, in the loop",
        "the prompt and the first token",
        "a token, in times of reading all weights once",
        "tokens per second, several groups in flight",
        "several groups in flight, in tokens per second of one group at a time",
    }
    assert min(values.values()) > 0


@pytest.mark.integration
@pytest.mark.parametrize("has_copies", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_shape_that_placer_picks_has_the_tokens_of_a_copy(
    rows_of: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, has_copies: bool
) -> None:
    """What is faster on stand-ins is chance, so the test decides it."""
    real = placer.suggest

    def suggest(*args: Any, **options: Any) -> placer.Placement:
        found = real(*args, **options)
        rate = (found.generation.tokens_per_s or 0.0) * (2.0 if has_copies else 0.5)
        text = found.generation.model_copy(update={"copies_tokens_per_s": rate})
        return found.model_copy(update={"generation": text})

    monkeypatch.setattr(placer, "suggest", suggest)
    rows = rows_of("copies")
    assert rows["tokens of the shape that equal the tokens of one copy alone"]["value"] == 100.0
    rate = rows["tokens per second of the shape that Placer picks"]
    assert rate["figures"]["shape"].startswith("2 copies" if has_copies else "stages on")
    share = rows["the shape that Placer picks, in tokens per second of one copy alone, times 2"]
    assert share["value"] == pytest.approx(
        rate["value"] / rate["peers"]["one copy alone, times 2"], rel=0.01
    )


@pytest.mark.integration
def test_predictions_come_with_what_is_measured(
    rows_of: Callable[[str], dict[str, Any]],
) -> None:
    rows = rows_of("predicted")
    assert set(rows) == {"a token, predicted", "the prompt and the first token, predicted"}
    for row in rows.values():
        predicted, measured = row["figures"]["predicted ms"], row["figures"]["measured ms"]
        assert row["value"] == pytest.approx(100 * (predicted / measured - 1), abs=0.5, rel=0.01)


@pytest.mark.integration
def test_images_in_a_stream_on_two_devices_are_those_of_one(
    rows_of: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = importlib.import_module("benchmarks.generation.sdxl_unet")
    one_level = replace(unet.TINY, channels=(8,), depths=(1,))  # a capture takes less time
    monkeypatch.setattr(unet, "TINY", one_level)
    values = {measure: row["value"] for measure, row in rows_of("unet").items()}
    for name in ("flow.stream on one device", "eager on one device"):
        assert values.pop(f"largest difference of results, {name}") < 1e-4
    assert set(values) == {
        "images per second, a UNet pass each",
        "images per second, over the faster way on one device",
    }
    assert min(values.values()) > 0


def test_the_unet_has_the_parameters_of_stable_diffusion_xl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    unet = importlib.import_module("benchmarks.generation.sdxl_unet")
    with torch.device("meta"):
        model = unet.SDXLUNet(unet.Sizes())
    # of diffusers' UNet2DConditionModel with the configuration of stable-diffusion-xl-base-1.0
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_567_463_684
