"""Stages with different numbers of replicas over four processes of gloo: losses, gradients and
checkpoints are the unsplit model's."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranked_models as models
import ranked_replicas as ranked
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool
from ranked import joined, unsplit_step
from replicated import by_stage, replicated, unsplit_loss
from torch import nn

from placer import devices
from placer.executor.state.replication import Replication, owners
from placer.schema import Placement, Replica

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def check_gradients(parts: list[dict[str, Any]], model: nn.Module) -> None:
    """The owner of each parameter has its gradient of the whole batch."""
    found = joined(parts, "gradients")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name, **EXACT)


@pytest.mark.parametrize(
    ("counts", "chunks", "schedule"),
    [
        ((3, 1), 4, "1f1b"),
        ((1, 3), 2, "zero-bubble"),
        ((2, 1, 1), 3, "1f1b"),
        ((1, 2, 1), 2, "fill-drain"),
        ((1, 1, 2), 3, "zero-bubble"),
        ((1, 2, 1), 6, "1f1b"),
    ],
)
def test_gradients_are_the_unsplit_models(
    ranks: RankPool, counts: tuple[int, ...], chunks: int, schedule: Any
) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.longer_tied_row()
    placement = by_stage(model, counts, chunks=chunks, schedule=schedule)
    losses = [unsplit_loss(model, loss_fn, inputs, target, [12]).item() for _ in range(2)]
    parts = ranks.run(ranked.step, models.longer_tied_row, placement, 2)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    assert [part["stages"] for part in parts] == [[stage] for stage in stages]
    for stage, part in zip(stages, parts, strict=True):
        is_last = stage == len(counts) - 1
        assert part["losses"] == (pytest.approx(losses, abs=1e-10) if is_last else [])
    # deferred weight gradients are complete only at the end
    for stage, part in zip(stages, parts, strict=True):
        assert bool(part["early"]) is (counts[stage] > 1 and schedule != "zero-bubble")
    check_gradients(parts, model)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_a_line_that_visits_the_replicas_twice_has_the_unsplit_models_gradients(
    ranks: RankPool, schedule: Any
) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.longer_tied_row()
    first, last = "cpu:0", "cpu:3"
    places = {"embedding": first, "first": last, "second": first, "norm": last, "head": last}
    placement = by_stage(model, (3, 1), chunks=2, schedule=schedule)
    placement = placement.model_copy(update={"layer_devices": places})
    losses = [unsplit_loss(model, loss_fn, inputs, target, [12]).item() for _ in range(2)]
    parts = ranks.run(ranked.step, models.longer_tied_row, placement, 2)
    assert [part["stages"] for part in parts] == [[0, 2]] * 3 + [[1, 3]]
    assert parts[3]["losses"] == pytest.approx(losses, abs=1e-10)
    check_gradients(parts, model)


def test_first_replicas_have_the_statistics_of_their_units(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.auxiliary()
    # the norm is in the first stage
    for counts, units in (((2, 1, 1), (0, 2)), ((1, 2, 1), (0, 1, 2, 3))):
        placement = by_stage(model, counts, chunks=2)
        parts = ranks.run(ranked.step, models.auxiliary, placement)
        torch.manual_seed(0)
        whole = models.auxiliary()[0]
        loss = unsplit_loss(whole, loss_fn, inputs, target, [2] * 4)
        assert [part["losses"] for part in parts[:3]] == [[], [], []]
        assert parts[3]["losses"] == pytest.approx([loss.item()], abs=1e-10)
        check_gradients(parts, whole)
        torch.manual_seed(0)
        first = models.auxiliary()[0]
        for unit in units:
            first(inputs[2 * unit :][:2])
        for part in parts[: counts[0]]:
            assert part["buffers"].keys() == dict(first.named_buffers()).keys()
            for name, buffer in part["buffers"].items():
                torch.testing.assert_close(buffer, first.get_buffer(name), msg=name, **EXACT)


def test_labels_that_do_not_count_are_weighed_over_all_units(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.padded()
    # the last stage has replicas, and recomputes
    placement = by_stage(model, (1, 1, 2), chunks=2, recompute=("cpu:2", "cpu:3"))
    parts = ranks.run(ranked.step, models.padded, placement)
    loss = unsplit_loss(model, loss_fn, inputs, target, [8])
    for part in parts[2:]:
        assert part["losses"] == pytest.approx([loss.item()], abs=1e-10)
    check_gradients(parts, model)


def test_training_goes_on_from_a_checkpoint_with_other_replicas_or_unsplit(
    ranks: RankPool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.longer_tied_row()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    losses, states = [], []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(unsplit_loss(model, loss_fn, inputs, target, [12]).item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        states.append({name: item.clone() for name, item in model.state_dict().items()})

    rows = [
        (by_stage(model, (2, 1, 1), chunks=2), False),
        (replicated(model, 2, 2, samples=(3, 3), chunks=2), False),
        (replicated(model, 1, 1, chunks=2), False),
        (by_stage(model, (3, 1), chunks=2), True),
    ]
    paths = ["", *(str(tmp_path / f"{index}") for index in range(4))]
    for index, (placement, is_meta) in enumerate(rows):
        found = ranks.run(
            ranked.train, models.longer_tied_row, placement, 2, *paths[index : index + 2], is_meta
        )
        parts = [part for part in found if part is not None]
        assert parts[-1]["losses"] == pytest.approx(losses[2 * index :][:2], abs=1e-10)
        own, after = joined(parts, "own"), states[2 * index + 1]
        assert own.keys() == dict(model.named_parameters()).keys()
        # a process has no state of what another replica owns
        for part in parts:
            assert part["with_state"] == [*part["own"]] and part["states"] == len(part["own"])
        torch.testing.assert_close(parts[-1]["state"], after, **EXACT)

    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        # torch warns that it loads without other processes, as it should here
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=paths[4])
    torch.testing.assert_close(dict(state["model"]), states[7], **EXACT)


def test_processes_divide_parameters_as_one_process_does(ranks: RankPool) -> None:
    model = models.longer_tied_row()[0]
    placement = by_stage(model, (3, 1))
    parts = ranks.run(ranked.step, models.longer_tied_row, placement)
    division = owners(
        model,
        lambda name: devices.parse(placement.layer_devices[name.partition(".")[0]]),
        Replication.from_placement(placement, devices.parse),
    )
    for rank, part in enumerate(parts):
        expected = [name for name, owner in division.items() if owner.index == rank]
        assert expected and [*part["gradients"]] == expected


@pytest.mark.parametrize("is_first", [True, False])
def test_the_model_is_evaluated_by_a_second_pipeline(ranks: RankPool, is_first: bool) -> None:
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.longer_tied_row()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    placement = by_stage(model, (1, 1, 2), chunks=2)
    # both replicas of the last stage own a parameter
    places = {**placement.layer_devices, "norm": "cpu:2"}
    placement = placement.model_copy(update={"layer_devices": places})
    parts = ranks.run(ranked.evaluated, models.longer_tied_row, placement, 2, is_first)
    for step in range(3):
        assert parts[0][step] is None and parts[1][step] is None
        for part in parts[2:]:
            torch.testing.assert_close(part[step], model(inputs), msg=f"after {step}", **EXACT)
        optimizer.zero_grad()
        unsplit_loss(model, loss_fn, inputs, target, [12])
        optimizer.step()
    torch.testing.assert_close(parts[3][-1], dict(model.state_dict()), **EXACT)


def test_the_last_stage_has_the_results_of_all_units(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.skips()
    placement = by_stage(model, (2, 1, 1), chunks=2)
    *others, outputs = ranks.run(ranked.results, models.skips, placement)
    assert others == [None] * 3
    torch.testing.assert_close(outputs, model.eval()(inputs), **EXACT)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_pipeline_alone_runs_as_one_unit_of_each_micro_batch(
    ranks: RankPool, schedule: str
) -> None:
    places = {str(index): f"cpu:{index // 2}" for index in range(8)}
    parts = ranks.run(ranked.split_into_units, models.chain, places, 8, schedule)
    assert [part["schedule"] for part in parts] == ["UnitSchedule"] * 4
    losses, gradients, _ = unsplit_step(models.chain, 8)
    assert parts[-1]["losses"] == pytest.approx(losses, abs=1e-10)
    torch.testing.assert_close(joined(parts, "gradients"), gradients, **EXACT)


def test_a_unit_that_fails_is_named_by_its_micro_batch(ranks: RankPool) -> None:
    placement = by_stage(models.longer_tied_row()[0], (1, 2, 1), chunks=2)
    first, *others = ranks.run(ranked.failing_unit, models.longer_tied_row, placement, 3)
    message = "StageError: micro-batch 1 failed in the forward pass of segment 0 of 3 on cpu, layer"
    assert first.startswith(f"{message} 'embedding'") and others == [""] * 3


def unlike_shares() -> Placement:
    placement = by_stage(models.chain()[0], (2, 1, 1))
    shares = tuple(
        Replica(device=f"cpu:{index}", samples=samples) for index, samples in ((0, 3), (1, 1))
    )
    return placement.model_copy(update={"replicas": {"cpu:0": shares}, "batch_size": 4})


@pytest.mark.parametrize(
    ("placement", "what", "message"),
    [
        (
            by_stage(models.chain()[0], (3, 1)),
            "",
            "InputError: example_inputs have 8 samples, and stages with 3-1 replicas divide a micro"
            "-batch into 3 equal units; give micro-batches of a multiple of 3 samples",
        ),
        (
            unlike_shares(),
            "",
            r"PlacementError: the stages have different numbers of replicas, 2-1-1, and shares of "
            r"\[3, 1\] samples, which placer.distributed does not run; give the replicas of a",
        ),
        (
            by_stage(models.chain()[0], (2, 1, 1)),
            "group",
            "InputError: the placement has replicas, and the group has 2 of 4 processes: leave",
        ),
        (
            by_stage(models.chain()[0], (2, 1, 1)),
            "second",
            "InputError: '.*' belongs to process(es)? .* since an earlier pipeline of this model",
        ),
        (
            by_stage(models.chain()[0], (2, 1, 1), schedule="interleaved"),
            "",
            "InputError: schedule 'interleaved' needs several stages on a device",
        ),
    ],
)
def test_what_replicas_by_stage_do_not_allow_is_refused(
    ranks: RankPool, placement: Placement, what: str, message: str
) -> None:
    found = list(filter(None, ranks.run(ranked.refusal, models.chain, placement, what)))
    assert found and all(re.match(message, one) for one in found), found
