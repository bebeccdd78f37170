"""``placer run``: text on stdout as it comes, its speed on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Run
from pretrained_folders import CHAT, save_tokenizer, saved

import placer

ON_TWO = ("--devices", "cpu:0,cpu:1", "--context", "64")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint, whose measurements the tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = saved("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
        yield save_tokenizer(folder, CHAT)


def test_run_prints_the_text_and_its_speed(run: Run, llama: Path) -> None:
    answer = run("run", llama, "--prompt", "w1 w2", "--max-new-tokens", "8", *ON_TWO)
    assert answer.code == 0, answer.err
    llm = placer.from_pretrained(llama, devices=["cpu:0", "cpu:1"], context=64)
    assert answer.out == "".join(llm.stream_text("w1 w2", max_new_tokens=8)) + "\n"
    assert re.search(
        r"^8 tokens, the first after \d+\.\d\d s, then \d+\.\d tokens/s$", answer.err, re.MULTILINE
    )


def test_json_has_the_text_the_speed_and_the_placement(run: Run, llama: Path) -> None:
    words = ("run", llama, "--prompt", "-", "--max-new-tokens", "3", "--json", *ON_TWO)
    answer = run(*words, stdin="w1 w2")
    found = json.loads(answer.out)
    assert found["tokens"] == 3 and found["text"] and found["tokens_per_s"] > 0
    assert set(found["layer_devices"].values()) <= {"cpu:0", "cpu:1"}


def test_objective_generation_takes_the_lengths_of_the_texts(run: Run, llama: Path) -> None:
    words = ("run", llama, "--prompt", "w1 w2", "--objective", "generation")
    places = ("--devices", "cpu:0,cpu:1", "--prompt-tokens", "12", "--new-tokens", "8")
    answer = run(*words, *places)
    assert answer.code == 0, answer.err
    # 20 tokens in all, two of them in the prompt
    assert "18 tokens, the first after" in answer.err
    bare = run(*words)
    assert (bare.code, bare.err.splitlines()[-1]) == (
        2,
        "error: --prompt-tokens and --new-tokens are missing; give them with --objective"
        " generation",
    )


def test_chat_puts_the_prompt_into_the_template(run: Run, llama: Path) -> None:
    length = ("--max-new-tokens", "8", *ON_TWO)
    chat = run("run", llama, "--chat", "--prompt", "w2 w3", *length)
    assert chat.out == run("run", llama, "--prompt", "w2 w3 w1", *length).out


def test_what_cannot_run_is_one_line_and_an_exit_code(run: Run, llama: Path) -> None:
    missing = run("run", "/no/such/folder", "--prompt", "w1")
    assert (missing.code, missing.out) == (2, "")
    assert missing.err == (
        "error: there is no folder /no/such/folder; give the path of a checkpoint folder\n"
    )
    endless = run("run", llama, "--prompt", "w1", "--max-new-tokens", "64", *ON_TWO)
    assert (endless.code, endless.err) == (
        2,
        "error: --max-new-tokens 64 leaves no room for a prompt in --context 64; give a larger"
        " context, or fewer tokens\n",
    )
    small = run("run", llama, "--prompt", "w1", "--memory", "20KiB", *ON_TWO)
    assert (small.code, small.out) == (3, "")
    last = small.err.splitlines()[-1]
    assert last.startswith("error: LlamaForCausalLM with texts of 64 tokens does not fit on two")


def test_a_prompt_without_tokens_is_refused_before_the_model_is_measured(
    run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*given: object, **options: object) -> None:
        raise AssertionError("the model is measured")

    monkeypatch.setattr("placer.pretrained.from_pretrained.question", measure)
    answer = run("run", llama, "--prompt", "", *ON_TWO)
    assert (answer.code, answer.err.splitlines()[-1]) == (
        2,
        "error: prompt is '', which has no tokens; give a longer text",
    )
