"""Mixtures whose experts rest on the host: a device gets those that its tokens choose."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_list import transformers
from torch import Tensor

from placer import DataFlow, Placement
from placer.executor.state import expert_weights
from placer.testing import logical_devices

LAYERS, EXPERTS, CHOSEN = 5, 8, 2
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def chosen_experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expert_weights, "LEAST_BYTES", 1)
    with logical_devices(2):
        yield


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The experts that were copied, once for each stack of each call."""
    rows: list[list[int]] = []
    runs = expert_weights._runs

    def noted(numbers: Any) -> Any:
        rows.append([*numbers])
        return runs(numbers)

    monkeypatch.setattr(expert_weights, "_runs", noted)
    return rows


def pair(how: str) -> tuple[Any, Any]:
    """Return a mixture of experts, and an equal one that stays unsplit.

    Args:
        how: how transformers computes experts.
    """
    library = transformers()
    torch.manual_seed(0)
    config = library.Qwen3MoeConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=64,
        experts_implementation=how,
    )
    model = library.Qwen3MoeForCausalLM(config).eval()
    return model, copy.deepcopy(model)


def placed(model: Any, resting: range, tier: str = "host", folder: Any = None) -> DataFlow:
    """Return a flow with three blocks on the first device, of which some rest on the host."""
    blocks = [f"model.layers.{number}" for number in range(LAYERS)]
    where = {"model.embed_tokens": "cpu:0", "model.norm": "cpu:1", "lm_head": "cpu:1"}
    where |= {name: f"cpu:{int(number > 2)}" for number, name in enumerate(blocks)}
    rests = {blocks[number]: tier for number in resting}
    flow = DataFlow(model, inference_only=True, disk_folder=folder)
    flow.update_flow(
        Placement(status="feasible", objective="generation", layer_devices=where, resting=rests)
    )
    return flow


def ids(columns: int = 7) -> Tensor:
    return torch.randint(3, 55, (1, columns), generator=torch.Generator().manual_seed(1))


def spoil(flow: DataFlow) -> None:
    """Let every expert that was not copied give no number."""
    resting = flow.placed.hooks.resting
    assert resting is not None
    for slots in resting.slots:
        for memory in slots.memory:
            memory.fill_(255)


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_a_mixture_computes_with_the_experts_that_its_tokens_choose(
    how: str, copied: list[list[int]]
) -> None:
    model, reference = pair(how)
    expected_choices: list[list[int]] = []
    for layer in reference.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args: expected_choices.append(sorted(set(args[1].flatten().tolist())))
        )
    expected = reference.generate(ids(), **OPTIONS, **LOGITS)
    flow = placed(model, range(LAYERS))
    with flow.applied() as applied:
        applied(ids(1))  # the slots exist from now on
        spoil(flow)
        copied.clear()
        found = applied.generate(ids(), **OPTIONS, **LOGITS)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other)
    # two stacks of each layer
    assert copied == [choice for choice in expected_choices for _ in range(2)]
    assert any(len(choice) < EXPERTS for choice in expected_choices)
    assert "experts rest on the host" in flow.generation_report.not_recorded_because


def test_experts_of_some_layers_rest_on_the_disk(tmp_path: Any, copied: list[list[int]]) -> None:
    model, reference = pair("eager")
    expected = reference.generate(ids(), **OPTIONS)
    flow = placed(model, range(1, 4), "disk", tmp_path)
    with flow.applied() as applied:
        assert applied.generate(ids(), **OPTIONS).tolist() == expected.tolist()
    assert len(copied) == 2 * 3 * OPTIONS["max_new_tokens"]


def test_a_module_of_experts_may_be_a_layer_of_its_own(copied: list[list[int]]) -> None:
    model, reference = pair("eager")
    flow = DataFlow(model, inference_only=True)
    experts = [f"model.layers.{number}.mlp.experts" for number in range(LAYERS)]
    flow.update_flow(
        Placement(
            status="feasible",
            objective="generation",
            layer_devices={"model": "cpu:0", "lm_head": "cpu:0"} | dict.fromkeys(experts, "cpu:0"),
            resting=dict.fromkeys(experts, "host"),
        )
    )
    expected = reference.generate(ids(), **OPTIONS)
    with flow.applied() as applied:
        assert applied.generate(ids(), **OPTIONS).tolist() == expected.tolist()
    assert len(copied) == 2 * LAYERS * OPTIONS["max_new_tokens"]


def test_few_bytes_of_experts_are_copied_whole_and_recorded(
    monkeypatch: pytest.MonkeyPatch, copied: list[list[int]]
) -> None:
    model, reference = pair("grouped_mm")
    size = sum(one.nbytes for name, one in model.named_parameters() if ".experts." in name)
    monkeypatch.setattr(expert_weights, "LEAST_BYTES", size + 1)
    flow = placed(model, range(LAYERS))
    expected = reference.generate(ids(), **OPTIONS)
    with flow.applied() as applied:
        assert applied.generate(ids(), **OPTIONS).tolist() == expected.tolist()
    assert not copied
    assert "experts" not in flow.generation_report.not_recorded_because
