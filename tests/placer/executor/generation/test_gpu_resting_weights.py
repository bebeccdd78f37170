"""On real GPUs: weights that rest in pinned memory are copied by recorded passes and by calls."""

from __future__ import annotations

import pytest
import torch
from mixed_answers import mixed
from resting_models import LAYERS, blocks, mixture, pair, placed, spoil
from torch import Tensor

from placer import DataFlow, devices
from placer.schema import base

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
COUNT = min(2, torch.cuda.device_count())
PLACES = [f"cuda:{place}" for place in range(COUNT)] * (3 - COUNT)
WIDTH = 1024  # a block's copy then takes longer than its kernels


def _ids(seed: int) -> Tensor:
    return torch.randint(3, 55, (2, 7), generator=torch.Generator().manual_seed(seed)).cuda(0)


def _flow(first: int) -> tuple[DataFlow, torch.nn.Module]:
    model, reference = pair(WIDTH)
    return placed(model, PLACES, blocks([0, 1, 2, 4, 5]), first), reference.cuda(0)


@pytest.mark.parametrize("first", [LAYERS, 3])
def test_recorded_passes_copy_pinned_weights(first: int) -> None:
    flow, reference = _flow(first)
    assert flow.module.model.layers[0].mlp.up_proj.weight.is_pinned()
    for seed in (1, 2, 3):
        expected = reference.generate(_ids(seed), **OPTIONS)
        with flow.applied() as model:
            assert model.generate(_ids(seed), **OPTIONS).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (31, 2)


@pytest.mark.parametrize("first", [LAYERS, 3])
def test_a_call_gives_the_result_of_one_gpu(first: int) -> None:
    flow, reference = _flow(first)
    with torch.no_grad():
        for seed, chunks in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 1)):
            found = flow(input_ids=_ids(seed), use_cache=False, chunks=chunks).logits
            expected = reference(input_ids=_ids(seed), use_cache=False).logits
            torch.testing.assert_close(found, expected)
    flow.undo()
    for parameter in flow.module.parameters():
        assert devices.location(parameter) == devices.HOST and not parameter.is_pinned()


@pytest.mark.parametrize("on_cpu, resting", [([3], [1]), ([0, 2, 4], [1, 3, 5])])
def test_blocks_may_stay_rest_or_be_computed_by_the_cpu(
    on_cpu: list[int], resting: list[int]
) -> None:
    """Tokens are replayed: recorded pieces of the GPU, and the operations of the CPU's blocks."""
    model, reference = pair()
    flow = mixed(model, "cuda:0", "cpu:0", on_cpu, resting)
    layers = flow.module.model.layers
    assert layers[resting[0]].mlp.up_proj.weight.is_pinned()
    assert layers[on_cpu[0]].mlp.up_proj.weight.device.type == "cpu"
    reference.cuda(0)
    for seed in (1, 2, 3):
        expected = reference.generate(_ids(seed), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(_ids(seed), **OPTIONS).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (31, 2)


def test_generations_in_flight_take_turns_at_the_slots() -> None:
    flow, reference = _flow(3)
    prompts = [_ids(seed) for seed in range(4)]
    found = list(flow.generate_many(prompts, in_flight=2, **OPTIONS))
    for prompt, text in zip(prompts, found, strict=True):
        assert text.tolist() == reference.generate(prompt, **OPTIONS).tolist()


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_a_mixture_gets_the_experts_that_its_tokens_choose(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LEAST_EXPERT_BYTES", 1)
    model, reference = mixture(how, WIDTH)
    reference.cuda(0)
    flow = placed(model, PLACES, blocks([0, 1, 2, 4, 5]), 3)
    for seed in (1, 2):
        with flow.applied() as applied:
            applied(_ids(seed))
            spoil(flow)
            found = applied.generate(_ids(seed), **OPTIONS)
        assert found.tolist() == reference.generate(_ids(seed), **OPTIONS).tolist()
    assert "experts rest on the host" in flow.generation_report.not_recorded_because
