"""Replicas over four processes of gloo: losses, gradients and checkpoints are the unsplit
model's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranked_models as models
import ranked_replicas as ranked
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool
from ranked import joined
from replicated import replicated, unsplit_loss
from torch import nn

from placer import devices
from placer.executor.state.replication import Replication, owners
from placer.schema import Placement

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def placed(make: Any, replicas: int, stages: int, **options: Any) -> Placement:
    return replicated(make()[0], replicas, stages, **options)


def unsplit(make: Any, sizes: Sequence[int], batches: int = 1) -> tuple[list[float], nn.Module]:
    """Losses of the unsplit model over parts of a batch, and the model with its gradients."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    losses = [unsplit_loss(model, loss_fn, inputs, target, sizes).item() for _ in range(batches)]
    return losses, model


def check_gradients(parts: list[dict[str, Any]], model: nn.Module) -> None:
    """The owner of each parameter has its gradient of the whole batch."""
    found = joined(parts, "gradients")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name, **EXACT)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_two_pipelines_of_two_stages_have_the_unsplit_models_gradients(
    ranks: RankPool, schedule: Any
) -> None:
    placement = placed(models.tied_row, 2, 2, samples=(2, 2), chunks=2, schedule=schedule)
    parts = ranks.run(ranked.step, models.tied_row, placement, 2)
    losses, model = unsplit(models.tied_row, [8], 2)
    assert [part["stages"] for part in parts] == [[0], [1], [0], [1]]
    # deferred weight gradients are complete only at the end
    assert all(bool(part["early"]) is (schedule == "1f1b") for part in parts)
    for part in parts[1::2]:
        assert part["losses"] == pytest.approx(losses, abs=1e-10)
    check_gradients(parts, model)


def test_four_replicas_with_uneven_shares_weigh_their_samples(ranks: RankPool) -> None:
    parts = ranks.run(ranked.step, models.chain, placed(models.chain, 4, 1, samples=(3, 1, 2, 2)))
    losses, model = unsplit(models.chain, [8])
    for part in parts:
        assert part["losses"] == pytest.approx(losses, abs=1e-10)
    check_gradients(parts, model)


def test_the_pipelines_of_a_placement_may_be_on_two_hosts(ranks: RankPool) -> None:
    text = placed(models.chain, 2, 2, samples=(4, 4)).model_dump_json()
    for index in range(4):
        # the second stage of each pipeline is on the other host
        text = text.replace(f"cpu:{index}", f"host{index % 2}/gpu:{index // 2}")
    placement = Placement.model_validate_json(text.replace("gpu", "cpu"))
    hosts = ["host0", "host0", "host1", "host1"]
    parts = ranks.run(ranked.on_hosts, models.chain, placement, hosts)
    assert [part["stages"] for part in parts] == [[0], [0], [1], [1]]
    check_gradients(parts, unsplit(models.chain, [8])[1])


def test_labels_that_do_not_count_are_weighed_over_all_replicas(ranks: RankPool) -> None:
    # as in a solved placement, the stage's replica is named, too
    options: dict[str, Any] = {"chunks": 2, "recompute": ("cpu:0", "cpu:2")}
    placement = placed(models.padded, 2, 2, samples=(3, 1), **options)
    parts = ranks.run(ranked.step, models.padded, placement)
    losses, model = unsplit(models.padded, [8])
    for part in parts[1::2]:
        assert part["losses"] == pytest.approx(losses, abs=1e-10)
    check_gradients(parts, model)


def test_replicas_normalise_their_samples_and_keep_the_first_ones_statistics(
    ranks: RankPool,
) -> None:
    sizes = [5, 3]
    parts = ranks.run(ranked.step, models.auxiliary, placed(models.auxiliary, 2, 2, samples=sizes))
    losses, model = unsplit(models.auxiliary, sizes)
    for part in parts[1::2]:
        assert part["losses"] == pytest.approx(losses, abs=1e-10)
    check_gradients(parts, model)
    torch.manual_seed(0)
    first, inputs, _, _ = models.auxiliary()
    first(inputs[:5])
    for part in parts:
        for name, buffer in part["buffers"].items():
            torch.testing.assert_close(buffer, first.get_buffer(name), msg=name, **EXACT)


