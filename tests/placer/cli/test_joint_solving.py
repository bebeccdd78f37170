"""``placer solve-together``: profiles in files to placements of several models."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from commands import MIB, Run, chain
from rich.console import Console

from placer.report.joint import joint_table
from placer.schema.joint import JointPlacement


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Two models of two layers of 1 MiB each."""
    found = {}
    for name, times_ms in (("text", [1.0, 1.0]), ("unet", [2.0, 2.0])):
        path = tmp_path / f"{name}.json"
        path.write_text(chain(times_ms).to_json())
        found[name] = str(path)
    return found


def test_models_are_placed_under_one_memory_limit(run: Run, files: dict[str, str]) -> None:
    words = (f"text={files['text']}", f"unet={files['unet']}:50", "--memory", "2.5MiB")
    answer = run("solve-together", *words)
    assert answer.code == 0, answer.err
    found = JointPlacement.model_validate_json(answer.out)
    assert found.runs == {"text": 1, "unet": 50}
    assert found.request_ms == pytest.approx(2 + 50 * 4)
    assert [load.memory.param_bytes for load in found.devices] == [2 * MIB, 2 * MIB]


def test_constraints_name_layers_with_their_model(run: Run, files: dict[str, str]) -> None:
    answer = run("solve-together", f"unet={files['unet']}", "--pin", "unet/l1=1")
    found = JointPlacement.model_validate_json(answer.out)
    assert found.placements["unet"].layer_devices["l1"] == "cuda:1"


def test_too_little_memory_ends_with_code_3(run: Run, files: dict[str, str]) -> None:
    answer = run("solve-together", f"unet={files['unet']}", "--memory", "0.5MiB")
    assert answer.code == 3 and answer.err


def test_a_file_of_placements_is_shown(run: Run, files: dict[str, str], tmp_path: Path) -> None:
    output = str(tmp_path / "joint.json")
    words = (f"text={files['text']}", f"unet={files['unet']}:50")
    assert run("solve-together", *words, "-o", output).code == 0
    shown = run("show", output).out
    assert "time of a request 202 ms" in shown and "text, unet" in shown
    assert "micro-batch" not in shown
    refused = run("show", output, "--svg", str(tmp_path / "picture.svg"))
    assert refused.code == 2 and "holds placements of several models" in refused.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["unet"], "'unet' is not NAME=FILE[:RUNS]; write unet=unet.json:50"),
        (["=a.json"], "'=a.json' is not NAME=FILE[:RUNS]"),
        (["unet=UNET", "unet=UNET"], "'unet' is given twice"),
        (["unet=UNET:0"], "runs"),
        (["unet=missing.json:3"], "cannot read missing.json"),
    ],
)
def test_words_that_name_no_models_are_refused(
    run: Run, files: dict[str, str], words: list[str], message: str
) -> None:
    answer = run("solve-together", *(word.replace("UNET", files["unet"]) for word in words))
    assert answer.code == 2
    assert message in answer.err


def test_the_table_of_no_placements_says_why(run: Run, files: dict[str, str]) -> None:
    answer = run("solve-together", f"unet={files['unet']}", "--memory", "0.5MiB")
    found: Any = JointPlacement.model_validate_json(answer.out)
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(joint_table(found))
    assert "no placement is possible" in captured.get()
