from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.integration

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


def write_idx(path: Path, values: numpy.ndarray) -> None:
    """Write an idx file: type 8 and the number of dimensions, the shape, then the values."""
    head = bytes([0, 0, 8, values.ndim]) + numpy.array(values.shape, ">i4").tobytes()
    content = head + values.astype("u1").tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """A folder as torchvision leaves FashionMNIST; each class has its bright row."""
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count, ending in (("train", 256, ".gz"), ("t10k", 50, "")):
        labels = numpy.arange(count) % 10
        images = numpy.zeros((count, 28, 28))
        images[numpy.arange(count), 2 * labels + 4] = 255
        write_idx(raw / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte{ending}", labels)
    return tmp_path / "data"


@pytest.fixture
def carvana(tmp_path: Path) -> Path:
    """A folder in the layout of Carvana: images of 96 x 64 pixels, and masks with a palette."""
    for name in ("imgs", "masks"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for number in range(3):
        mask = numpy.zeros((64, 96), "u1")
        mask[16:48, 24 + 8 * number : 72] = 255
        Image.fromarray(mask).convert("1").convert("P").save(
            tmp_path / "data" / "masks" / f"car_{number}_mask.gif"
        )
        Image.fromarray(numpy.stack([mask] * 3, axis=2)).save(
            tmp_path / "data" / "imgs" / f"car_{number}.jpg"
        )
    return tmp_path / "data"


def test_unet_learns_from_images_and_masks_in_carvanas_layout(example: Run, carvana: Path) -> None:
    text = example("unet_skips.py", "--devices", "2", "--data", str(carvana))
    assert losses(text)[-1] < losses(text)[0]
    assert difference(text) < 1e-5


def test_unet_streams_images_in_carvanas_layout(carvana: Path) -> None:
    batches = list(runpy.run_path(str(EXAMPLES / "unet_stream.py"))["from_folder"](carvana))
    assert [batch.shape for batch in batches] == [(4, 3, 64, 64)] * 12
    # The first batch holds the three photographs, then the first again; pixels are from 0 to 1.
    assert torch.equal(batches[0][0], batches[0][3]) and not torch.equal(
        batches[0][0], batches[0][1]
    )
    assert batches[0].min() == 0 and batches[0].max() == 1


@pytest.mark.parametrize(
    "name, missing",
    [
        (
            "seqnet_digits.py",
            "there is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in",
        ),
        ("unet_skips.py", "there are no images in"),
        ("unet_stream.py", "there are no images in"),
    ],
)
def test_an_example_names_the_files_that_its_folder_lacks(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=missing):
        run_here(monkeypatch, name, "--data", "absent")


def test_an_example_names_the_image_whose_mask_is_missing(
    carvana: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (carvana / "masks" / "car_1_mask.gif").unlink()
    with pytest.raises(SystemExit, match=r"no mask of car_1.jpg in .*masks"):
        run_here(monkeypatch, "unet_skips.py", "--data", str(carvana))


class Recorder(types.ModuleType):
    """A module with the functions of MLflow that the example calls."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.logged: dict[str, object] = {}
        self.start_run = nullcontext
        self.log_params = self.logged.update
        self.log_dict = lambda values, name: self.logged.update({name: values})
        self.log_metric = lambda name, value, step=None: self.logged.update(
            {f"{name} {step}": value}
        )


def run_here(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_seqnet_learns_from_files_of_fashion_mnist_and_logs_the_run_to_mlflow(
    fashion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "mlflow", recorder)
    run_here(monkeypatch, "seqnet_digits.py", "--epochs", "3", "--data", str(fashion), "--mlflow")
    text = capsys.readouterr().out
    assert "accuracy on 50 images" in text
    first, _, last = losses(text)
    assert last < first
    assert recorder.logged["loss 1"] == pytest.approx(first, abs=1e-4)
    assert recorder.logged["devices"] == 2 and recorder.logged["status"] == "optimal"
    places = recorder.logged["layer_devices.json"]
    assert isinstance(places, dict) and set(places.values()) <= {"cpu:0", "cpu:1"}
    assert 0 <= recorder.logged["accuracy None"] <= 1  # type: ignore[operator]


def test_seqnet_says_how_to_install_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SystemExit, match="pip install mlflow"):
        run_here(monkeypatch, "seqnet_digits.py", "--mlflow")


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