def test_training_goes_on_from_a_checkpoint_with_other_replicas_or_unsplit(
    ranks: RankPool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.tied_row()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    losses, states = [], []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(unsplit_loss(model, loss_fn, inputs, target, [8]).item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        states.append({name: item.clone() for name, item in model.state_dict().items()})

    two_by_two = placed(models.tied_row, 2, 2, samples=(2, 2), chunks=2)
    four_by_one, one = placed(models.tied_row, 4, 1), placed(models.tied_row, 1, 1, chunks=2)
    paths = ["", *(str(tmp_path / f"{index}") for index in range(4))]
    rows = [(two_by_two, False), (four_by_one, False), (one, False), (two_by_two, True)]
    for index, (placement, is_meta) in enumerate(rows):
        found = ranks.run(
            ranked.train, models.tied_row, placement, 2, *paths[index : index + 2], is_meta
        )
        parts = [part for part in found if part is not None]
        assert len(parts) == (4 if placement.replicas else 1)
        stages = len(placement.stages)
        for part in parts[stages - 1 :: stages]:
            assert part["losses"] == pytest.approx(losses[2 * index :][:2], abs=1e-10)
        own, after = joined(parts, "own"), states[2 * index + 1]
        assert own.keys() == dict(model.named_parameters()).keys()
        for name, item in own.items():
            torch.testing.assert_close(item, after[name], msg=name, **EXACT)
        # a process has no state and no gradient of what another replica owns
        for part in parts:
            assert part["with_state"] == [*part["own"]] and part["states"] == len(part["own"])
            # a copy of the tied weight has a gradient, too
            assert part["with_gradient"] - {"embedding.weight"} == part["own"].keys() - {
                "embedding.weight"
            }
        assert sum(part["states"] for part in parts) == len(own)
        assert [part["state"] is None for part in parts] == [True] * (len(parts) - 1) + [False]
        torch.testing.assert_close(parts[-1]["state"], after, **EXACT)

    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        # torch warns that it loads without other processes, as it should here
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=paths[1])
    torch.testing.assert_close(dict(state["model"]), states[1], **EXACT)


@pytest.mark.parametrize(("replicas", "stages"), [(2, 2), (4, 1)])
def test_processes_divide_parameters_as_one_process_does(
    ranks: RankPool, replicas: int, stages: int
) -> None:
    placement = placed(models.tied_row, replicas, stages)
    parts = ranks.run(ranked.step, models.tied_row, placement)
    model = models.tied_row()[0]
    one = Replication.from_placement(placement, devices.parse)
    division = owners(
        model,
        lambda name: devices.parse(placement.layer_devices[name.partition(".")[0]]),
        one,
    )
    for rank, part in enumerate(parts):
        expected = [name for name, owner in division.items() if owner.index == rank]
        assert expected and [*part["gradients"]] == expected


@pytest.mark.parametrize("is_first", [True, False])
def test_replicas_that_train_are_evaluated_by_a_second_pipeline(
    ranks: RankPool, is_first: bool
) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.tied_row()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    placement = placed(models.tied_row, 2, 2, samples=(2, 2), chunks=2)
    parts = ranks.run(ranked.evaluated, models.tied_row, placement, 2, is_first)
    for step in range(3):
        for part in parts[1::2]:
            torch.testing.assert_close(part[step], model(inputs), msg=f"after {step}", **EXACT)
        optimizer.zero_grad()
        unsplit_loss(model, loss_fn, inputs, target, [8])
        optimizer.step()
    torch.testing.assert_close(parts[3][-1], dict(model.state_dict()), **EXACT)


@pytest.mark.parametrize("bucket_bytes", [1, 1000])
def test_tensors_of_every_layout_get_the_values_of_their_owners(
    ranks: RankPool, bucket_bytes: int
) -> None:
    expected = [[1.0] * 3, [3.0] * 6, [], [1.0] * 3, [3.0], [0.0] * 4]
    assert ranks.run(ranked.exchanged, bucket_bytes) == [expected] * 4


def test_a_gradient_of_one_replica_reaches_the_owner_that_has_none(ranks: RankPool) -> None:
    # a replica that has sent its gradient early has none any more
    assert ranks.run(ranked.sums_of_one_gradient) == [None, None, None, [3.0, 3.0]]


def test_a_parameter_that_its_owner_freezes_is_not_trained(ranks: RankPool) -> None:
    name = "first.weight"
    parts = ranks.run(ranked.step, models.tied_row, placed(models.tied_row, 2, 2), 1, name)
    found = joined(parts, "gradients")
    _, model = unsplit(models.tied_row, [8])
    assert model.get_parameter(name).grad is not None and found.pop(name) is None
    for other, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(other).grad, msg=other, **EXACT)


def test_every_last_stage_has_the_results_of_the_whole_batch(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.skips()
    placement = placed(models.skips, 2, 2, samples=(3, 1), chunks=2)
    found = ranks.run(ranked.results, models.skips, placement)
    assert found[0] is None and found[2] is None
    for outputs in found[1::2]:
        torch.testing.assert_close(outputs, model.eval()(inputs), **EXACT)


@pytest.mark.parametrize(
    ("make", "chunks", "what", "message"),
    [
        (
            models.chain,
            1,
            "hook",
            "InputError: parameter '.*' has a hook on its gradient, and replicas of its stage share"
            " each batch, each of which has a part of that; change parameter.grad",
        ),
        (
            models.chain,
            1,
            "group",
            "InputError: the placement has replicas, and the group has 2 of 4 processes: leave",
        ),
        (
            models.chain,
            1,
            "second",
            "InputError: '.*' belongs to processes [01] and [23] since an earlier pipeline of this "
            "model, and this one has no stage with the same processes: place its layers there, or",
        ),
        (
            models.chain,
            8,
            "",
            "InputError: example_inputs have 1 sample for 2 replicas; give one micro-batch of all",
        ),
        (
            models.pairs,
            1,
            "",
            "InputError: process 1 could not combine the losses of micro-batches: BatchError: the "
            "loss of a batch is not|BatchError: the loss of a batch is not what its micro-batches",
        ),
    ],
)
def test_what_replicas_do_not_allow_is_refused(
    ranks: RankPool, make: Any, chunks: int, what: str, message: str
) -> None:
    placement = placed(make, 2, 2, chunks=chunks)
    found = list(filter(None, ranks.run(ranked.refusal, make, placement, what)))
    assert found and all(re.match(message, one) for one in found), found


def test_replicas_need_a_process_for_each_device(ranks: RankPool) -> None:
    for found in ranks.run(ranked.refusal, models.chain, placed(models.chain, 3, 1)):
        assert "uses 3 devices (cpu:0, cpu:1, cpu:2), and the group has 4 processes" in found
