"""Prompts of a shape that comes again: recorded passes with the unsplit model's results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generating_models import MAKERS, pair, split
from model_list import transformers
from torch import Tensor, nn

from placer import DataFlow
from placer.executor import model_captures
from placer.executor.generation import calls, prompts, recording
from placer.testing import logical_devices

OPTIONS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
BEFORE = 3
"""Prompts of a shape before its first replay."""

# The other tests here run a Llama, whose layers a Qwen2 has.
RUN = {"mistral", "gpt2"}
DECODERS = [name for name in MAKERS if name not in ("t5", "bart")]


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # how long hooks take says when a model is captured: never here, however busy the machine is
    monkeypatch.setattr(model_captures, "_CAPTURE_S", math.inf)
    with logical_devices(2):
        yield


def ids(seed: int, columns: int = 9, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (rows, columns), generator=generator)


def generated(flow: DataFlow, *args: Any, **options: Any) -> Any:
    with flow.applied() as applied:
        return applied.generate(*args, **OPTIONS, **options)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in RUN else pytest.mark.exhaustive) for name in DECODERS],
)
def test_texts_are_the_unsplit_models_and_their_prompts_recorded(name: str) -> None:
    model, reference = pair(name)
    flow = split(model)
    # longer than a Mistral's sliding window
    sizes = [(9, 2), (20, 2), (9, 1)]
    for seed in range(BEFORE + 2):
        for columns, rows in sizes:
            given = ids(seed, columns, rows)
            expected = reference.generate(given, **OPTIONS)
            assert generated(flow, given).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.recorded_prompts == 2 * len(sizes)
    assert report.prompt_not_recorded_because == ""


def test_logits_and_the_cache_of_a_recorded_prompt_belong_to_the_caller() -> None:
    model, reference = pair("llama")
    flow, library = split(model), transformers()
    kept = []
    with torch.no_grad(), flow.applied():
        for seed in range(BEFORE + 2):
            caches = [library.DynamicCache(config=model.config) for _ in range(2)]
            results = [
                one(input_ids=ids(seed), past_key_values=cache, use_cache=True)
                for one, cache in zip((model, reference), caches, strict=True)
            ]
            kept.append([*results, *caches])
    assert flow.generation_report.recorded_prompts == 2
    for found, expected, cache, other in kept:
        torch.testing.assert_close(found.logits.cpu(), expected.logits)
        assert cache.get_seq_length() == 9
        for layer, one in zip(cache.layers, other.layers, strict=True):
            torch.testing.assert_close(layer.keys.cpu(), one.keys)
            torch.testing.assert_close(layer.values.cpu(), one.values)


def test_padded_prompts_do_not_replay_what_was_recorded_without_padding() -> None:
    model, reference = pair("llama")
    flow, library = split(model), transformers()
    whole, padded = torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
    padded[0, :4] = 0
    replays = []
    # After two consecutive prompts with other numbers, another pass is traced and recorded.
    masks = [whole] * (BEFORE + 1) + [padded, whole] + [padded] * 5
    with torch.no_grad(), flow.applied():
        for seed, mask in enumerate(masks):
            given = {"input_ids": ids(seed), "attention_mask": mask}
            caches = [library.DynamicCache(config=model.config) for _ in range(2)]
            found, expected = (
                one(**given, past_key_values=cache).logits.cpu()
                for one, cache in zip((model, reference), caches, strict=True)
            )
            torch.testing.assert_close(found[mask > 0], expected[mask > 0])
            report = flow.generation_report
            replays.append(report.recorded_prompts)
            is_miss = "numbers on the host" in report.prompt_not_recorded_because
            assert is_miss == (seed in (4, 6, 7))
    assert replays == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_recorded_prompt_reads_changed_weights(is_replaced: bool) -> None:
    model, reference = pair("llama")
    flow = split(model)
    for seed in range(BEFORE + 1):
        generated(flow, ids(seed))
    for one in (model, reference):
        layer = one.model.layers[0].mlp
        with torch.no_grad():
            if is_replaced:
                layer.up_proj.weight = nn.Parameter(layer.up_proj.weight * -2)
            else:
                layer.up_proj.weight.mul_(-2)
    for seed in range(2):
        expected = reference.generate(ids(seed), **OPTIONS)
        assert generated(flow, ids(seed)).tolist() == expected.tolist()
    assert flow.generation_report.recorded_prompts == (1 if is_replaced else 3)


def test_prompts_that_the_devices_take_long_for_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompts, "_HOST_SHARE", 2.0)  # as if devices worked after the host
    model, reference = pair("llama")
    flow = split(model)
    for seed in range(BEFORE + 1):
        expected = reference.generate(ids(seed), **OPTIONS)
        assert generated(flow, ids(seed)).tolist() == expected.tolist()
    report = flow.generation_report
    assert (report.recorded_prompts, report.prompt_not_recorded_because) == (0, "")


def test_several_generations_at_once_record_prompts_too() -> None:
    model, reference = pair("llama")
    flow = split(model)
    texts = [ids(seed, rows=1) for seed in range(3 * BEFORE)]
    found = [text.tolist() for text in flow.generate_many(texts, in_flight=2, **OPTIONS)]
    assert found == [reference.generate(text, **OPTIONS).tolist() for text in texts]
    assert flow.generation_report.recorded_prompts > 0


def test_a_prompt_that_fails_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair("llama")
    flow, library = split(model), transformers()
    for seed in range(BEFORE - 1):
        generated(flow, ids(seed))
    wrong = ids(0)
    wrong[0, 0] = 10_000  # not in the vocabulary
    with torch.no_grad(), flow.applied():
        with pytest.raises(IndexError):
            model(input_ids=wrong, past_key_values=library.DynamicCache(config=model.config))
    for seed in range(BEFORE + 2):
        expected = reference.generate(ids(seed), **OPTIONS)
        assert generated(flow, ids(seed)).tolist() == expected.tolist()


def test_only_passes_through_hooks_do_without_plans_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new length of the cache needs a new plan of cuDNN, unless the pass will come again."""
    traced, hooked = [], []

    class Tracer(recording.OperationTrace):
        def __enter__(self) -> Any:
            traced.append(torch.backends.cuda.cudnn_sdp_enabled())
            return super().__enter__()

    monkeypatch.setattr(recording, "OperationTrace", Tracer)
    model, _ = pair("llama")
    flow = split(model)
    for _ in range(BEFORE):
        generated(flow, ids(0))
    assert len(traced) == 4  # of a prompt and of a token: each twice
    assert all(traced)
    model.model.layers[1].register_forward_pre_hook(
        lambda *given: hooked.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    generated(flow, ids(0, columns=8))
    monkeypatch.setattr(calls, "_SHORT", 9)
    generated(flow, ids(0, columns=10))
    assert hooked == [False] * OPTIONS["max_new_tokens"] + [True, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_tokens_that_cannot_be_recorded_do_without_plans_of_attention() -> None:
    model, _ = pair("llama")
    flow, seen = split(model), []
    model.model.layers[1].register_forward_pre_hook(
        lambda *given: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    with torch.enable_grad(), flow.applied():
        cache = transformers().DynamicCache(config=model.config)
        for part in (ids(0), ids(1, columns=1)):
            model(input_ids=part, past_key_values=cache, use_cache=True)
        model(input_ids=ids(0))  # without a cache, the same shape comes again
    assert flow.generation_report.hooked == 1
    assert seen == [False, False, True]
