from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from placer import cli, demo


def run_demo(folder: Path, *options: str, **environment: str) -> str:
    command = [sys.executable, "-P", "-m", "placer", "demo", *options]
    everything = os.environ | environment
    result = subprocess.run(
        command, cwd=folder, env=everything, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("Placement of") == 2
    assert (
        len(re.findall(r"largest difference of (?:outputs|gradients) .*: agree", result.stdout))
        == 4
    )
    assert "every split model agrees" in result.stdout
    return result.stdout


@pytest.mark.integration
def test_the_demo_splits_both_models_on_stand_ins_and_agrees(tmp_path: Path) -> None:
    text = run_demo(tmp_path, "--quick", CUDA_VISIBLE_DEVICES="")
    # Half of what one device needs is not enough, so the model was split.
    assert text.count("does not fit on one device") == 2


@pytest.mark.gpu
def test_the_demo_agrees_on_gpus(tmp_path: Path) -> None:
    assert "cuda:0" in run_demo(tmp_path)


def test_a_model_that_disagrees_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda quick: False)
    with pytest.raises(SystemExit) as left:
        cli.main(["demo"])
    assert left.value.code == 1


def step(output: float, gradient: float) -> demo.Step:
    return demo.Step(torch.tensor([output]), {"weight": torch.tensor([gradient])})


@pytest.mark.parametrize(
    ("split", "agrees"),
    [
        (step(1.0, 2.0), True),
        (step(1.00001, 2.0), True),
        (step(1.01, 2.0), False),
        (step(1.0, 2.1), False),
        (step(float("nan"), 2.0), False),
        (demo.Step(torch.tensor([1.0]), {}), False),
    ],
)
def test_the_demo_fails_when_outputs_or_gradients_differ(split: demo.Step, agrees: bool) -> None:
    assert demo._compare(step(1.0, 2.0), split, Console(quiet=True)) is agrees
