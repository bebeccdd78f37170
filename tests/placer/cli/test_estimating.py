from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest
from commands import Run
from model_list import transformers

from placer.schema import Estimate

TOY = ("placer.zoo.toy:ToyModel", "--input", "4x10")


def plain(text: str) -> str:
    """Return what a terminal shows, without its codes for bold text and colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, as ``save_pretrained`` writes it."""
    library = transformers()
    config = library.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    folder = tmp_path_factory.mktemp("gpt2")
    library.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_one_command_answers_whether_a_checkpoint_fits_on_two_cards(
    run: Run, checkpoint: Path
) -> None:
    answer = run("estimate", checkpoint, "--devices", "2x24GiB", terminal=True)
    assert answer.code == 0, answer.err
    first = plain(answer.out).splitlines()[0]
    assert first.startswith("fits on two 24 GiB devices: the fullest uses ")
    assert first.endswith(" of 23.5 GiB")


def test_json_has_the_estimate_for_programs(run: Run, checkpoint: Path) -> None:
    answer = run("estimate", checkpoint, "-i", "2x8", "--generate", "32", "--dtype", "float16")
    found = Estimate.model_validate_json(answer.out)
    assert found.fits is None and found.cards[0].devices == 1
    assert found.generate == 32
    assert found.inputs == ("input_ids=2x8:int64",)
    # keys and values of 16 features in 2 bytes, 32 tokens of 2 texts
    assert found.devices[0].cache_bytes == 2 * 16 * 2 * 32 * 2


def test_a_model_that_does_not_fit_ends_with_exit_code_3(run: Run) -> None:
    answer = run("estimate", *TOY, "--devices", "512B", "--reserve", "0", terminal=True)
    assert answer.code == 3
    assert plain(answer.out).startswith("does not fit on one 512 B device: the fullest needs ")
    assert "would fit   one device of " in plain(answer.out)


def test_the_objects_of_an_estimate_are_not_searched_for_cycles(run: Run) -> None:
    # the search that the pause had put off came before the answer, and took half a second.
    gc.unfreeze()
    assert run("estimate", *TOY).code == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000


def test_the_report_has_the_answer_and_the_picture(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    answer = run("estimate", *TOY, "--training", "--devices", "1GiB", "--html", file)
    assert answer.code == 0, answer.err
    text = file.read_text()
    assert "fits on one 1 GiB device: the fullest uses " in text
    assert "<svg" in text and "gradients" in text


def test_an_estimate_is_shown_again_from_its_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    run("estimate", *TOY, "--devices", "1GiB", "-o", file)
    answer = run("show", file, "--svg", tmp_path / "memory.svg", terminal=True)
    assert plain(answer.out).startswith("fits on one 1 GiB device")
    assert "Memory of ToyModel" in (tmp_path / "memory.svg").read_text()
    assert json.loads(run("show", file, "--json").out)["fits"] is True


def test_a_callable_is_made_without_memory_for_its_weights(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2**40 parameters, which no machine could hold
    (tmp_path / "huge_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(2**20, 2**20, bias=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    answer = run("estimate", "huge_model:make", "--input", f"1x{2**20}", "--json")
    found = Estimate.model_validate_json(answer.out)
    assert found.devices[0].memory.param_bytes == 4 * 2**40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "there is no file or folder nowhere"),
        (("nowhere", "--devices", "2"), "without its unit"),
        (("placer.zoo.toy:ToyModel",), "give each with --input"),
        ((*TOY, "--training", "--generate", "5"), "training has no cache"),
        ((*TOY, "--dtype", "int8"), "dtype is 'int8'"),
        ((*TOY, "--reserve", "much"), "is not a size"),
    ],
)
def test_words_that_cannot_be_used_end_with_exit_code_2(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    answer = run("estimate", *words)
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_arguments_of_a_callable_do_not_go_with_a_path(run: Run, checkpoint: Path) -> None:
    answer = run("estimate", checkpoint, "--arg", "depth=3")
    assert answer.code == 2
    assert "goes with a callable" in answer.err


def test_recomputation_names_devices_of_the_estimate(run: Run) -> None:
    words = ("--training", "--devices", "2x1GiB", "--recompute-on", "1=always", "--json")
    answer = run("estimate", *TOY, *words)
    assert answer.code == 0, answer.err
    assert run("estimate", *TOY, "--training", "--recompute-on", "1=always").code == 2
