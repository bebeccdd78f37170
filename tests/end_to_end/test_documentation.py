"""Every Python block and every command of README and the documentation runs.

A comment above a block may say why it does not. Blocks of one page run one after another. A block
of kind ``text`` is compared with what the blocks before it print.
"""

from __future__ import annotations

import importlib.util
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
from documentation import ROOT, Block, blocks, missing_outputs, program

import placer
from placer.zoo import unet

SERVICE = "http://127.0.0.1:8080"
"""The address of the service in the documentation."""
SERVE = "placer serve"
"""The command that starts it; it runs until it is stopped."""

CHECKED = ("placer compare", "place_many", "curl ")
"""Each is in one block, whose output a test of its own checks."""

ON_GPUS = (
    "docs/start/gpus.md",
    "docs/guides/faster.md",
    "docs/guides/inference.md",
    "docs/guides/replicas.md",
)
"""Pages whose programs use the GPUs that there are; other pages name CPU stand-ins."""

NOTEBOOK = ROOT / "docs" / "start" / "quickstart.ipynb"

RUN = [block for block in blocks() if not block.not_run]
UNCHECKED = [block for block in RUN if not any(word in block.text for word in CHECKED)]
SHOWN_FILES = [block for block in RUN if block.title]
NEEDY = [block for block in UNCHECKED if block.needs]


def by_page(kind: str) -> dict[str, list[Block]]:
    """Return the blocks of a kind that run without a check of their own, by page."""
    found: dict[str, list[Block]] = {}
    for block in UNCHECKED:
        if block.kind == kind and not block.title and not block.needs:
            found.setdefault(block.page, []).append(block)
    return found


PROGRAMS = by_page("python")
SESSIONS = by_page("sh")
OUTPUTS = by_page("text")
AS_ON_GPUS = [page for page, shown in PROGRAMS.items() if "on GPUs [" in program(shown)]
"""Pages whose programs name CPU stand-ins, and say which names GPUs have."""


def place(block: Block) -> str:
    return block.place


def checked(word: str) -> Block:
    (block,) = [block for block in RUN if word in block.text]
    return block


def run(command: list[str], folder: Path, stdin: str = "") -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
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
    """A folder with the commands of an activated environment, the examples and a profile."""
    for name, module in (
        ("placer", "-m placer"),
        ("torchrun", "-m torch.distributed.run"),
        ("python", ""),
    ):
        # torchrun starts its processes with PYTHON_EXEC.
        script = f'#!/bin/sh\nPYTHON_EXEC="{python}" exec "{python}" -P {module} "$@"\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "profile.json").write_text(profile)
    return tmp_path


def commands(block: Block) -> list[str]:
    lines = (line.partition(" #")[0].strip() for line in block.text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run_program(text: str, folder: Path, python: str, request: pytest.FixtureRequest) -> str:
    if SERVICE in text:
        text = text.replace(SERVICE, request.getfixturevalue("server"))
    return run([python, "-P", "-c", text], folder)


def check_outputs(page: str, kind: str, printed: str) -> None:
    """Compare what blocks of a kind print with the outputs that the page shows after them."""
    shown = [block for block in OUTPUTS.get(page, []) if block.after == kind]
    assert missing_outputs(shown, printed) == [], printed


@pytest.mark.integration
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_python_blocks_of_a_page_run_one_after_another(
    page: str, folder: Path, python: str, request: pytest.FixtureRequest
) -> None:
    check_outputs(page, "python", run_program(program(PROGRAMS[page]), folder, python, request))


@pytest.mark.integration
@pytest.mark.parametrize("page", AS_ON_GPUS)
def test_the_python_blocks_of_a_page_bring_tensors_together_as_gpus_demand(
    page: str, folder: Path, python: str
) -> None:
    """The loop by hand of a guide left its labels on the host, which fails on GPUs alone."""
    with_checks = "\n".join(
        (
            "import sys",
            "from placer.testing import logical_devices",
            "with logical_devices(2):",
            "    exec(compile(sys.stdin.read(), 'page', 'exec'))",
        )
    )
    run([python, "-P", "-c", with_checks], folder, stdin=program(PROGRAMS[page]))


@pytest.mark.gpu
@pytest.mark.parametrize("page", ON_GPUS)
def test_the_python_blocks_of_a_page_run_on_gpus(
    page: str, folder: Path, python: str, request: pytest.FixtureRequest
) -> None:
    text = program(PROGRAMS[page])
    # the others name two
    if "device_count" not in text and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_program(text, folder, python, request)


@pytest.mark.integration
@pytest.mark.parametrize("block", NEEDY, ids=place)
def test_a_block_that_needs_another_package_runs_where_it_is_installed(
    block: Block, folder: Path, python: str, request: pytest.FixtureRequest
) -> None:
    if importlib.util.find_spec(block.needs) is None:
        pytest.skip(f"needs {block.needs}")
    run_program(program([block]), folder, python, request)


@pytest.mark.integration
@pytest.mark.parametrize("page", SESSIONS)
def test_the_commands_of_a_page_run_one_after_another(
    page: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    for block in SHOWN_FILES:
        if block.page == page:
            (folder / block.title).write_text(block.text)
    given = [command for block in SESSIONS[page] for command in commands(block)]
    server = (
        request.getfixturevalue("server")
        if any(SERVICE in command for command in given)
        else SERVICE
    )
    printed = ""
    for command in given:
        if command == SERVE:
            assert server != SERVICE, "a page that starts the service should use it"
            continue
        printed += run(
            ["bash", "-c", f"set -o pipefail; {command.replace(SERVICE, server)}"], folder
        )
    check_outputs(page, "sh", printed)


@pytest.mark.integration
@pytest.mark.parametrize("block", SHOWN_FILES, ids=place)
def test_a_command_runs_each_file_that_a_page_shows(block: Block) -> None:
    given = [command for session in SESSIONS.get(block.page, []) for command in commands(session)]
    assert any(block.title.removesuffix(".py") in command for command in given)


@pytest.mark.integration
def test_the_notebook_runs_from_top_to_bottom(folder: Path, python: str) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    # A notebook runs all cells in one namespace; a failed cell is named by its number.
    runner = """
import sys
names = {"__name__": "__main__"}
for number, cell in enumerate(eval(sys.stdin.read())):
    exec(compile(cell, f"cell {number}", "exec"), names)
"""
    run([python, "-P", "-c", runner], folder, stdin=repr(code))


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.kind == "python" and block.not_run], ids=place
)
def test_a_program_that_is_not_run_is_valid_python(block: Block) -> None:
    compile(block.text, block.place, "exec")


@pytest.mark.integration
def test_the_commands_of_the_quickstart_show_what_they_promise(folder: Path) -> None:
    given = commands(checked("placer compare"))
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


@pytest.mark.integration
def test_the_program_of_the_client_prints_progress_a_value_and_the_history(
    server: str, folder: Path, python: str
) -> None:
    program = checked("place_many").text.replace(SERVICE, server)
    *events, value, ids = run([python, "-P", "-c", program], folder).splitlines()
    assert "status='optimal'" in events[-1]
    assert float(value) > 0
    assert len(json.loads(ids.replace("'", '"'))) == 3


@pytest.mark.integration
def test_the_request_of_curl_is_answered_with_a_placement(server: str, folder: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    (command,) = commands(checked("curl "))
    answer = json.loads(run(["bash", "-c", command.replace(SERVICE, server)], folder))
    assert answer["status"] == "optimal"
    assert answer["layer_devices"]
