from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from placer import demo

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shows CPU stand-ins")


def test_the_demo_splits_both_models_and_agrees(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "placer", "demo", "--quick"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("Placement of") == 2
    # Half of what one device needs is not enough, so the model was split.
    assert result.stdout.count("does not fit on one device") == 2
    assert len(re.findall(r"largest difference of (?:outputs|gradients) .*: agree", result.stdout)) == 4
    assert "every split model agrees" in result.stdout


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
