from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"(?:step|epoch) \d+: loss (\d+\.\d+)")
DIFFERENCE = re.compile(r"largest difference of \w+: (\S+)")

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*command: str, **environment: str) -> str:
        # One thread: two workers with two threads each would wait for one another on two cores. No
        # GPU: stand-ins are what is tested, and sums on GPUs are not the same from run to run.
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
        everything = os.environ | fixed | environment
        result = subprocess.run(
            command, cwd=tmp_path, env=everything, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    return run


@pytest.fixture
def example(run: Run, python: str) -> Run:
    return lambda name, *options: run(python, "-P", str(EXAMPLES / name), *options)


def losses(text: str) -> list[float]:
    return [float(number) for number in LOSS.findall(text)]


def difference(text: str) -> float:
    (number,) = DIFFERENCE.findall(text)
    return float(number)


def test_every_example_is_run_by_a_test() -> None:
    here = Path(__file__).read_text()
    programs = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert programs and all(f'"{name}"' in here for name in programs)


def test_the_toy_model_learns_and_equals_the_unsplit_one(run: Run) -> None:
    text = run(sys.executable, "-P", str(EXAMPLES / "toy_model.py"))
    assert "{'net1': 0, 'relu': 0, 'net2': 1}" in text
    assert difference(text) < 1e-6
    first, last = losses(text)
    assert last < first


def test_seqnet_learns_the_digits_on_a_suggested_placement(example: Run) -> None:
    text = example("seqnet_digits.py", "--epochs", "4")
    assert "optimal: proven" in text
    assert losses(text)[-1] < losses(text)[0]
    accuracy = float(re.findall(r"not learned from: (\S+)", text)[0])
    assert accuracy > 0.5  # ten classes: guessing gives 0.1


def test_the_resnet50_tutorial_draws_its_two_plots(example: Run, tmp_path: Path) -> None:
    example("resnet50_tutorial.py", "--quick", "--out", str(tmp_path / "plots"))
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [picture.name for picture in pictures] == ["one_or_split.png", "split_size.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_streamed_unet_equals_the_unsplit_one_and_is_measured(
    example: Run, tmp_path: Path
) -> None:
    text = example("unet_stream.py", "--trace", str(tmp_path / "trace.json"))
    assert difference(text) < 1e-5
    assert "measured / predicted" in text and "cpu:3" in text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"].endswith("_name")}
    assert {"measured", "predicted", "cpu:0", "cpu:3"} <= names


@pytest.mark.parametrize("name", ["resnet18_skips.py", "unet_skips.py"])
def test_models_with_skips_learn_and_equal_the_unsplit_ones(example: Run, name: str) -> None:
    text = example(name)
    assert losses(text)[-1] < losses(text)[0]
    assert difference(text) < 1e-5


def test_processes_train_a_tied_gpt_as_one_and_write_a_checkpoint_that_it_reads(
    run: Run, python: str
) -> None:
    torchrun = (python, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    options = ("--schedule", "zero-bubble")
    text = run(*torchrun, str(EXAMPLES / "distributed_training.py"), *options, PYTHON_EXEC=python)
    assert losses(text)[-1] < losses(text)[0]
    assert difference(text) < 1e-5
    (again,) = re.findall(r"in the unsplit model: loss (\S+)", text)
    # the first batch, after it was learned from
    assert float(again) < losses(text)[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_a_placement_its_copy_and_a_problem(run: Run) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    placer = f"{sys.executable} -P -m placer"
    lines = run("sh", str(EXAMPLES / "http_curl.sh"), PORT=port, PLACER=placer).splitlines()
    placement = json.loads(lines[1])
    assert placement["status"] == "optimal"
    assert placement["chunks"] == 8
    assert placement["id"] in lines[2]
    assert lines[3].startswith("200 ")
    assert json.loads(lines[5])["status"] == 422
