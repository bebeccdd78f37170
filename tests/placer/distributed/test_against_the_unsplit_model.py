"""Four processes over gloo: losses, gradients and buffers are the unsplit model's over the same
micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import ranked_models as models
import ranked_oddities as oddities
import ranked_training as training
import torch
from rank_pool import RankPool
from ranked import joined, split_step, split_step_held_to_its_layout, unsplit_pass, unsplit_step

from placer import devices
from placer.capture.capture import capture_graph

EXACT = 1e-10


def spread(make: Any, granularity: Any = "submodule", devices: int = 4) -> dict[str, str]:
    """Layers in order, as many on each device."""
    model, inputs, _, _ = make()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    names = [layer.name for layer in capture_graph(model, args, kwargs, granularity).layers]
    return {name: f"cpu:{index * devices // len(names)}" for index, name in enumerate(names)}


def check(
    ranks: RankPool,
    make: Any,
    places: dict[str, str],
    chunks: int,
    schedule: str,
    batches: int = 1,
    recompute: tuple[str, ...] = (),
    verify: bool = True,
) -> Any:
    count = len(set(places.values()))
    members = list(range(count)) if count < 4 else None
    parts = ranks.run(
        split_step, make, places, chunks, schedule, batches, members, recompute, verify
    )
    losses, gradients, buffers = unsplit_step(make, chunks, batches)
    (ours,) = [part["losses"] for part in parts if part and part["losses"]]
    assert ours == pytest.approx(losses, abs=EXACT)
    found = joined(parts, "gradients")
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, atol=EXACT, rtol=EXACT, msg=name)
    state = joined(parts, "buffers")
    assert state.keys() == buffers.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(state[name], buffer, atol=EXACT, rtol=EXACT, msg=name)
    return parts


@pytest.mark.covering
@pytest.mark.parametrize(
    ("schedule", "library"),
    [
        ("fill-drain", "ScheduleGPipe"),
        ("1f1b", "Schedule1F1B"),
        ("zero-bubble", "ScheduleInterleavedZeroBubble"),
    ],
)
def test_a_chain_trains_under_every_schedule(ranks: RankPool, schedule: str, library: str) -> None:
    parts = check(ranks, models.chain, spread(models.chain), 8, schedule)
    assert [part["schedule"] for part in parts] == [library] * 4
    assert [part["stages"] for part in parts] == [[0], [1], [2], [3]]


def test_labels_that_are_left_out_count_in_no_micro_batch(ranks: RankPool) -> None:
    places = spread(models.padded)
    parts = ranks.run(split_step, models.padded, places, len(models.padded()[1]) // 2, "1f1b")
    losses, gradients, _ = unsplit_step(models.padded, 1)
    assert [part["losses"] for part in parts if part["losses"]] == [
        pytest.approx(losses, abs=EXACT)
    ]
    for name, gradient in joined(parts, "gradients").items():
        torch.testing.assert_close(gradient, gradients[name], atol=EXACT, rtol=EXACT, msg=name)


def test_batches_and_results_that_are_not_contiguous_pass_the_librarys_checks(
    ranks: RankPool,
) -> None:
    places = spread(models.strided)
    parts = ranks.run(split_step_held_to_its_layout, models.strided, places, 4, "1f1b")
    losses, gradients, _ = unsplit_step(models.strided, 4)
    assert [part["losses"] for part in parts if part["losses"]] == [
        pytest.approx(losses, abs=EXACT)
    ]
    for name, gradient in joined(parts, "gradients").items():
        torch.testing.assert_close(gradient, gradients[name], atol=EXACT, rtol=EXACT, msg=name)


def test_fewer_micro_batches_than_stages_still_train(ranks: RankPool) -> None:
    check(ranks, models.chain, spread(models.chain), 2, "1f1b")


ROUND_AND_ROUND = {
    "layers.0": "cpu:0", "layers.1": "cpu:1", "layers.2": "cpu:0", "layers.3": "cpu:2",
    "layers.4": "cpu:3", "layers.5": "cpu:1", "add": "cpu:0", "norm": "cpu:2",
}  # fmt: skip


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    ("schedule", "library"),
    [
        ("fill-drain", "ScheduleLoopedBFS"),
        ("interleaved", "ScheduleInterleaved1F1B"),
        ("zero-bubble", "ScheduleInterleavedZeroBubble"),
    ],
)
def test_devices_that_are_left_and_come_back_to_hold_several_stages(
    ranks: RankPool, schedule: str, library: str
) -> None:
    parts = check(ranks, models.skips, ROUND_AND_ROUND, 4, schedule)
    assert [part["schedule"] for part in parts] == [library] * 4
    assert [len(part["stages"]) for part in parts] == [4] * 4


@pytest.mark.exhaustive
def test_resnet18_has_the_unsplit_gradients_and_running_statistics(ranks: RankPool) -> None:
    check(ranks, models.small_resnet18, spread(models.small_resnet18), 2, "1f1b")


@pytest.mark.exhaustive
def test_the_skips_of_a_unet_pass_through_every_stage_between(ranks: RankPool) -> None:
    places = spread(models.small_unet)
    # a skip joins them
    assert places["inc"] == "cpu:0" and places["up4"] == "cpu:3"
    check(ranks, models.small_unet, places, 2, "1f1b")


@pytest.mark.exhaustive
def test_the_tied_weight_of_a_gpt_gets_the_gradients_of_both_its_uses(ranks: RankPool) -> None:
    places = spread(models.tied_gpt, 2)
    assert places["token_embedding"] == "cpu:0" and places["head"] == "cpu:3"
    check(ranks, models.tied_gpt, places, 4, "zero-bubble")


def test_three_devices_share_a_tied_weight_among_the_first_and_the_last(ranks: RankPool) -> None:
    # the line runs through the processes 2, 0, 1
    places = {"embedding": "cpu:2", "mix": "cpu:0", "head": "cpu:1"}
    check(ranks, models.tied_tokens, places, 4, "1f1b")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_layers_in_several_processes_read_one_plain_tensor(ranks: RankPool, schedule: str) -> None:
    places = {"front": "cpu:0", "middle": "cpu:1", "back": "cpu:2"}
    check(ranks, models.plain_table, places, 4, schedule)


def test_a_frozen_tied_weight_is_used_and_not_trained(ranks: RankPool) -> None:
    places = {"embedding": "cpu:0", "mix": "cpu:1", "head": "cpu:2"}
    check(ranks, models.frozen_tied_tokens, places, 4, "zero-bubble")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_gradients_of_two_batches_add_up_also_those_of_tied_weights(
    ranks: RankPool, schedule: str
) -> None:
    check(ranks, models.tied_row, models.TIED_ROW, 2, schedule, batches=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_devices_that_recompute_have_the_same_gradients(ranks: RankPool, schedule: str) -> None:
    places = {**ROUND_AND_ROUND, "layers.5": "cpu:3", "add": "cpu:3", "norm": "cpu:3"}
    check(ranks, models.skips, places, 4, schedule, recompute=("cpu:0", "cpu:3"))


def test_a_frozen_beginning_gets_no_gradients(ranks: RankPool) -> None:
    check(ranks, models.frozen_beginning, spread(models.frozen_beginning), 4, "1f1b")


@pytest.mark.exhaustive
def test_bert_runs_with_keyword_arguments_and_its_own_result(ranks: RankPool) -> None:
    check(ranks, models.bert, spread(models.bert, 3, devices=2), 2, "1f1b")


def test_an_output_that_the_loss_does_not_use_is_no_hindrance(ranks: RankPool) -> None:
    check(
        ranks, models.two_outputs, {"front": "cpu:0", "aside": "cpu:1", "back": "cpu:2"}, 2, "1f1b"
    )
    check(
        ranks,
        models.two_outputs,
        {"front": "cpu:0", "aside": "cpu:2", "back": "cpu:1"},
        2,
        "zero-bubble",
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_what_the_loss_does_not_reach_in_the_last_stage_has_no_gradient(
    ranks: RankPool, schedule: str
) -> None:
    parts = check(
        ranks,
        models.two_outputs,
        {"front": "cpu:0", "aside": "cpu:1", "back": "cpu:1"},
        2,
        schedule,
    )
    assert (
        parts[1]["gradients"]["aside.weight"] is None
        and parts[1]["gradients"]["back.weight"] is not None
    )


def test_masks_whole_numbers_sizes_and_complex_numbers_cross(ranks: RankPool) -> None:
    check(
        ranks,
        models.masked,
        {"front": "cpu:0", "middle": "cpu:1", "back": "cpu:2"},
        4,
        "1f1b",
        verify=False,
    )  # a size of the batch counts


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_numbers_that_are_taken_from_tensors_are_those_of_each_micro_batch(
    ranks: RankPool, schedule: str
) -> None:
    places = {"front": "cpu:0", "aside": "cpu:1", "middle": "cpu:2", "back": "cpu:3"}
    check(ranks, oddities.counted, places, 4, schedule, batches=2, verify=False)


@pytest.mark.parametrize("recompute", [(), ("cpu:1",)])
def test_a_buffer_that_changes_is_in_a_backward_pass_what_it_was_in_the_forward_pass(
    ranks: RankPool, recompute: tuple[str, ...]
) -> None:
    places = {"front": "cpu:0", "cool": "cpu:1", "back": "cpu:1"}
    check(
        ranks,
        oddities.tempered,
        places,
        4,
        "fill-drain",
        batches=2,
        recompute=recompute,
        verify=False,
    )


def test_branches_that_take_turns_are_one_stage_a_device(ranks: RankPool) -> None:
    places = {"stem": "cpu:0", "left": "cpu:1", "right": "cpu:0", "join": "cpu:1"}
    parts = check(ranks, models.branches, places, 4, "1f1b")
    assert [part["stages"] for part in parts if part] == [[0], [1]]


def test_an_input_without_a_batch_goes_to_every_micro_batch(ranks: RankPool) -> None:
    check(ranks, models.unbatched, {"front": "cpu:0", "back": "cpu:1"}, 4, "1f1b")


@pytest.mark.parametrize("chunks", [4, 8])
def test_one_row_for_all_samples_goes_to_every_micro_batch_also_of_one_sample(
    ranks: RankPool, chunks: int
) -> None:
    check(ranks, oddities.positioned, {"front": "cpu:0", "back": "cpu:1"}, chunks, "1f1b")


def test_one_process_runs_the_whole_model(ranks: RankPool) -> None:
    check(ranks, models.chain, dict.fromkeys(spread(models.chain), "cpu:0"), 4, "1f1b")


def test_what_has_as_many_rows_as_samples_by_chance_is_no_batch(ranks: RankPool) -> None:
    places = {"front": "cpu:0", "back": "cpu:1"}
    check(ranks, oddities.mixed, places, 2, "1f1b")
    _, found, *_ = ranks.run(training.results, oddities.mixed, places)
    torch.manual_seed(0)
    model, inputs, _, _ = oddities.mixed()
    with torch.no_grad():
        # the mean, no rows
        torch.testing.assert_close(tuple(found), model.eval()(*inputs), atol=EXACT, rtol=EXACT)


def test_what_is_made_of_no_input_is_as_every_micro_batch_has_it_and_sizes_are_the_batchs(
    ranks: RankPool,
) -> None:
    _, found, *_ = ranks.run(
        training.results, oddities.windowed, {"front": "cpu:0", "back": "cpu:1"}
    )
    torch.manual_seed(0)
    model, inputs, *_ = oddities.windowed()
    with torch.no_grad():
        torch.testing.assert_close(found, model.eval()(inputs))


_TRAINED = {"stem": "cpu:0", "norm": "cpu:0", "aux": "cpu:0", "body": "cpu:1", "head": "cpu:1"}


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    "moved", [{}, {"norm": "cpu:1"}, {"stem": "cpu:1", "norm": "cpu:0"}, {"body": "cpu:0"}]
)
def test_evaluation_on_a_map_of_its_own_has_the_weights_as_they_are_trained(
    ranks: RankPool, moved: dict[str, str]
) -> None:
    others = _TRAINED | moved
    if others["stem"] == "cpu:1":  # the line of devices begins with the other one
        others |= {"norm": "cpu:1", "body": "cpu:0", "head": "cpu:0"}
    parts = [
        part
        for part in ranks.run(training.evaluated_elsewhere, models.auxiliary, _TRAINED, others)
        if part
    ]
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.auxiliary()
    optimizer = training.OPTIMIZERS["sgd"](model.parameters())
    expected = []
    for _ in range(2):
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            unsplit_pass(model, inputs, target, loss_fn, 2)
            optimizer.step()
        with torch.no_grad():
            expected.append(model.eval()(inputs))
    (made,) = [results for results, _ in parts if results]
    torch.testing.assert_close(made, expected)
    (weights,) = [weights for _, weights in parts if weights]
    torch.testing.assert_close(weights, dict(model.state_dict()))


def test_a_buffer_that_training_changes_elsewhere_is_refused(ranks: RankPool) -> None:
    told = ranks.run(
        training.trained_elsewhere, models.auxiliary, _TRAINED, _TRAINED | {"norm": "cpu:1"}
    )
    assert (
        "'norm.running_mean' changes while the model runs, "
        "and belongs to process 0 since an earlier" in str(told[0])
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_weights_that_wrap_others_train_where_processes_share_them(
    ranks: RankPool, schedule: str
) -> None:
    check(ranks, models.quantised, spread(models.quantised), 4, schedule, batches=2)


def test_weights_that_wrap_others_are_gathered_and_written_as_what_they_are(
    ranks: RankPool, tmp_path: Any
) -> None:
    places = spread(models.quantised)
    gathered, again = ranks.run(
        training.gathered_and_loaded, models.quantised, places, str(tmp_path)
    )[0]
    torch.manual_seed(0)
    expected = models.quantised()[0].state_dict()
    for found in (gathered, again):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert type(found[name]) is type(tensor), name
            parts = zip(devices.parts(found[name]), devices.parts(tensor), strict=True)
            assert all(torch.equal(one, other) for one, other in parts), name
