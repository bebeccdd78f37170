from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("placer ")]


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_the_readmes_programs_run(program: str, tmp_path: Path) -> None:
    run([sys.executable, "-P", "-c", program], tmp_path)


def test_the_readmes_commands_run(tmp_path: Path) -> None:
    (tmp_path / "placer").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m placer "$@"\n')
    (tmp_path / "placer").chmod(0o755)
    assert len(COMMANDS) == 7
    told = {}
    for command in COMMANDS:
        if command.startswith("placer compare yesterday.json"):
            (tmp_path / "yesterday.json").write_text((tmp_path / "profile.json").read_text())
        if command != "placer serve":
            told[command] = run(["bash", "-c", f"set -o pipefail; export PATH={tmp_path}:$PATH; {command}"], tmp_path)
    (placed,) = [out for command, out in told.items() if command.startswith("placer solve")]
    assert "Placement of UNet: training step, micro-batch of 2" in placed
    assert "Time by layer" in (tmp_path / "report.html").read_text()


def test_the_readme_says_what_is_public() -> None:
    import placer

    for name in set(placer.__all__) - {"Cluster", "Placement", "Profile", "PlacerError", "capture"}:
        assert f"placer.{name}" in README or f"{name}(" in README, name
