"""The profiler's benchmark on real GPUs, at tiny sizes: that every part of every model's cases
gives a value there."""

import importlib
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def part(monkeypatch):
    """A module of the benchmark by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return lambda name: importlib.import_module(f"benchmarks.profiler.{name}")


@pytest.mark.parametrize("way", range(4))
@pytest.mark.parametrize("name", ["resnet101", "gpt", "unet", "inception", "llama", "t5"])
def test_every_part_of_a_case_has_a_value(part, name, way, tmp_path):
    cases, ours, rows = part("cases"), part("ours"), part("rows")
    model = next(model for model in cases.SMALL if model.name == name)
    case = cases.of(model)[way]
    samples = list(ours._case(case, tmp_path))
    assert not {
        sample.engine: sample.failed
        for sample in samples
        if sample.failed and "not installed" != sample.failed
    }
    values = {sample.engine: sample.values for sample in samples if not sample.failed}
    assert all(values[name] for name in ("profile", "stages", "memory", "step", "peers"))
    stages = len(values["stages"]["measured_ms"])
    assert 1 <= stages == len(values["memory"]["measured_bytes"])
    assert all(
        number > 0
        for number in (*values["stages"]["predicted_ms"], *values["memory"]["predicted_bytes"])
    )
    assert values["step"]["predicted_state_bytes"] == pytest.approx(
        values["step"]["state_bytes"], rel=0.01
    )
    measures = {row["measure"] for row in rows._case(case, samples)}
    assert {
        rows.STAGE,
        rows.PASS,
        rows.STEP,
        rows.STATE,
        rows.OVER,
        rows.UNDER,
        rows.PEAK,
        rows.RESERVED,
    } <= measures
    assert all(torch.cuda.memory_allocated(place) < 2**30 for place in cases.places())
