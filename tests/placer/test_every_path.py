"""Every path once, over two devices: a split model does what the unsplit one does.

The same tests run on CPU stand-ins with the other tests and on GPUs with ``make gpu QUICK=1``,
which is meant to run after every change of code that GPUs execute. Models are small and in double
precision, so that results agree closely."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranked
import ranked_models
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import Constraints, DataFlow, PlacementRequest
from placer.capture.capture import capture_graph
from placer.errors import StageError
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS, SAMPLES, STEPS = 4, 8, 3
CLOSE = {"atol": 1e-9, "rtol": 1e-9}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.quick])])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The type of the two devices; CPU stand-ins behave as devices of their own."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with logical_devices(2) if request.param == "cpu" else nullcontext():
        yield request.param


class Block(nn.Module):
    """A layer with running statistics inside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = (
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.act(self.norm(self.linear(x)))
        return result


class Branching(nn.Module):
    """Cannot be captured: which way it goes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(y if y.sum() > 0 else -y)
        return result


def _pair(make: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, nn.Module]:
    """A model to split and an equal one to compare with, both on the host."""
    torch.manual_seed(0)
    model = (
        make()
        if make is not None
        else nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 4))
    )
    model.double()
    return model, copy.deepcopy(model)


def _batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, 16, generator=draw).double(), torch.randn(
        SAMPLES, 4, generator=draw
    ).double()


def _split(model: nn.Module, kind: str, turns: int = 1) -> DataFlow:
    """The model over both devices, each of which has this number of segments."""
    flow = DataFlow(model, device_ids=[f"{kind}:0", f"{kind}:1"])
    names = list(flow.layer_gpus)
    for index, name in enumerate(names):
        flow.layer_gpus[name] = index * 2 * turns // len(names) % 2
    flow.update_flow()
    return flow


def _unsplit_step(
    whole: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    """One step of the unsplit model over the same micro-batches; its loss."""
    optimizer.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for part, goal in zip(*(tensor.chunk(CHUNKS) for tensor in batch), strict=True):
        term = functional.mse_loss(whole(part), goal) / CHUNKS
        term.backward()
        loss += term.detach()
    optimizer.step()
    return loss


def _assert_same_state(model: nn.Module, whole: nn.Module) -> None:
    mine = model.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            mine[name].cpu(), value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _assert_trains(
    flow: DataFlow, model: nn.Module, whole: nn.Module, step: Any, theirs: Any
) -> None:
    for seed in range(STEPS):
        loss = step(*_batch(seed), chunks=CHUNKS)
        torch.testing.assert_close(loss.cpu(), _unsplit_step(whole, theirs, _batch(seed)), **CLOSE)
    _assert_same_state(model, whole)


def test_a_profiled_and_placed_model_trains_and_is_taken_back(kind: str) -> None:
    model, whole = _pair()
    places = [f"{kind}:0", f"{kind}:1"]
    inputs = _batch()[0]
    micro_batch = inputs[: SAMPLES // CHUNKS]
    found = placer.profile(
        model, micro_batch, places, optimizer="sgd", repeats=3, progress=False, cache=False
    )
    assert found.cluster is not None
    links = {(link.source, link.target): link for link in found.cluster.links}
    assert set(links) == {(places[0], places[1]), (places[1], places[0])}
    assert all(link.bandwidth_bytes_per_s > 0 and link.latency_s >= 0 for link in links.values())
    assert all(
        time > 0
        for layer in found.layers
        if layer.param_bytes
        for time in layer.forward_ms.values()
    )
    rules = Constraints(contiguous=True, min_devices=2)
    placement = placer.solve(
        PlacementRequest(profile=found, chunks=CHUNKS, schedule="1f1b", constraints=rules)
    )
    assert set(placement.layer_devices.values()) == set(places)
    flow = DataFlow(model, device_ids=places)
    flow.update_flow(placement)
    _assert_trains(
        flow, model, whole, flow.train_step(functional.mse_loss, _sgd(model)), _sgd(whole)
    )
    flow.undo()
    assert {tensor.device for tensor in model.state_dict().values()} == {torch.device("cpu")}
    model.eval(), whole.eval()
    torch.testing.assert_close(model(inputs), whole(inputs), **CLOSE)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("schedule", "turns", "recompute"),
    [
        ("fill-drain", 1, False),
        ("1f1b", 1, False),
        ("1f1b", 1, True),
        ("interleaved", 2, False),
        ("zero-bubble", 1, False),
        ("zero-bubble", 2, True),
    ],
)
def test_steps_of_every_schedule_are_the_unsplit_models(
    kind: str, schedule: Order, turns: int, recompute: bool
) -> None:
    model, whole = _pair()
    flow = _split(model, kind, turns)
    flow.recompute = [f"{kind}:0"] if recompute else []
    step = flow.train_step(functional.mse_loss, _sgd(model), schedule)
    _assert_trains(flow, model, whole, step, _sgd(whole))
    if kind == "cuda":
        assert step.not_recorded_because == {}  # every stage ran as CUDA graphs


def test_calls_and_their_gradients_are_the_unsplit_models(kind: str) -> None:
    model, whole = _pair()
    flow = _split(model, kind)
    inputs, target = _batch()
    functional.mse_loss(flow(inputs).cpu(), target).backward()
    functional.mse_loss(whole(inputs), target).backward()
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        assert mine.grad.device == mine.device
        torch.testing.assert_close(mine.grad.cpu(), its.grad, **CLOSE)
    flow.eval(), whole.eval()
    with torch.no_grad():
        for _ in range(4):  # shapes that come again are recorded
            for chunks in (1, CHUNKS):
                torch.testing.assert_close(
                    flow(inputs, chunks=chunks).cpu(), whole(inputs), **CLOSE
                )


def test_streams_are_the_unsplit_models_batches(kind: str) -> None:
    model, whole = _pair()
    flow = _split(model.eval(), kind)
    batches = [_batch(seed)[0] for seed in range(12)]
    with torch.no_grad():
        for given, expected in zip(flow.stream(batches), map(whole.eval(), batches), strict=True):
            torch.testing.assert_close(given.cpu(), expected, **CLOSE)


def test_a_model_inside_applied_is_split_and_outside_it_is_not(kind: str) -> None:
    model, whole = _pair()
    flow = _split(model, kind)
    inputs, target = _batch()
    with flow.applied() as applied:
        functional.mse_loss(applied(inputs).cpu(), target).backward()
    functional.mse_loss(whole(inputs), target).backward()
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), its.grad, **CLOSE)
    flow.undo()
    model.eval(), whole.eval()
    torch.testing.assert_close(model(inputs), whole(inputs), **CLOSE)


def test_a_new_map_moves_the_model_and_its_optimizer(kind: str) -> None:
    model, whole = _pair()
    flow = _split(model, kind)
    ours, theirs = _sgd(model), _sgd(whole)
    step = flow.train_step(functional.mse_loss, ours)
    _assert_trains(flow, model, whole, step, theirs)
    before = {name: parameter.device for name, parameter in model.named_parameters()}
    for name, place in flow.layer_gpus.items():
        flow.layer_gpus[name] = 1 - int(str(place))
    flow.update_flow()
    assert all(parameter.device != before[name] for name, parameter in model.named_parameters())
    _assert_trains(flow, model, whole, step, theirs)


def test_a_model_that_cannot_be_captured_runs_through_hooks(kind: str) -> None:
    model, whole = _pair(Branching)
    flow = _split(model, kind)
    _assert_trains(
        flow, model, whole, flow.train_step(functional.mse_loss, _sgd(model)), _sgd(whole)
    )
    assert flow.not_captured_because


def test_a_failure_in_a_stage_names_it_and_the_flow_goes_on(kind: str) -> None:
    model, whole = _pair(lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    flow = _split(model, kind)
    step = flow.train_step(functional.mse_loss, _sgd(model))
    theirs = _sgd(whole)
    _assert_trains(flow, model, whole, step, theirs)
    passes = step.pipelines[0].stages[-1].slot(1).passes
    backward = passes["backward"]

    def broken() -> None:
        raise ValueError("out of luck")

    passes["backward"] = broken
    with pytest.raises(StageError, match="out of luck"):
        step(*_batch(), chunks=CHUNKS)
    passes["backward"] = backward
    _assert_same_state(model, whole)
    _assert_trains(flow, model, whole, step, theirs)


def test_several_threads_have_the_results_of_their_own_batches(kind: str) -> None:
    model, whole = _pair()
    flow = _split(model.eval(), kind)
    whole.eval()

    def serve(seed: int) -> None:
        for turn in range(6):
            inputs = _batch(100 * seed + turn)[0]
            with torch.no_grad():
                given = torch.cat(list(flow.stream(inputs.chunk(2)))) if turn % 2 else flow(inputs)
                torch.testing.assert_close(given.cpu(), whole(inputs), **CLOSE)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(serve, seed) for seed in range(4)]:
            done.result(timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.quick])]
)
def test_two_processes_train_as_the_unsplit_model(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    make, kind = ranked_models.tied_gpt, "cuda" if backend == "nccl" else "cpu"
    model, inputs, _, _ = make()
    names = [layer.name for layer in capture_graph(model, (inputs,), granularity=2).layers]
    places = {name: f"{kind}:{index * 2 // len(names)}" for index, name in enumerate(names)}
    pool = RankPool(2, tmp_path, backend)
    try:
        for schedule in ("1f1b", "zero-bubble"):
            parts = pool.run(ranked.split_step, make, places, CHUNKS, schedule)
            losses, gradients, _ = ranked.unsplit_step(make, CHUNKS)
            assert [part["losses"] for part in parts if part["losses"]] == [
                pytest.approx(losses, abs=1e-8)
            ]
            found = ranked.joined(parts, "gradients")
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-8, rtol=1e-8)
    finally:
        pool.close()
