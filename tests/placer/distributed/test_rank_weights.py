"""Weights and buffers of several processes: what they share, what is frozen, what was on meta."""

from __future__ import annotations

import re

import pytest
import ranked
import ranked_models
import ranked_oddities as models
import ranked_training as training
import torch
from rank_pool import RankPool
from ranked import joined

CHAIN = {str(index): f"cpu:{index // 2}" for index in range(8)}
AROUND = {"front": "cpu:0", "norm": "cpu:0", "back": "cpu:1", "norm@1": "cpu:0"}


def test_a_buffer_that_two_stages_of_one_device_change_is_refused_for_several_micro_batches(
    ranks: RankPool,
) -> None:
    for found in ranks.run(training.refusal, models.normalised_twice, AROUND)[:2]:
        assert re.match(
            r"PlacementError: layers 'norm', 'norm@1' use the buffer 'norm\.\w+', which the model "
            r"changes while it runs, and other devices run layers between them, .*; "
            r"place those on cpu:0 too, or give chunks=1",
            found,
        )


def test_a_plain_tensor_that_layers_of_several_devices_change_is_refused(ranks: RankPool) -> None:
    places = {"front": "cpu:0", "middle": "cpu:1", "back": "cpu:1"}
    for found in ranks.run(training.refusal, ranked_models.written_table, places)[:2]:
        assert re.match(
            r"PlacementError: layers 'front', 'middle' use the plain tensor 'constant table', "
            r"which the model changes while it runs; place them on one device",
            found,
        )


def test_one_micro_batch_changes_a_buffer_in_two_stages_as_the_unsplit_model_does(
    ranks: RankPool,
) -> None:
    parts = ranks.run(ranked.split_step, models.normalised_twice, AROUND, 1, "1f1b", 2, [0, 1])
    _, _, buffers = ranked.unsplit_step(models.normalised_twice, 1, 2)
    for name, buffer in joined(parts, "buffers").items():
        torch.testing.assert_close(buffer, buffers[name], atol=1e-10, rtol=1e-10, msg=name)


def test_a_buffer_on_meta_that_no_state_has_is_asked_for(ranks: RankPool) -> None:
    parts = ranks.run(training.meta_buffer, models.shifted, {"front": "cpu:0", "back": "cpu:1"})
    assert parts[0][0] == (
        "InputError: buffer 'shift' was on meta and is part of no state_dict, so that it has no "
        "values: give it some with pipeline.module.get_buffer('shift').copy_(...) in this process"
    )
    losses, _, _ = ranked.unsplit_step(models.shifted, 2)
    assert parts[1][1] == pytest.approx(losses[0], abs=1e-10)


def test_a_tied_weight_may_be_frozen_for_some_steps(ranks: RankPool) -> None:
    name = "embedding.weight"
    parts = ranks.run(training.frozen_later, ranked_models.tied_row, ranked_models.TIED_ROW, name)
    steps = [joined(parts, str(step)) for step in range(3)]
    _, gradients, _ = ranked.unsplit_step(ranked_models.tied_row, 2)
    assert steps[1][name] is None
    for step in (0, 2):
        torch.testing.assert_close(steps[step][name], gradients[name], atol=1e-10, rtol=1e-10)


def test_gradients_that_could_not_come_are_refused(ranks: RankPool) -> None:
    first, second, *_ = ranks.run(training.thawed, ranked_models.frozen_beginning, CHAIN)
    assert (
        "an input requires a gradient, and a pipeline over several processes gives inputs none"
        in first[0]
    )
    assert "parameter '0.1.weight' required no gradient when the pipeline was built" in first[1]
    assert "parameter '2.1.weight' required no gradient when the pipeline was built" in second[0]


def test_complex_gradients_count_whole_in_the_norm(ranks: RankPool) -> None:
    places = {"front": "cpu:0", "back": "cpu:1"}
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.waves()
    for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
        (loss_fn(model(part), goal) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    parts = ranks.run(training.clipped_norm, models.waves, places, 0.1)
    assert [part["norm"] for part in parts[:2]] == pytest.approx([norm.item()] * 2)
    found = joined(parts, "gradients")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_hooks_see_the_gradient_of_the_whole_batch(ranks: RankPool, schedule: str) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.bare()
    for parameter in model.parameters():
        parameter.register_hook(training.cut_off)
    loss_fn(model(inputs), target).backward()
    found: dict[str, torch.Tensor] = {}
    for part in ranks.run(
        training.hooked,
        models.bare,
        {"front": "cpu:0", "middle": "cpu:1", "back": "cpu:2"},
        schedule,
    ):
        found |= part or {}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-10, rtol=1e-10, msg=name)


def test_hooks_on_weights_of_several_processes_are_refused(ranks: RankPool) -> None:
    places = {"embedding": "cpu:0", "mix": "cpu:1", "head": "cpu:2"}
    parts = ranks.run(training.hooked, ranked_models.tied_tokens, places, "1f1b")
    refused = (
        "InputError: parameter 'embedding.weight' has a hook on its gradient, "
        "and layers on several devices use it"
    )
    assert all(at_build.startswith(refused) for at_build, _ in parts[:3]) and parts[0][
        1
    ].startswith(refused)
