from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import placer
from placer.zoo import unet

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("placer ")]


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_the_readmes_programs_run(program: str, tmp_path: Path, python: str) -> None:
    run([python, "-P", "-c", program], tmp_path)


def test_the_readmes_commands_run(tmp_path: Path, python: str) -> None:
    (tmp_path / "placer").write_text(f'#!/bin/sh\nexec "{python}" -P -m placer "$@"\n')
    (tmp_path / "placer").chmod(0o755)
    assert len(COMMANDS) == 9
    told = {}
    for command in COMMANDS:
        if command != "placer serve":
            told[command] = run(["bash", "-c", f"set -o pipefail; export PATH={tmp_path}:$PATH; {command}"], tmp_path)
    (shown,) = [out for command, out in told.items() if "placer show -" in command]
    assert "Placement of UNet: training step, micro-batch of 2" in shown
    (compared,) = [out for command, out in told.items() if command.startswith("placer compare")]
    assert "outc" in compared
    assert "Time by layer" in (tmp_path / "report.html").read_text()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "placer", "serve", "--port", str(port), "--database", ":memory:"]
    service = subprocess.Popen(command)
    try:
        while not _answers(port):
            assert service.poll() is None, "the service did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        service.terminate()
        service.wait(30)


def test_the_readmes_client_runs(server: str, tmp_path: Path, python: str) -> None:
    (indented,) = re.findall(r"^    from placer\.schema import .*?(?=^\S)", README, re.DOTALL | re.MULTILINE)
    program = textwrap.dedent(indented).replace("http://127.0.0.1:8080", server)
    profile = placer.profile(unet(width=4), torch.randn(2, 3, 32, 32), ["cpu:0", "cpu:1"], progress=False)
    (tmp_path / "profile.json").write_text(profile.to_json())
    *told, value, ids = run([python, "-P", "-c", program], tmp_path).splitlines()
    assert "status='optimal'" in told[-1]
    assert float(value) > 0
    assert len(json.loads(ids.replace("'", '"'))) == 3


def test_the_readme_says_what_is_public() -> None:
    for name in set(placer.__all__) - {"Cluster", "Placement", "Profile", "PlacerError", "capture"}:
        assert f"placer.{name}" in README or f"{name}(" in README, name
