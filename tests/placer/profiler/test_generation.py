"""Profiles of both passes of a generation, on tiny models of transformers."""

from __future__ import annotations

import itertools
import time
from statistics import mean
from typing import Any

import pytest
import torch
from generating_models import MAKERS
from resting_models import CHOSEN, EXPERTS, LAYERS, blocks, mixture
from torch import nn

from placer import GenerationOptions, Profile, ProfileOptions, suggest
from placer.errors import InputError
from placer.estimator.expert_choices import experts_per_token
from placer.estimator.kv_cache import keys_and_values
from placer.profiler.generation import (
    REMEDY,
    filled_cache,
    host_ms,
    profile_generation,
    prompt_inputs,
)

ASKED = GenerationOptions(prompt_tokens=7, new_tokens=6)
CAPACITY = 64


def _model(name: str, **sizes: int) -> Any:
    torch.manual_seed(0)
    return MAKERS[name](**sizes).eval()


def _ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 55, (rows, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_pass_over_the_filled_cache_gives_the_models_next_logits(name: str) -> None:
    model, ids = _model(name), _ids()
    with torch.no_grad():
        prompt = model(ids, use_cache=True)
        after = prompt.logits[:, -1:].argmax(-1)
        with filled_cache(model, keys_and_values(model, 2, REMEDY), CAPACITY, 7) as cache:
            for layer, own in zip(cache.layers, prompt.past_key_values.layers, strict=True):
                layer.module.placer_keys[:, :, :7] = own.keys
                layer.module.placer_values[:, :, :7] = own.values
            found = model(after, past_key_values=cache, use_cache=False).logits
            again = model(after, past_key_values=cache, use_cache=False).logits
        expected = model(after, past_key_values=prompt.past_key_values).logits
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)


@pytest.fixture(scope="module")
def passes() -> tuple[Any, Profile, Profile]:
    """A model on ``meta``, and the profiles of its passes with 2 sequences."""
    with torch.device("meta"):
        model = _model("llama", num_hidden_layers=1)
    options = ProfileOptions(repeats=1, cache=False, granularity="blocks")
    inputs = prompt_inputs(model, _ids().to("meta"), ASKED)
    devices = ["cpu:0"]
    prompt, token = profile_generation(
        model,
        inputs,
        ASKED,
        keys_and_values(model, 2, REMEDY),
        CAPACITY,
        devices,
        progress=False,
        options=options,
    )
    return model, prompt, token


def test_both_profiles_have_the_same_layers_and_batch(
    passes: tuple[Any, Profile, Profile],
) -> None:
    _, prompt, token = passes
    assert {layer.name for layer in prompt.layers} == {layer.name for layer in token.layers}
    assert (prompt.batch_size, token.batch_size) == (2, 2)
    assert prompt.granularity == token.granularity == "blocks"
    assert prompt.cluster is not None and token.cluster is None


def test_the_second_profile_holds_the_cache(passes: tuple[Any, Profile, Profile]) -> None:
    model, prompt, token = passes
    before = {layer.name: layer.buffer_bytes for layer in prompt.layers}
    cached = {
        layer.name: layer.buffer_bytes - before[layer.name]
        for layer in token.layers
        if layer.buffer_bytes > before[layer.name]
    }
    # keys and values of 2 sequences, 2 heads, all tokens, 8 numbers each, in float32
    size = 2 * (2 * 2 * CAPACITY * 8) * 4
    blocks = range(model.config.num_hidden_layers)
    assert cached == {f"model.layers.{number}": size for number in blocks}


def test_a_pass_of_one_token_sends_what_one_token_makes(
    passes: tuple[Any, Profile, Profile],
) -> None:
    first, later = (
        next(edge.bytes for edge in one.edges if edge.source == "model.layers.0")
        for one in passes[1:]
    )
    assert first == 7 * later


def _of_a_mixture(granularity: str) -> tuple[Any, Profile, Profile]:
    """A mixture, and the profiles of its passes with 2 sequences."""
    model, _ = mixture("batched_mm")
    prompt, token = profile_generation(
        model,
        prompt_inputs(model, _ids(), ASKED),
        ASKED,
        keys_and_values(model, 2, REMEDY),
        CAPACITY,
        ["cpu:0"],
        progress=False,
        options=ProfileOptions(repeats=1, cache=False, granularity=granularity),
        experts=experts_per_token(model),
    )
    return model, prompt, token


