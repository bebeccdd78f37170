"""On real GPUs over NCCL, a process each: what the other tests hold over gloo holds there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ranked
import ranked_models as models
import ranked_replicas
import torch
from rank_pool import RankPool
from replicated import by_stage, replicated, unsplit_loss

from placer.capture.capture import capture_graph
from placer.schema import Schedule

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("ranks")]
COUNT = min(4, torch.cuda.device_count())
CLOSE = 1e-8


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A process for each of up to four GPUs, joined by NCCL."""
    if COUNT < 2:
        pytest.skip(f"needs two GPUs; torch sees {COUNT}")
    pool = RankPool(COUNT, tmp_path_factory.mktemp("gpus"), "nccl")
    yield pool
    pool.close()


def spread(
    make: ranked.Make, granularity: int | str = "submodule", reverse: bool = False
) -> dict[str, str]:
    """Layers in order, as many on each GPU."""
    model, inputs, _, _ = make()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    names = [layer.name for layer in capture_graph(model, args, kwargs, granularity).layers]
    places = [index * COUNT // len(names) for index in range(len(names))]
    return {
        name: f"cuda:{COUNT - 1 - place if reverse else place}"
        for name, place in zip(names, places, strict=True)
    }


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    ("make", "granularity", "chunks"),
    [
        (models.small_resnet18, "submodule", 2),
        (models.small_unet, "submodule", 4),
        (models.tied_gpt, 2, 8),
        (models.bert, 3, 2),
    ],
)
def test_gradients_over_nccl_are_the_unsplit_models(
    gpus: RankPool, make: ranked.Make, granularity: int | str, chunks: int, schedule: str
) -> None:
    parts = gpus.run(ranked.split_step, make, spread(make, granularity), chunks, schedule)
    losses, gradients, buffers = ranked.unsplit_step(make, chunks)
    assert [part["losses"] for part in parts if part["losses"]] == [
        pytest.approx(losses, abs=CLOSE)
    ]
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=CLOSE, rtol=CLOSE, msg=name)
    state = ranked.joined(parts, "buffers")
    for name, buffer in buffers.items():
        torch.testing.assert_close(state[name], buffer, atol=CLOSE, rtol=CLOSE, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_replicas_over_nccl_have_the_unsplit_models_gradients(
    gpus: RankPool, schedule: Schedule
) -> None:
    stages = 2 if COUNT == 4 else 1
    replicas = COUNT // stages
    samples = {2: (3, 1), 3: (2, 1, 1)}[replicas]
    placement = replicated(
        models.tied_gpt()[0], replicas, stages, "cuda", samples, 2, schedule=schedule
    )
    parts = gpus.run(ranked_replicas.step, models.tied_gpt, placement, 2)
    losses, gradients, _ = ranked.unsplit_step(models.tied_gpt, 1, 2)
    for part in parts[stages - 1 :: stages]:
        assert part["losses"] == pytest.approx(losses, abs=CLOSE)
    for name, gradient in gradients.items():
        # the owner alone has it
        (found,) = (part["gradients"][name] for part in parts if name in part["gradients"])
        torch.testing.assert_close(found, gradient, atol=CLOSE, rtol=CLOSE, msg=name)


@pytest.mark.skipif(COUNT < 3, reason="replicas by stage need three GPUs")
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("counts", [(2, 1), (1, 2)] if COUNT < 4 else [(3, 1), (1, 3), (1, 2, 1)])
def test_replicas_by_stage_over_nccl_have_the_unsplit_models_gradients(
    gpus: RankPool, counts: tuple[int, ...], schedule: Schedule
) -> None:
    names = [f"cuda:{index}" for index in range(COUNT)]
    model = models.longer_tied_row()[0]
    placement = by_stage(model, counts, names, chunks=2, schedule=schedule)
    parts = gpus.run(ranked_replicas.step, models.longer_tied_row, placement, 2)
    losses, gradients, _ = ranked.unsplit_step(models.longer_tied_row, 1, 2)
    for part in parts[COUNT - counts[-1] :]:
        assert part["losses"] == pytest.approx(losses, abs=CLOSE)
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=CLOSE, rtol=CLOSE, msg=name)


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
def test_units_over_nccl_have_the_unsplit_models_gradients(
    gpus: RankPool, schedule: Schedule
) -> None:
    # two GPUs have no stages of unlike replicas: one unit of each micro-batch
    places = spread(models.chain)
    parts = gpus.run(ranked_replicas.split_into_units, models.chain, places, 8, schedule, 2)
    assert [part["schedule"] for part in parts] == ["UnitSchedule"] * COUNT
    losses, gradients, _ = ranked.unsplit_step(models.chain, 8, 2)
    assert parts[-1]["losses"] == pytest.approx(losses, abs=CLOSE)
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=CLOSE, rtol=CLOSE, msg=name)


