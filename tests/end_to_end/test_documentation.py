"""Every Python block and every command of README and the documentation runs, unless a comment above
it says why not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from documentation import ROOT, Block, blocks

import placer
from placer.zoo import unet

SERVICE = "http://127.0.0.1:8080"
"""The address of the service in the documentation."""
SERVE = "placer serve"
"""The command that starts it; it runs until it is stopped."""

CHECKED = ("placer doctor", "placer_client", "curl ")
"""Each is in one block, whose output a test of its own checks; the other blocks only have to
succeed."""

RUN = [block for block in blocks() if not block.not_run]
PROGRAMS = [block for block in RUN if block.kind == "python"]
SESSIONS = [block for block in RUN if block.kind == "sh"]


def place(block: Block) -> str:
    return block.place


def checked(word: str) -> Block:
    (block,) = [block for block in RUN if word in block.text]
    return block


def unchecked(found: list[Block]) -> list[Block]:
    return [block for block in found if not any(word in block.text for word in CHECKED)]


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def profile() -> str:
    """A profile as JSON, for the blocks that read one which an earlier block has written."""
    return placer.profile(
        unet(width=4), torch.randn(2, 3, 32, 32), ["cpu:0", "cpu:1"], progress=False
    ).to_json()


@pytest.fixture
def folder(tmp_path: Path, python: str, profile: str) -> Path:
    """A folder with the command ``placer``, the examples and a profile."""
    (tmp_path / "placer").write_text(f'#!/bin/sh\nexec "{python}" -P -m placer "$@"\n')
    (tmp_path / "placer").chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "profile.json").write_text(profile)
    return tmp_path


def commands(block: Block) -> list[str]:
    lines = (line.partition(" #")[0].strip() for line in block.text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("block", unchecked(PROGRAMS), ids=place)
def test_a_program_of_the_documentation_runs(
    block: Block, folder: Path, python: str, request: pytest.FixtureRequest
) -> None:
    text = block.text
    if SERVICE in text:
        text = text.replace(SERVICE, request.getfixturevalue("server"))
    run([python, "-P", "-c", text], folder)


@pytest.mark.parametrize("block", unchecked(SESSIONS), ids=place)
def test_the_commands_of_a_block_run(
    block: Block, folder: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("server") if SERVICE in block.text else SERVICE
    for command in commands(block):
        if command == SERVE:
            assert server != SERVICE, "a block that starts the service should use it"
            continue
        run(["bash", "-c", f"set -o pipefail; {command.replace(SERVICE, server)}"], folder)


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.kind == "python" and block.not_run], ids=place
)
def test_a_program_that_is_not_run_is_valid_python(block: Block) -> None:
    compile(block.text, block.place, "exec")


def test_the_commands_of_the_quickstart_show_what_they_promise(folder: Path) -> None:
    given = commands(checked("placer doctor"))
    assert len(given) == 8
    outputs = {
        command: run(["bash", "-c", f"set -o pipefail; {command}"], folder) for command in given
    }
    (shown,) = [out for command, out in outputs.items() if "placer show -" in command]
    assert "Placement of UNet: training step, micro-batch of 2" in shown
    (compared,) = [out for command, out in outputs.items() if command.startswith("placer compare")]
    assert "outc" in compared
    assert "Time by layer" in (folder / "report.html").read_text()


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
    command = [
        sys.executable,
        "-P",
        "-m",
        "placer",
        "serve",
        "--port",
        str(port),
        "--database",
        ":memory:",
    ]
    service = subprocess.Popen(command)
    try:
        while not _answers(port):
            assert service.poll() is None, "the service did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        service.terminate()
        service.wait(30)


def test_the_program_of_the_client_prints_progress_a_value_and_the_history(
    server: str, folder: Path, python: str
) -> None:
    program = checked("placer_client").text.replace(SERVICE, server)
    *events, value, ids = run([python, "-P", "-c", program], folder).splitlines()
    assert "status='optimal'" in events[-1]
    assert float(value) > 0
    assert len(json.loads(ids.replace("'", '"'))) == 3


def test_the_request_of_curl_is_answered_with_a_placement(server: str, folder: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    (command,) = commands(checked("curl "))
    answer = json.loads(run(["bash", "-c", command.replace(SERVICE, server)], folder))
    assert answer["status"] == "optimal"
    assert answer["layer_devices"]
