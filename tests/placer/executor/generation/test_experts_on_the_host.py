"""Mixtures whose experts rest on the host: a device gets those that its tokens choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from resting_models import CHOSEN, EXPERTS, LAYERS, blocks, mixture, placed, spoil
from torch import Tensor

from placer import DataFlow, Placement
from placer.executor.state.resting import expert_weights
from placer.schema import base
from placer.testing import logical_devices

PLACES = ["cpu:0", "cpu:1"]
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def chosen_experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "LEAST_EXPERT_BYTES", 1)
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


def ids() -> Tensor:
    return torch.randint(3, 55, (1, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_a_mixture_computes_with_the_experts_that_its_tokens_choose(
    how: str, copied: list[list[int]]
) -> None:
    model, reference = mixture(how)
    expected_choices: list[list[int]] = []
    for layer in reference.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args: expected_choices.append(sorted(set(args[1].flatten().tolist())))
        )
    expected = reference.generate(ids(), **OPTIONS, **LOGITS)
    flow = placed(model, PLACES, blocks(range(LAYERS)), 3)
    with flow.applied() as applied:
        applied(ids())  # the slots exist from now on
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


def test_a_token_of_one_text_copies_as_many_experts_as_it_chooses(copied: list[list[int]]) -> None:
    model, _ = mixture("grouped_mm")
    flow = placed(model, PLACES, blocks(range(LAYERS)), 3)
    with flow.applied() as applied:
        applied.generate(ids(), **OPTIONS)
    of_prompt, of_tokens = copied[: 2 * LAYERS], copied[2 * LAYERS :]
    assert len(of_tokens) == 2 * LAYERS * (OPTIONS["max_new_tokens"] - 1)
    assert {len(choice) for choice in of_tokens} == {CHOSEN}
    assert max(len(choice) for choice in of_prompt) > CHOSEN


def test_experts_of_some_layers_rest_on_the_disk(tmp_path: Any, copied: list[list[int]]) -> None:
    model, reference = mixture("eager")
    expected = reference.generate(ids(), **OPTIONS)
    flow = placed(model, PLACES, [], 3, blocks(range(1, 4)), tmp_path)
    with flow.applied() as applied:
        assert applied.generate(ids(), **OPTIONS).tolist() == expected.tolist()
    assert len(copied) == 2 * 3 * OPTIONS["max_new_tokens"]


def test_a_module_of_experts_may_be_a_layer_of_its_own(copied: list[list[int]]) -> None:
    model, reference = mixture("eager")
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
    model, reference = mixture("grouped_mm")
    size = sum(one.nbytes for name, one in model.named_parameters() if ".experts." in name)
    monkeypatch.setattr(base, "LEAST_EXPERT_BYTES", size + 1)
    flow = placed(model, PLACES, blocks(range(LAYERS)), 3)
    expected = reference.generate(ids(), **OPTIONS)
    with flow.applied() as applied:
        assert applied.generate(ids(), **OPTIONS).tolist() == expected.tolist()
    assert not copied
    assert "experts" not in flow.generation_report.not_recorded_because