def test_replicas_over_nccl_divide_the_state_of_adam(gpus: RankPool, tmp_path: Path) -> None:
    stages = 2 if COUNT == 4 else 1
    samples = {2: (2, 2), 3: (2, 1, 1)}[COUNT // stages]
    placement = replicated(models.tied_gpt()[0], len(samples), stages, "cuda", samples, 2)
    torch.manual_seed(0)
    model, inputs, target, loss_fn = models.tied_gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(unsplit_loss(model, loss_fn, inputs, target, [len(inputs)]).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    paths = ["", str(tmp_path / "first"), str(tmp_path / "second")]
    for half in (0, 2):
        parts = gpus.run(
            ranked_replicas.train, models.tied_gpt, placement, 2, *paths[half // 2 :][:2]
        )
        for part in parts[stages - 1 :: stages]:
            assert part["losses"] == pytest.approx(losses[half : half + 2], abs=CLOSE)
            assert part["with_state"] == [*part["own"]] and part["states"] == len(part["own"])
    # Adam divides by roots of small numbers
    torch.testing.assert_close(
        parts[-1]["state"], dict(model.state_dict()), atol=100 * CLOSE, rtol=100 * CLOSE
    )


def test_replicas_drop_other_units(gpus: RankPool) -> None:
    seeds = gpus.run(ranked_replicas.seeds, models.chain, COUNT)
    assert len(set(seeds)) == COUNT


def test_a_line_against_the_order_of_the_processes_trains_too(gpus: RankPool) -> None:
    parts = gpus.run(ranked.split_step, models.chain, spread(models.chain, reverse=True), 8, "1f1b")
    assert [part["stages"] for part in parts] == [[index] for index in reversed(range(COUNT))]
    _, gradients, _ = ranked.unsplit_step(models.chain, 8)
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=CLOSE, rtol=CLOSE, msg=name)


@pytest.mark.parametrize("schedule", ["fill-drain", "interleaved", "zero-bubble"])
def test_gpus_hold_several_stages(gpus: RankPool, schedule: str) -> None:
    places = {
        **{f"layers.{index}": f"cuda:{index % COUNT}" for index in range(6)},
        "norm": "cuda:0",
    }
    parts = gpus.run(
        ranked.split_step, models.skips, places, 2 * COUNT if COUNT < 4 else 4, schedule
    )
    _, gradients, _ = ranked.unsplit_step(models.skips, 2 * COUNT if COUNT < 4 else 4)
    found = ranked.joined(parts, "gradients")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=CLOSE, rtol=CLOSE, msg=name)


def test_a_checkpoint_of_gpus_is_read_by_the_unsplit_model(gpus: RankPool, tmp_path: Path) -> None:
    places = spread(models.tied_gpt, 2)
    parts = gpus.run(ranked.train, models.tied_gpt, places, 8, 3, str(tmp_path / "checkpoint"))
    losses, trained = ranked.unsplit_training(models.tied_gpt, 8, 3)
    assert [part["losses"] for part in parts if part["losses"]] == [
        pytest.approx(losses, abs=CLOSE)
    ]
    state = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in trained.state_dict().items()}
    }
    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(state["model"][name], tensor, atol=CLOSE, rtol=CLOSE, msg=name)
        torch.testing.assert_close(
            parts[0]["state"][name], tensor, atol=CLOSE, rtol=CLOSE, msg=name
        )


def test_outputs_and_clipped_gradients_are_the_unsplit_models(gpus: RankPool) -> None:
    torch.manual_seed(0)
    model, inputs, _, _ = models.chain()
    (outputs,) = gpus.run(ranked.results, models.chain, spread(models.chain), 4)[-1]
    torch.testing.assert_close(outputs, model.eval()(inputs.clone()), atol=CLOSE, rtol=CLOSE)
    _, gradients, _ = ranked.unsplit_step(models.chain, 4)
    norm = torch.linalg.vector_norm(
        torch.cat([gradient.flatten() for gradient in gradients.values()])
    )
    parts = gpus.run(ranked.clipped, models.chain, spread(models.chain), 4, 0.1)
    assert [found for found, _ in parts] == pytest.approx([norm.item()] * COUNT)
