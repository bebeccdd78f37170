"""Four processes over gloo: training, checkpoints on any number of processes, running forwards, and
what is refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranked
import ranked_models as models
import refused
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool

import placer
from placer.distributed import schedules
from placer.errors import InputError

CHAIN = {str(index): f"cpu:{index // 2}" for index in range(8)}
NOTHING_FITS = {"status": "infeasible", "objective": "throughput", "layer_devices": {}}


def reported(parts: list[Any]) -> Any:
    """What the one process said that had something to say."""
    (answer,) = [part for part in parts if part]
    return answer


def test_a_solved_placement_runs_as_it_says(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.chain()
    pinned = {"0": "cpu:1", "2": "cpu:0", "5": "cpu:3", "7": "cpu:2"}
    placement = placer.suggest(
        model,
        inputs[:2],
        devices=[f"cpu:{index}" for index in range(4)],
        granularity="submodule",
        training=True,
        chunks=4,
        constraints=placer.Constraints(pinned=pinned),
    )
    parts = ranks.run(ranked.placed_step, models.chain, placement)
    assert [part["stages"] for part in parts] == [
        [placement.stages.index(f"cpu:{rank}")] for rank in range(4)
    ]
    assert {part["schedule"] for part in parts} == {"Schedule1F1B"} and placement.schedule == "1f1b"
    losses, gradients, _ = ranked.unsplit_step(models.chain, 4)
    assert reported([part["losses"] for part in parts]) == pytest.approx(losses, abs=1e-10)
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-10, msg=name)


def test_training_goes_on_from_a_checkpoint_on_fewer_processes_or_unsplit(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    losses, model = ranked.unsplit_training(models.tied_row, 4, 5)
    parts = ranks.run(ranked.train, models.tied_row, models.TIED_ROW, 4, 3, path)
    assert reported([part["losses"] for part in parts]) == pytest.approx(losses[:3], abs=1e-10)
    on_two = {name: f"cpu:{int(device[-1]) // 2}" for name, device in models.TIED_ROW.items()}
    resumed = ranks.run(ranked.train_on, models.tied_row, on_two, 4, 2, path)
    # the momentum was kept
    assert reported(resumed) == pytest.approx(losses[3:], abs=1e-10)

    _, trained = ranked.unsplit_training(models.tied_row, 4, 3)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        # torch tells that it loads without other processes: that is what is tested
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(state["model"][name], tensor, atol=1e-10, rtol=1e-10, msg=name)


def test_the_whole_state_is_gathered_under_the_models_own_keys(ranks: RankPool) -> None:
    _, trained = ranked.unsplit_training(models.skips, 2, 1)
    places = {**{f"layers.{index}": f"cpu:{index % 4}" for index in range(6)}, "norm": "cpu:3"}
    parts = ranks.run(ranked.train, models.skips, places, 2, 1)
    state = parts[0]["state"]
    assert (
        list(state) == list(trained.state_dict())
        and [part["state"] for part in parts[1:]] == [None] * 3
    )
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(state[name], tensor, atol=1e-10, rtol=1e-10, msg=name)
    trained.load_state_dict(state)


def test_a_model_on_meta_runs_once_it_has_a_state(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, _, _, _ = models.tied_row()
    losses, _, _ = ranked.unsplit_step(models.tied_row, 4)
    parts = ranks.run(ranked.from_meta, models.tied_row, models.TIED_ROW, 4, model.state_dict())
    assert all("has no values here yet: call load" in message for message, _ in parts)
    assert reported([loss for _, loss in parts]) == pytest.approx(losses[0], abs=1e-10)


def test_outputs_in_eval_mode_are_the_unsplit_models(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.skips()
    places = {
        **{f"layers.{index}": f"cpu:{index // 2}" for index in range(6)},
        "add": "cpu:3",
        "norm": "cpu:3",
    }
    parts = ranks.run(ranked.results, models.skips, places, 4, 2)
    assert parts[:3] == [[None, None]] * 3
    for outputs in parts[3]:  # the second batch did not disturb the first one's
        torch.testing.assert_close(outputs, model.eval()(inputs))


def test_outputs_of_a_model_that_writes_to_its_input_are_the_unsplit_models(
    ranks: RankPool,
) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.chain()
    parts = ranks.run(ranked.results, models.chain, CHAIN, 2)
    torch.testing.assert_close(parts[3][0], model.eval()(inputs))


def test_keyword_arguments_are_the_same_in_any_order(ranks: RankPool) -> None:
    places = {"front": "cpu:0", "back": "cpu:1"}
    assert all(ranks.run(ranked.keywords_in_another_order, models.unbatched, places)[:2])


def test_a_state_for_a_process_that_is_none_is_refused_before_anything_is_sent(
    ranks: RankPool,
) -> None:
    for found in ranks.run(refused.state, models.chain, CHAIN, 4):
        assert found == "InputError: rank=4 is not a process of this pipeline; give one from 0 to 3"


def test_devices_come_back_to_run_forwards_too(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.skips()
    places = {**{f"layers.{index}": f"cpu:{index % 4}" for index in range(6)}, "norm": "cpu:2"}
    outputs = [
        out
        for part in ranks.run(ranked.results, models.skips, places, 4)
        for out in part
        if out is not None
    ]
    torch.testing.assert_close(outputs, [model.eval()(inputs)])


def test_gradients_are_clipped_by_their_norm_over_all_processes(ranks: RankPool) -> None:
    torch.manual_seed(0)
    _, gradients, _ = ranked.unsplit_step(models.chain, 4)
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    parts = ranks.run(ranked.clipped, models.chain, CHAIN, 4, 0.1)
    assert [found for found, _ in parts] == pytest.approx([norm.item()] * 4)
    ours = {name: gradient for _, part in parts for name, gradient in part.items()}
    for name, gradient in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(ours[name], gradient.grad, msg=name)


def test_a_smaller_last_batch_trains_on_a_second_pipeline_of_the_same_model(
    ranks: RankPool,
) -> None:
    sizes = [8, 8, 6, 8, 6]
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.tied_row()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for size in sizes:
        optimizer.zero_grad()
        loss_fn(model(inputs[:size]), target[:size]).backward()
        optimizer.step()
    state = ranked.joined(ranks.run(ranked.epoch, models.tied_row, models.TIED_ROW, sizes), "state")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            state[name], parameter.detach(), atol=1e-10, rtol=1e-10, msg=name
        )


def test_a_model_that_trains_is_evaluated_by_a_second_pipeline(ranks: RankPool) -> None:
    places = {
        **{f"layers.{index}": f"cpu:{index // 2}" for index in range(6)},
        "add": "cpu:3",
        "norm": "cpu:3",
    }
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.skips()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = ranks.run(ranked.evaluated, models.skips, places, 2)[3]
    for step, outputs in enumerate(found):
        torch.testing.assert_close(
            outputs, model.eval()(inputs), atol=1e-10, rtol=1e-10, msg=f"after {step} steps"
        )
        model.train()
        optimizer.zero_grad()
        for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
            (loss_fn(model(part), goal) / 2).backward()
        optimizer.step()


def test_a_process_outside_of_the_group_is_told_so(ranks: RankPool) -> None:
    on_two = {name: device.replace("2", "0").replace("3", "1") for name, device in CHAIN.items()}
    told = ranks.run(ranked.outside_of_the_group, models.chain, on_two)
    assert told[:2] == ["", ""] and all(
        f"process {rank} is not in the group" in told[rank] for rank in (2, 3)
    )


def test_what_belongs_to_other_processes_is_freed_with_the_model(ranks: RankPool) -> None:
    for part in ranks.run(ranked.left_over, models.chain, CHAIN):
        assert part["own"] and part["alive"] == part["own"]


@pytest.mark.parametrize(
    "hosts", [["host0", "host0", "host1", "host1"], ["left", "left", "right", "right"]]
)
def test_a_placement_for_two_hosts_runs_on_the_processes_of_two_nodes(
    ranks: RankPool, hosts: list[str]
) -> None:
    places = {
        name: f"host{1 - int(device[-1]) // 2}/cpu:{int(device[-1]) % 2}"
        for name, device in CHAIN.items()
    }
    losses, _, _ = ranked.unsplit_step(models.chain, 4)
    parts = ranks.run(ranked.on_hosts, models.chain, places, [0, 0, 1, 1], hosts)
    # host1 has the first layers
    assert [part[0].split(".")[0] for part in parts] == ["4", "6", "0", "2"]
    assert reported([loss for _, loss in parts]) == pytest.approx(losses[0], abs=1e-10)


@pytest.mark.exhaustive
def test_two_hosts_are_profiled_placed_on_and_trained_on(ranks: RankPool) -> None:
    pinned = {"0": "node9/cpu:1", "2": "node7/cpu:0", "5": "node9/cpu:0", "7": "node7/cpu:1"}
    hosts = ["node7", "node7", "node9", "node9"]
    parts = ranks.run(ranked.from_profile_to_step, models.chain, [0, 0, 1, 1], hosts, pinned)
    # between every two of four devices, both ways
    assert {part["links"] for part in parts} == {12}
    owner = ranked.joined(parts, "owner")
    assert all(
        owner[f"{layer}.1.weight"] == device.split("/")[0] for layer, device in pinned.items()
    )
    losses, gradients, _ = ranked.unsplit_step(models.chain, 4)
    assert reported([part["losses"] for part in parts]) == pytest.approx(losses, abs=1e-10)
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("places", "options", "message"),
    [
        (
            {"0": "cpu:0", "4": "cpu:1"},
            {},
            "PlacementError: the placement uses 2 devices .* the group has 4 processes",
        ),
        (
            {**dict.fromkeys("01234567", "cpu:0"), "1.0": "cpu:1"},
            {},
            r"start 1, .*; no layer that runs is on cpu:1 \('1.0'\): its result is not used, "
            r"or it is one with the",
        ),
        ({}, {}, "PlacementError: the map places no layer"),
        (
            {0: "cpu:0"},
            {},
            "PlacementError: the map has 0, which is not the name of a layer; give {layer: device}",
        ),
        (
            {"nothing": "cpu:0"},
            {},
            "PlacementError: layer 'nothing' is not a module of Sequential; its layers are 0, 1",
        ),
        (
            CHAIN,
            {"group": "mesh"},
            r"InputError: group is a DeviceMesh; give .*: mesh.get_group\('pp'\)",
        ),
        (
            CHAIN,
            {"group": "pp"},
            r"InputError: group is a str; give what torch.distributed.new_group\(\[0, 1, ...\]\)",
        ),
        (
            CHAIN,
            {"group": [0, 1]},
            "InputError: group is a list; give what torch.distributed.new_group",
        ),
        (
            CHAIN,
            {"schedule": "spiral"},
            "InputError: schedule 'spiral' is not known; give one of fill-drain",
        ),
        (
            CHAIN,
            {"schedule": "interleaved"},
            "InputError: schedule 'interleaved' needs several stages on a device",
        ),
        (NOTHING_FITS, {}, "PlacementError: the placement is infeasible and places no layer"),
        (
            "placement.json",
            {},
            "PlacementError: the placement is a str; give a Placement, which Placement.model_val",
        ),
        (
            CHAIN,
            {"recompute": "cpu:0"},
            "InputError: recompute is 'cpu:0'; give the devices that are to recompute, as",
        ),
        (
            CHAIN,
            {"recompute": ["cpu:7"]},
            r"InputError: recompute names 'cpu:7', which has no layers .devices with layers: cpu:0",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_everywhere(
    ranks: RankPool, places: Any, options: Any, message: str
) -> None:
    for found in ranks.run(ranked.refusal, models.chain, places, options):
        assert re.search(message, found), found


def test_batches_that_do_not_fit_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    first, _, _, last = ranks.run(ranked.step_refusals, models.chain, CHAIN)
    assert "give step(inputs, ...) the batch here" in first["nothing"]
    assert (
        "an input has shape (4, 6); 2 micro-batches like the example make (8, 6)"
        in first["too small"]
    )
    assert "build a second pipeline from the same model" in first["too small"]
    assert "not nested as the example was" in first["nested"]
    assert "1 positional arguments and the keywords (none)" in first["nested"]
    assert "a target of shape (4, 6) does not fit a batch of 8 samples" in last["too small"]
    assert "a target '0' of shape (2, 6) does not fit a batch of 8 samples" in last["nested"]
    assert (
        "an input is of torch.float32, and the example's was of torch.float64"
        in first["other type"]
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "class of a model",
            r"InputError: model is the class Sequential; give an instance, such as Sequential\(\)",
        ),
        (
            "class of a loss",
            r"InputError: loss_fn is the class MSELoss; give an instance, such as MSELoss\(\)",
        ),
        (
            "loss with a parameter",
            "InputError: loss_fn has a parameter of its own, 'weight', which would not be trained",
        ),
        (
            "frozen model",
            "InputError: no parameter of this Sequential requires a gradient, "
            "so there is nothing to train",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_everywhere(
    ranks: RankPool, what: str, message: str
) -> None:
    for found in ranks.run(refused.untrained, models.chain, CHAIN, what):
        assert re.match(message, found), found


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("vector", r"InputError: loss_fn returned a tensor of shape \(4, 6\); return one number"),
        ("nothing to learn", "InputError: loss_fn returned a loss without a gradient"),
        (
            "failure",
            r"StageError: micro-batch 0 failed in the forward pass on cpu, layer '\(loss\)': "
            r"KeyError: 'late'",
        ),
    ],
)
def test_a_loss_that_is_none_is_named_where_it_is_computed(
    ranks: RankPool, what: str, message: str
) -> None:
    assert re.match(message, reported(ranks.run(refused.loss, models.chain, what)))


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (
            "forward",
            r"micro-batch 1 failed in the forward pass of segment 0 of 1 on cpu, layer '0': "
            r"IndexError: index",
        ),
        (
            "backward",
            r"micro-batch 0 failed in the backward pass of segment 0 of 1 on cpu: KeyError: 'late'",
        ),
    ],
)
def test_a_pass_that_fails_is_named_as_on_one_host(
    ranks: RankPool, phase: str, message: str
) -> None:
    assert re.match(f"StageError: {message}", reported(ranks.run(refused.layer, phase)))


def test_inference_mode_is_no_obstacle_to_building_and_refused_in_a_step_by_every_process(
    ranks: RankPool,
) -> None:
    # the embedding is tied to the head
    places = {"embedding": "cpu:0", "mix": "cpu:1", "head": "cpu:2"}
    parts = ranks.run(refused.inference_mode, models.tied_tokens, places)[:3]
    assert all(
        "leave torch.inference_mode() for a training step" in message for message, _ in parts
    )
    losses, *_ = ranked.unsplit_step(models.tied_tokens, 4)
    assert reported([loss for _, loss in parts]) == pytest.approx(losses[0], abs=1e-10)


def test_a_checkpoint_that_is_not_there_is_named_everywhere(
    ranks: RankPool, tmp_path: Path
) -> None:
    for found in ranks.run(refused.checkpoint, models.chain, CHAIN, str(tmp_path / "none")):
        assert re.match(
            "InputError: the checkpoint '.*none' cannot be read: .*; give a folder that all", found
        ), found


def test_a_checkpoint_without_a_path_is_refused(ranks: RankPool) -> None:
    # torch asked for a checkpoint_id instead, which is no argument here.
    for found in ranks.run(refused.no_path, models.chain, CHAIN):
        assert found == ["InputError: path is None; give a folder that all processes see"] * 2


@pytest.mark.parametrize(("chunks", "devices", "rounds"), [(7, 3, 1), (9, 2, 1), (11, 4, 2)])
def test_micro_batches_that_a_schedule_cannot_have_name_the_nearest_that_it_can(
    chunks: int, devices: int, rounds: int
) -> None:
    with pytest.raises(InputError, match=f"cannot have {chunks} micro-batches") as error:
        schedules.check("zero-bubble", chunks, devices, rounds)
    below, above = (int(count) for count in re.findall(r"chunks=(\d+)", str(error.value)))
    assert below < chunks < above
    schedules.check("zero-bubble", below, devices, rounds)
    schedules.check("zero-bubble", above, devices, rounds)


def test_a_wrapper_that_cannot_be_captured_is_told_from_what_it_wraps(ranks: RankPool) -> None:
    for found in ranks.run(ranked.refusal, models.replicated_chain, CHAIN, {}):
        assert "there is module.0: give the model that is wrapped, model.module" in found


def test_processes_with_different_models_are_told_so(ranks: RankPool) -> None:
    for found in ranks.run(ranked.different_models):
        assert "process 3 has captured another model" in found


def test_processes_that_cut_the_batch_in_different_ways_are_told_so(ranks: RankPool) -> None:
    for found in ranks.run(ranked.different_chunks, models.chain, CHAIN):
        assert (
            "process 1 was asked to build 2 micro-batches, 1f1b, training, "
            "and process 0 4 micro-batches" in found
        )


def test_under_autocast_gradients_are_the_unsplit_models_there(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.chain()
    model, inputs = model.float(), inputs.float()
    with torch.autocast("cpu", torch.bfloat16):
        for part, goal in zip(inputs.clone().chunk(2), target.chunk(2), strict=True):
            (loss_fn(model(part), goal) / 2).backward()
    found = ranked.joined(ranks.run(ranked.autocast_step, models.chain, CHAIN, 2), "gradients")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
