"""What a user's code prints goes to stderr, and what it ends with is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MODULE = """
import sys
from torch import nn

print("imported")

class Chatty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        print("forward")
        return self.layer(x)

def leaves():
    sys.exit(7)
"""


def _placer(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "chatty.py").write_text(MODULE)
    command = [sys.executable, "-m", "placer", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_what_a_model_prints_is_not_among_the_json(tmp_path: Path) -> None:
    asked = ("suggest", "chatty:Chatty", "--input", "2x4", "--devices", "cpu:0,cpu:1", "--json")
    answer = _placer(tmp_path, *asked)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["status"] == "optimal"
    assert "imported" in answer.stderr and "forward" in answer.stderr


def test_a_model_that_ends_the_program_is_an_error_that_says_so(tmp_path: Path) -> None:
    answer = _placer(tmp_path, "profile", "chatty:leaves", "--input", "2x4")
    assert answer.returncode == 2
    assert "chatty:leaves() failed: SystemExit: 7" in answer.stderr
