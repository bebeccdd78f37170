"""``placer measure`` runs a placement and prints, or writes, what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Run
from rich.text import Text

from placer.schema import Layer, Placement, Profile

TOY = ("measure", "placer.zoo.toy:ToyModel")
PLACES = {"net1": "cpu:0", "relu": "cpu:0", "net2": "cpu:1"}


@pytest.fixture
def placed(tmp_path: Path) -> Callable[[bool], Path]:
    def placed(training: bool) -> Path:
        placement = Placement(
            status="feasible",
            objective="throughput",
            training=training,
            layer_devices=PLACES,
            chunks=4,
        )
        path = tmp_path / "placement.json"
        path.write_text(placement.to_json())
        return path

    return placed


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_placement_is_measured_beside_what_its_profile_predicts(
    run: Run, placed: Callable[[bool], Path], tmp_path: Path, training: bool
) -> None:
    layers = tuple(
        Layer(name=name, forward_ms={"cpu": 1.0}, backward_ms={"cpu": 2.0}) for name in PLACES
    )
    devices = tuple(
        {"name": f"cpu:{index}", "type": "cpu", "memory_bytes": 1} for index in range(2)
    )
    profile = Profile(layers=layers, cluster={"devices": devices}, batch_size=2)  # type: ignore[arg-type]
    (tmp_path / "profile.json").write_text(profile.to_json())
    trace = tmp_path / "trace.json"
    options = ("--input", "8x10", "--profile", tmp_path / "profile.json", "--trace", trace)
    answer = run(*TOY, placed(training), *options)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert [device["device"] for device in found["devices"]] == ["cpu:0", "cpu:1"]
    share_ms = 12.0 if training else 4.0  # of each layer: four micro-batches
    assert [device["predicted_busy_ms"] for device in found["devices"]] == [2 * share_ms, share_ms]
    passes = [row for row in found["measured"] if row["kind"] in ("forward", "backward", "weights")]
    assert len(passes) == 4 * 2 * (2 if training else 1)
    assert json.loads(trace.read_text())["traceEvents"]


def test_people_get_a_table_and_a_file_gets_json(
    run: Run, placed: Callable[[bool], Path], tmp_path: Path
) -> None:
    output = tmp_path / "measured.json"
    answer = run(
        *TOY, placed(False), "--input", "8x10", "--chunks", "2", "-o", output, terminal=True
    )
    assert answer.code == 0, answer.err
    # the title is as wide as the table, whose width depends on the measured times
    words = " ".join(Text.from_ansi(answer.out).plain.split())
    assert "Inference of ToyModel: a stream of 2 micro-batches" in words
    assert json.loads(output.read_text())["predicted_ms"] is None


def test_what_is_no_placement_is_refused_with_exit_code_2(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(Profile(layers=(Layer(name="net1", forward_ms={"cpu": 1.0}),)).to_json())
    answer = run(*TOY, path, "--input", "8x10")
    assert answer.code == 2
    assert "holds a profile; a placement is needed" in answer.err


@pytest.mark.parametrize("command", ["measure", "refine"])
def test_a_placement_of_another_model_is_refused(run: Run, tmp_path: Path, command: str) -> None:
    """Every ``nn.Sequential`` has a layer ``0``, so the names do not tell models apart."""
    placement = Placement(
        status="feasible",
        objective="throughput",
        model="Sequential",
        layer_devices={"0": "cpu:0", "1": "cpu:1"},
    )
    (tmp_path / "other.json").write_text(placement.to_json())
    answer = run(command, "placer.zoo.seqnet:SeqNet", tmp_path / "other.json", "--input", "2x1x8x8")
    assert answer.code == 2
    assert "the placement is of a model Sequential, and MODEL makes a SeqNet; give" in answer.err


def test_inputs_that_are_missing_are_exit_code_2(run: Run, placed: Callable[[bool], Path]) -> None:
    answer = run(*TOY, placed(False))
    assert answer.code == 2
    assert "give the inputs of a whole batch" in answer.err


def test_more_micro_batches_than_samples_are_refused(
    run: Run, placed: Callable[[bool], Path]
) -> None:
    # as many as there were samples were measured.
    answer = run(*TOY, placed(False), "--input", "4x10", "--chunks", "8")
    assert answer.code == 2
    assert "chunks=8 is more than the samples of the inputs, 4" in answer.err


def test_a_trace_that_cannot_be_written_is_exit_code_2_and_what_was_measured_is_still_printed(
    run: Run, placed: Callable[[bool], Path], tmp_path: Path
) -> None:
    trace = tmp_path / ("x" * 300)
    answer = run(*TOY, placed(False), "--input", "4x10", "--trace", trace)
    assert answer.code == 2
    assert f"cannot write {trace}: File name too long" in answer.err
    assert len(json.loads(answer.out)["devices"]) == 2


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_it_is_measured_compiled_where_that_is_asked_for(
    run: Run, placed: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    monkeypatch.setattr("placer.executor.engine.compiled_segments.INDUCTOR", "aot_eager")
    for module in ("training.stages.compiled_stages", "inference.compiled_streams"):
        monkeypatch.setattr(f"placer.executor.{module}.gains", lambda after_ms, before_ms: True)
    answer = run(*TOY, placed(training), "--input", "8x10", "--compile")
    assert answer.code == 0, answer.err
    notes = json.loads(answer.out)["notes"]
    assert sum("is compiled: " in note for note in notes) == 2
