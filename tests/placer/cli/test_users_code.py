"""What a user's code prints goes to stderr, and what it ends with is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Run

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


@pytest.fixture(autouse=True)
def chatty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start in a folder with the module above, which each test imports for itself."""
    (tmp_path / "chatty.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("chatty", None)


def test_what_a_model_prints_is_not_among_the_json(run: Run) -> None:
    asked = ("suggest", "chatty:Chatty", "--input", "2x4", "--devices", "cpu:0,cpu:1", "--json")
    answer = run(*asked)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["status"] == "optimal"
    assert "imported" in answer.err and "forward" in answer.err


def test_a_model_that_ends_the_program_is_an_error_that_says_so(run: Run) -> None:
    answer = run("profile", "chatty:leaves", "--input", "2x4")
    assert answer.code == 2
    assert "chatty:leaves() failed: SystemExit: 7" in answer.err
