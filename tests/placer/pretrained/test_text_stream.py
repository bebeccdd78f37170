"""Streamed text is the text that ``generate`` returns, and a reader may leave at any time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from pretrained_folders import CHAT, save_tokenizer

import placer
from placer.errors import InputError
from placer.pretrained.checkpoint_folder import tokenizer_of

PROMPT = "w1 w2 w3 w4"
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


# not inside logical_devices, whose modes belong to one thread
@pytest.fixture(scope="module")
def llm(llama: Path) -> placer.Pretrained:
    return placer.from_pretrained(
        llama,
        devices=["cpu:0", "cpu:1"],
        context=64,
        repeats=1,
        constraints=placer.Constraints(min_devices=2),
    )


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [one for one in threading.enumerate() if one.name == "placer-text"]


def test_the_pieces_are_the_text_that_generate_returns(llm: placer.Pretrained) -> None:
    length = {"max_new_tokens": 20, "min_new_tokens": 20}
    stream = llm.stream_text(PROMPT, **length, **GREEDY)
    pieces = list(stream)
    ids = llm.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = llm.generate(ids, **length, **GREEDY)[0, ids.shape[1] :]
    assert "".join(pieces) == llm.tokenizer.decode(expected, skip_special_tokens=True)
    assert len(pieces) > 1
    assert stream.tokens == len(expected) == 20
    assert 0 < stream.first_token_s < 60 and 0 < stream.tokens_per_s < 1e6


def test_by_default_a_text_may_fill_the_context(llm: placer.Pretrained) -> None:
    stream = llm.stream_text(PROMPT, min_new_tokens=60, **GREEDY)
    assert "".join(stream) and stream.tokens == 64 - 4


def test_a_reader_who_leaves_ends_the_generation(llm: placer.Pretrained) -> None:
    stream = llm.stream_text(PROMPT, min_new_tokens=60, **GREEDY)
    assert next(stream)
    stream.close()
    assert stream.tokens < 60
    assert list(stream) == []


def test_an_error_of_the_generation_comes_to_the_reader(llm: placer.Pretrained) -> None:
    with pytest.raises(ValueError, match="streamer"):
        list(llm.stream_text(PROMPT, num_beams=2))


def test_an_error_of_the_tokenizer_comes_to_the_reader(
    llm: placer.Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any, **__: Any) -> str:
        raise RuntimeError("no such token")

    stream = llm.stream_text(PROMPT, max_new_tokens=5)
    monkeypatch.setattr(llm.tokenizer, "decode", decode)
    with pytest.raises(RuntimeError, match="no such token"):
        list(stream)


def test_two_streams_of_one_reader_take_turns(llm: placer.Pretrained) -> None:
    prompts = (PROMPT, "w5 w6 w7 w8")
    alone = ["".join(llm.stream_text(one, max_new_tokens=20, **GREEDY)) for one in prompts]
    both = [llm.stream_text(one, max_new_tokens=20, **GREEDY) for one in prompts]
    pieces: list[list[str]] = [[], []]
    for pair in zip_longest(*both, fillvalue=""):
        for found, piece in zip(pieces, pair, strict=True):
            found.append(piece)
    assert ["".join(one) for one in pieces] == alone


def test_a_text_is_streamed_inside_applied_too(llm: placer.Pretrained) -> None:
    expected = "".join(llm.stream_text(PROMPT, max_new_tokens=5, **GREEDY))
    with llm.flow.applied():
        assert "".join(llm.stream_text(PROMPT, max_new_tokens=5, **GREEDY)) == expected


def test_a_text_beyond_the_context_is_refused_at_once(llm: placer.Pretrained) -> None:
    with pytest.raises(
        InputError, match=r"text of 65 tokens, 4 of them in the prompt, .* context of 64"
    ):
        llm.stream_text(PROMPT, max_new_tokens=61)
    with pytest.raises(InputError, match=r"text of 65 tokens, 64 of them in the prompt, "):
        llm.stream_text("w1 " * 64)
    with pytest.raises(InputError, match="max_new_tokens is True; give a number from 1"):
        llm.stream_text("w1", max_new_tokens=True)
    with pytest.raises(InputError, match="max_new_tokens is 0; give a number from 1"):
        llm.stream_text(PROMPT, max_new_tokens=0)
    with pytest.raises(InputError, match="prompt is '', which has no tokens"):
        llm.stream_text("")


def test_messages_go_through_the_chat_template(llm: placer.Pretrained, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w2 w3"}]
    with pytest.raises(InputError, match="no chat template for messages"):
        llm.stream_text(messages)
    chatting = placer.Pretrained(
        llm.model,
        llm.flow,
        llm.placement,
        tokenizer_of(save_tokenizer(tmp_path, CHAT)),
        llm.context,
    )
    found = "".join(chatting.stream_text(messages, max_new_tokens=8, **GREEDY))
    assert found == "".join(llm.stream_text("w2 w3 w1", max_new_tokens=8, **GREEDY))


def test_without_a_tokenizer_only_token_ids_can_be_continued(llm: placer.Pretrained) -> None:
    bare = placer.Pretrained(llm.model, llm.flow, llm.placement, None, llm.context)
    with pytest.raises(InputError, match="no tokenizer that can be read; give token ids"):
        bare.stream_text(PROMPT)