def test_profiles_of_a_mixture_say_which_bytes_are_experts_and_how_many_are_chosen() -> None:
    model, prompt, token = _of_a_mixture("blocks")
    assert {*experts_per_token(model).values()} == {CHOSEN}
    size = sum(
        one.nbytes
        for name, one in model.named_parameters()
        if name.startswith("model.layers.0.mlp.experts.")
    )
    of_experts = dict.fromkeys(blocks(range(LAYERS)), size)
    for found in (prompt, token):
        held = {layer.name: layer.expert_bytes for layer in found.layers if layer.expert_bytes}
        assert held == of_experts
        # attention and norms are not experts
        whole = {layer.name: layer.param_bytes for layer in found.layers}
        assert all(size < whole[name] for name, size in held.items())
    # Both tokens of a pass choose 2 of 8 experts each: the mean over all choices of both.
    choices = [*itertools.combinations(range(EXPERTS), CHOSEN)]
    expected = mean(len({*a, *b}) for a, b in itertools.product(choices, repeat=2)) / EXPERTS
    shares = [layer.expert_share for layer in token.layers if layer.expert_bytes]
    assert shares == pytest.approx([expected] * LAYERS)
    # Each of 14 tokens of the prompt leaves an expert out with a chance of 6 in 8.
    shares = [layer.expert_share for layer in prompt.layers if layer.expert_bytes]
    assert shares == pytest.approx([1 - (6 / 8) ** 14] * LAYERS)


def test_experts_of_which_several_layers_compute_parts_are_not_named() -> None:
    # such layers do not rest, because each uses parameters of the other
    _, prompt, token = _of_a_mixture("fine")
    assert not any(layer.expert_bytes for layer in (*prompt.layers, *token.layers))


def test_a_model_without_experts_has_none(passes: tuple[Any, Profile, Profile]) -> None:
    model, *profiles = passes
    assert experts_per_token(model) == {}
    assert not any("expert" in profile.to_json() for profile in profiles)


def test_a_measured_model_is_left_unchanged(passes: tuple[Any, Profile, Profile]) -> None:
    model = passes[0]
    assert not [name for name, _ in model.named_buffers() if "placer" in name]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_the_cache_leaves_the_model_after_an_error() -> None:
    model = _model("llama")
    before = [name for name, _ in model.named_buffers()]
    attention = keys_and_values(model, 1, REMEDY)
    with pytest.raises(RuntimeError, match="ours"), filled_cache(model, attention, CAPACITY, 7):
        assert len([*model.named_buffers()]) == len(before) + 2 * len(attention)
        raise RuntimeError("ours")
    assert [name for name, _ in model.named_buffers()] == before


class _Stateful(nn.Module):
    """A model with a configuration of transformers, and without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.config = MAKERS["llama"]().config
        self.linear = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        return self.linear(input_ids.to(torch.float32).expand(-1, 2))


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"_Stateful returns no past_key_values.*another objective"
    ):
        keys_and_values(_Stateful(), 1, REMEDY)


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda: nn.Linear(2, 2), None, "Linear is not a model of transformers"),
        (MAKERS["t5"], None, "T5ForConditionalGeneration is an encoder-decoder"),
        (MAKERS["llama"], torch.zeros(1, 5).long(), "has 5 tokens, and prompt_tokens is 7"),
        (MAKERS["llama"], {"inputs_embeds": torch.zeros(1, 7, 8)}, "has inputs_embeds"),
        (MAKERS["llama"], torch.zeros(7).long(), r"input_ids of shape \[sequences, tokens\]"),
    ],
)
def test_inputs_are_refused_that_are_no_prompt(make: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_inputs(make(), inputs, ASKED)


def test_ids_and_a_mask_are_taken_in_each_form() -> None:
    model, ids = _model("llama"), _ids()
    mask = torch.ones_like(ids)
    assert prompt_inputs(model, ids, ASKED).keys() == {"input_ids"}
    assert prompt_inputs(model, (ids, mask), ASKED)["attention_mask"] is mask
    assert prompt_inputs(model, {"input_ids": ids}, ASKED)["input_ids"] is ids
    assert prompt_inputs(model, None, ASKED)["input_ids"].shape == (1, 7)


@pytest.mark.parametrize("weights", ["cpu", "meta"])
def test_the_hosts_time_is_that_of_generate_before_the_prompts_pass(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device(weights):
        model = _model("llama", num_hidden_layers=1)
    prompt, place = {"input_ids": _ids()}, torch.device("cpu")
    least = host_ms(model, prompt, place)
    assert least is not None and least > 0
    prepare, forward = model._prepare_cache_for_generation, model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(model, "_prepare_cache_for_generation", slow)
    later = host_ms(model, prompt, place)
    assert later is not None and later >= 100
    assert model.forward == forward and not model._forward_pre_hooks


def test_the_hosts_time_is_unknown_without_a_generate_that_runs() -> None:
    model = nn.Linear(2, 2)
    assert host_ms(model, {"input_ids": _ids()}, torch.device("cpu")) is None
    model.generate = lambda **_: None
    assert host_ms(model, {"input_ids": _ids()}, torch.device("cpu")) is None


def test_suggest_gives_the_hosts_time() -> None:
    placement = suggest(
        _model("llama", num_hidden_layers=1), devices=1, objective="generation", generation=ASKED
    )
    assert placement.generation is not None and placement.generation.host_ms
