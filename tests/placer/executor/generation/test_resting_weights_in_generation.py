"""``generate`` with parameters that rest on the host: recorded passes copy them again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_list import transformers
from torch import Tensor

from placer import DataFlow, Placement
from placer.testing import logical_devices

LAYERS = 6
PASSES = 5
OPTIONS = {
    "max_new_tokens": PASSES + 1,
    "min_new_tokens": PASSES + 1,
    "do_sample": False,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    with logical_devices(2):
        yield


def pair() -> tuple[Any, Any]:
    library = transformers()
    torch.manual_seed(0)
    config = library.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = library.LlamaForCausalLM(config).eval()
    return model, copy.deepcopy(model)


def placed(model: Any, resting: list[str], first: int) -> DataFlow:
    where = {"model.embed_tokens": "cpu:0"}
    where |= {f"model.layers.{n}": f"cpu:{int(n >= first)}" for n in range(LAYERS)}
    last = f"cpu:{int(first < LAYERS)}"
    where |= {"model.norm": last, "lm_head": last}
    flow = DataFlow(model, inference_only=True)
    flow.update_flow(
        Placement(
            status="feasible",
            objective="generation",
            layer_devices=where,
            resting=dict.fromkeys(resting, "host"),
        )
    )
    return flow


def ids(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (2, 7), generator=generator)


@pytest.mark.parametrize(
    "resting, first",
    [((1, 2, 4), LAYERS), ((0, 1, 2, 3, 4, 5), LAYERS), ((0, 1, 2, 4, 5), 3), ((5,), 3)],
)
def test_texts_are_the_unsplit_models_and_come_from_recorded_passes(
    resting: tuple[int, ...], first: int
) -> None:
    model, reference = pair()
    flow = placed(model, [f"model.layers.{n}" for n in resting], first)
    for seed in (1, 2):
        expected = reference.generate(ids(seed), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(ids(seed), **OPTIONS).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (2 * PASSES - 2, 2)


def test_an_embedding_and_the_head_may_rest_too() -> None:
    model, reference = pair()
    flow = placed(model, ["model.embed_tokens", "model.layers.3", "lm_head"], LAYERS)
    expected = reference.generate(ids(1), **OPTIONS)
    with flow.applied() as applied:
        assert applied.generate(ids(1), **OPTIONS).tolist() == expected.tolist()
    assert flow.generation_report.recorded == PASSES - 2


def test_a_recorded_pass_reads_changed_weights() -> None:
    model, reference = pair()
    flow = placed(model, ["model.layers.1", "model.layers.2"], LAYERS)
    for factor in (1.0, -2.0):
        with torch.no_grad():
            for each in (model, reference):
                each.model.layers[1].mlp.up_proj.weight.mul_(factor)
        expected = reference.generate(ids(1), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(ids(1), **OPTIONS).tolist() == expected.tolist()


def test_several_generations_take_turns_at_the_slots() -> None:
    model, reference = pair()
    flow = placed(model, [f"model.layers.{n}" for n in (0, 1, 3, 4, 5)], 3)
    prompts = [ids(seed)[:1] for seed in range(4)]
    found = list(flow.generate_many(prompts, in_flight=2, **OPTIONS))
    for prompt, text in zip(prompts, found, strict=True):
        assert text.tolist() == reference.generate(prompt, **OPTIONS).tolist()
