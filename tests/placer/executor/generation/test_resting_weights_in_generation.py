"""``generate`` with parameters that rest on the host: recorded passes copy them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event, Thread, current_thread
from typing import Any

import generating_models
import pytest
import torch
from mixed_answers import mixed
from resting_models import LAYERS, blocks, pair, placed
from torch import Tensor, nn

from placer import DataFlow, Placement
from placer.testing import logical_devices

PLACES = ["cpu:0", "cpu:1"]
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


def ids(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (2, 7), generator=generator)


@pytest.mark.parametrize(
    "resting, first",
    [
        *(
            pytest.param(numbers, LAYERS, marks=pytest.mark.exhaustive)
            for numbers in ([1, 2, 4], range(LAYERS))
        ),
        ([0, 1, 2, 4, 5], 3),
    ],
)
def test_texts_are_the_unsplit_models_and_come_from_recorded_passes(
    resting: Sequence[int], first: int
) -> None:
    model, reference = pair()
    flow = placed(model, PLACES, blocks(resting), first)
    for seed in (1, 2):
        expected = reference.generate(ids(seed), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(ids(seed), **OPTIONS).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (2 * PASSES - 2, 2)


MIXED = [([3], [1]), ([0, 2, 4], [1, 3, 5]), ([1, 4], [0, 2, 3, 5])]


@pytest.mark.parametrize("on_cpu, resting", MIXED)
def test_blocks_may_stay_rest_or_be_computed_elsewhere(
    on_cpu: list[int], resting: list[int]
) -> None:
    model, reference = pair()
    flow = mixed(model, *PLACES, on_cpu, resting)
    for seed in (1, 2):
        expected = reference.generate(ids(seed), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(ids(seed), **OPTIONS).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (2 * PASSES - 2, 2)
    with torch.no_grad():
        found = flow(input_ids=ids(3), use_cache=False, chunks=2).logits
        expected = reference(input_ids=ids(3), use_cache=False).logits
    torch.testing.assert_close(found, expected, check_device=False)


def test_an_embedding_and_the_head_may_rest_too() -> None:
    model, reference = pair()
    flow = placed(model, PLACES, ["model.embed_tokens", "model.layers.3", "lm_head"])
    expected = reference.generate(ids(1), **OPTIONS)
    with flow.applied() as applied:
        assert applied.generate(ids(1), **OPTIONS).tolist() == expected.tolist()
    assert flow.generation_report.recorded == PASSES - 2


def test_a_recorded_pass_reads_changed_weights() -> None:
    model, reference = pair()
    flow = placed(model, PLACES, blocks([1, 2]))
    for factor in (1.0, -2.0):
        with torch.no_grad():
            for each in (model, reference):
                each.model.layers[1].mlp.up_proj.weight.mul_(factor)
        expected = reference.generate(ids(1), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(ids(1), **OPTIONS).tolist() == expected.tolist()


def test_several_generations_take_turns_at_the_slots() -> None:
    model, reference = pair()
    flow = placed(model, PLACES, blocks([0, 1, 3, 4, 5]), 3)
    prompts = [ids(seed)[:1] for seed in range(3)]
    found = list(flow.generate_many(prompts, in_flight=2, **OPTIONS))
    for prompt, text in zip(prompts, found, strict=True):
        assert text.tolist() == reference.generate(prompt, **OPTIONS).tolist()


def test_a_call_waits_for_a_part_that_another_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = generating_models.pair("t5")
    flow = _with_resting_blocks(model)
    own = [id(one) for one in model.parameters()]
    inside, is_done = Event(), Event()
    attention = type(model.encoder.block[0].layer[0])
    forward = attention.forward

    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_thread() is other and not inside.is_set():
            inside.set()
            is_done.wait(1.0)  # time for the call to take the block's weights for moved ones
        return forward(self, *args, **kwargs)

    def encode() -> None:
        with flow.applied(), torch.no_grad():
            found.append(model.encoder(ids(1)).last_hidden_state)

    found: list[Tensor] = []
    both = {"input_ids": ids(2), "decoder_input_ids": ids(3)}
    other = Thread(target=encode)
    with flow.applied(), torch.no_grad():
        model(**both)
        monkeypatch.setattr(attention, "forward", waits)
        other.start()
        assert inside.wait(60)
        logits = model(**both).logits
        is_done.set()
        other.join()
        monkeypatch.undo()
    expected = reference.encoder(ids(1)).last_hidden_state
    torch.testing.assert_close(found[0], expected, check_device=False)
    expected = reference(**both).logits
    torch.testing.assert_close(logits, expected, check_device=False)
    assert [id(one) for one in model.parameters()] == own


def test_threads_may_run_an_encoder_while_another_decodes() -> None:
    model, reference = generating_models.pair("t5")
    flow = _with_resting_blocks(model)
    prompts = [ids(seed)[:1] for seed in range(4)]
    found = list(flow.generate_many(prompts, in_flight=3, **OPTIONS))
    for prompt, text in zip(prompts, found, strict=True):
        assert text.tolist() == reference.generate(prompt, **OPTIONS).tolist()


def _with_resting_blocks(model: nn.Module) -> DataFlow:
    """Return a flow of an encoder-decoder with the weights of all blocks on the host."""
    blocks_of = [f"{side}.block.{n}" for side in ("encoder", "decoder") for n in range(2)]
    names = ["shared", *blocks_of, "encoder.final_layer_norm", "decoder.final_layer_norm"]
    flow = DataFlow(model, inference_only=True)
    flow.update_flow(
        Placement(
            status="feasible",
            objective="generation",
            layer_devices={name: PLACES[int(name.startswith("decoder"))] for name in names},
            resting=dict.fromkeys(blocks_of, "host"),
        )
    )
    return flow
