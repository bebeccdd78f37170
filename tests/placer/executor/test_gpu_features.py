"""On real GPUs: what training steps can beside plain ones, recorded, against the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.errors import StageError
from placer.executor.training.stages import compiled_stages
from placer.executor.training.training_pipeline import Order

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]
CHUNKS = 4


class _Model(nn.Module):
    """Running statistics, a write in place, a skip over two layers; and something else in half
    precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(inplace=True),
        )
        self.middle, self.tanh = nn.Linear(16, 16), nn.Tanh()
        self.wide, self.gelu, self.last = nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        z = self.tanh(self.middle(y))
        z = 2 * z if z.dtype in (torch.float16, torch.bfloat16) else z
        result: Tensor = self.last(self.gelu(self.wide(z)) + y)
        return result


def _pair(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = _Model().to(dtype)
    return model, copy.deepcopy(model).cuda(0)


def _batch(size: int = 16, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 8, dtype=dtype), torch.randn(size, 4, dtype=dtype)


def _flow(model: nn.Module, segments: int = 1, **options: Any) -> DataFlow:
    """A flow over all GPUs, with so many segments on each."""
    count = torch.cuda.device_count()
    flow = DataFlow(model, **options)
    names = list(flow.layer_gpus)
    for index, name in enumerate(names):
        flow.layer_gpus[name] = (index * count * segments // len(names)) % count
    flow.update_flow()
    return flow


def _unsplit(whole: nn.Module, sizes: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """The gradients and the loss of the unsplit model over micro-batches of these sizes."""
    inputs, target = (tensor.cuda(0) for tensor in _batch(sum(sizes), dtype))
    total = torch.zeros((), dtype=torch.float64, device="cuda:0")
    for part, goal in zip(inputs.split(sizes), target.split(sizes), strict=True):
        loss = functional.mse_loss(whole(part), goal) * (len(part) / sum(sizes))
        loss.backward()
        total += loss.detach()
    return total.cpu()


def _same(model: nn.Module, whole: nn.Module, tolerance: float = 1e-9) -> None:
    for name, value in whole.state_dict().items():
        mine = model.state_dict()[name].cpu()
        torch.testing.assert_close(mine, value.cpu(), atol=tolerance, rtol=tolerance, msg=name)


def _train(
    sizes: list[int],
    schedule: Order = "1f1b",
    segments: int = 1,
    recompute: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda weights: torch.optim.SGD(
        weights, lr=0.05, momentum=0.9
    ),
    **options: Any,
) -> Any:
    """Three steps, against the unsplit model's over the same micro-batches."""
    model, whole = _pair()
    flow = _flow(model, segments)
    flow.recompute = list(range(torch.cuda.device_count())) if recompute else []
    ours, theirs = optimizer(model.parameters()), optimizer(whole.parameters())
    step = flow.train_step(functional.mse_loss, ours, schedule, **options)
    for _ in range(3):
        loss = step(*_batch(sum(sizes)), chunks=len(sizes)).cpu().double()
        theirs.zero_grad()
        torch.testing.assert_close(loss, _unsplit(whole, sizes), atol=1e-9, rtol=1e-9)
        theirs.step()
    _same(model, whole)
    return step


@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
def test_a_smaller_last_micro_batch_counts_by_its_size(schedule: Order) -> None:
    step = _train([4, 4, 4, 3], schedule)
    assert step.not_recorded_because == {}


@pytest.mark.parametrize("segments", [1, 2])
def test_interleaved_segments_train_as_the_unsplit_model(segments: int) -> None:
    step = _train([2] * 8, "interleaved", segments)
    assert step.not_recorded_because == {}


@pytest.mark.parametrize("sizes", [[4] * 8, [4, 4, 4, 3]])
@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
def test_recomputed_stages_train_as_the_unsplit_model(schedule: Order, sizes: list[int]) -> None:
    step = _train(sizes, schedule, recompute=True)
    assert step.not_recorded_because == {}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_compiled_segments_train_as_the_unsplit_model(
    schedule: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(1000, 0, -10))
    trial = compiled_stages._trial_ms
    monkeypatch.setattr(
        compiled_stages, "_trial_ms", lambda stage: trial(stage) and float(next(times))
    )  # always faster
    step = _train([4] * 8, schedule, compile=True)
    assert step.compiled and not step.not_compiled_because and not step.not_recorded_because
    assert not any("whole" in gain for gain in step.compiled.values())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.Adam(weights, lr=0.01, fused=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.01, foreach=True),
        lambda weights: torch.optim.Adam(weights, lr=0.01, capturable=True),
        lambda weights: torch.optim.SGD(weights, lr=0.01, fused=True),
    ],
    ids=["fused Adam", "foreach AdamW", "capturable Adam", "fused SGD"],
)
def test_fused_and_foreach_optimizers_step_on_every_device(optimizer: Any) -> None:
    _train([4] * 4, optimizer=optimizer)


def test_gradients_of_several_batches_add_up_and_are_clipped_over_all_devices() -> None:
    model, whole = _pair()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, whole))
    step = _flow(model).train_step(functional.mse_loss, ours, max_norm=0.1)
    for _ in range(2):
        for update in (False, False, True):
            step(*_batch(), chunks=CHUNKS, update=update)
        theirs.zero_grad()
        for _ in range(3):
            _unsplit(whole, [4] * CHUNKS)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        theirs.step()
    _same(model, whole)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_under_autocast_and_without_take_turns(dtype: torch.dtype, schedule: Order) -> None:
    model, whole = _pair(torch.float32)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, whole))
    step = _flow(model).train_step(functional.mse_loss, ours, schedule)
    inputs, target = _batch(dtype=torch.float32)
    for enabled in (True, False, True, True):
        with torch.autocast("cuda", dtype, enabled=enabled):
            loss = step(inputs, target, chunks=1)
        theirs.zero_grad()
        with torch.autocast("cuda", dtype, enabled=enabled):
            expected = functional.mse_loss(whole(inputs.cuda(0)), target.cuda(0))
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss.cpu(), expected.detach().cpu(), atol=2e-3, rtol=2e-3)
    _same(model, whole, 2e-3)


def test_a_scaler_skips_a_step_that_overflows_on_every_device() -> None:
    model, whole = _pair(torch.float32)
    before = {name: value.clone() for name, value in model.named_parameters()}
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = _flow(model).train_step(functional.mse_loss, optimizer, scaler=scaler)
    inputs, target = _batch(dtype=torch.float32)
    step(inputs, target * float("inf"), chunks=CHUNKS)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.cpu(), before[name].cpu())
    assert scaler.get_scale() == 2.0**9
    with torch.no_grad():
        whole.load_state_dict(model.state_dict())
    step(inputs, target, chunks=CHUNKS)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.05)
    theirs.zero_grad()
    _unsplit(whole, [4] * CHUNKS, torch.float32)
    theirs.step()
    _same(model, whole, 1e-4)


def test_deferred_running_statistics_are_those_of_whole_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    whole = copy.deepcopy(model)
    step = _flow(model, deferred_batch_norm=True).train_step(functional.mse_loss)
    for _ in range(3):
        step(*_batch(), chunks=CHUNKS)
        whole(_batch()[0])
    assert step.not_recorded_because == {}
    for (name, mine), its in zip(model.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), its, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_an_interrupt_in_the_middle_of_a_step_leaves_the_model_as_it_was(micro_batch: int) -> None:
    model, whole = _pair()
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, whole)
    )
    flow = _flow(model)
    step = flow.train_step(functional.mse_loss, ours)
    step(*_batch(), chunks=CHUNKS)
    _unsplit(whole, [4] * CHUNKS)
    theirs.step()
    slot = step.pipelines[0].stages[-1].slot(micro_batch)
    replay, count = slot.passes["backward"], 0

    def interrupted() -> None:
        nonlocal count
        count += 1
        raise KeyboardInterrupt

    slot.passes["backward"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        step(*_batch(), chunks=CHUNKS)
    assert count == 1
    _same(model, whole)
    slot.passes["backward"] = replay
    theirs.zero_grad()
    loss = step(*_batch(), chunks=CHUNKS)
    torch.testing.assert_close(loss.cpu(), _unsplit(whole, [4] * CHUNKS), atol=1e-9, rtol=1e-9)
    theirs.step()
    flow.undo()
    _same(model, whole)


def test_out_of_memory_names_the_segment_and_a_smaller_batch_runs_afterwards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1 << 20), nn.Linear(1 << 20, 4))
    step = _flow(model).train_step(functional.mse_loss)
    size = 1 << 18  # of the second layer's output: 1 TiB
    with pytest.raises(torch.OutOfMemoryError, match="layer '1'") as caught:
        step(torch.randn(size, 8), torch.randn(size, 4), chunks=1)
    assert isinstance(caught.value, StageError) and caught.value.batch == 0
    del caught
    torch.cuda.empty_cache()
    assert step(torch.randn(8, 8), torch.randn(8, 4), chunks=2).isfinite()


def _dropped(recompute: bool, seed: int = 0, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The loss of a linear map of a bias under dropout, and what its gradient says that it is."""
    count = torch.cuda.device_count()
    layers = [nn.Linear(4, 64) if index == 0 else nn.Dropout(0.5) for index in range(count + 1)]
    model = nn.Sequential(*layers)
    flow = DataFlow(model)
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = min(index, count - 1)
    flow.recompute = list(range(count)) if recompute else []
    flow.update_flow()
    step = flow.train_step(lambda output, target: (output * target).mean())
    inputs, target = torch.zeros(32, 4), torch.rand(32, 64)
    step(inputs, target, chunks=8)
    torch.manual_seed(seed)
    found = []
    for _ in range(steps):
        loss = step(inputs, target, chunks=8).cpu()
        bias = model[0].bias
        assert isinstance(bias, Tensor) and bias.grad is not None
        found.append((loss, (bias.detach() * bias.grad).sum().cpu()))
    assert step.not_recorded_because == {}
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_forwards_and_backwards_and_differs_between_steps(
    recompute: bool,
) -> None:
    found = _dropped(recompute)
    # the loss is linear in the bias, if both passes dropped the same
    for loss, said in found:
        torch.testing.assert_close(loss, said, atol=1e-6, rtol=1e-5)
    assert len({float(loss) for loss, _ in found}) == len(found)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_seed_repeats_dropout(recompute: bool) -> None:
    torch.manual_seed(9)
    first = _dropped(recompute, seed=4)
    torch.manual_seed(9)
    again = _dropped(recompute, seed=4)
    assert [float(loss) for loss, _ in first] == [float(loss) for loss, _ in again]


def test_small_calls_that_come_often_are_recorded_and_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(20))
    ).double()
    whole = copy.deepcopy(model).cuda(0).eval()
    flow = _flow(model).eval()
    with torch.no_grad():
        for call in range(12):
            x = torch.randn(3 + 2 * (call % 2), 8, dtype=torch.float64)
            if call > 8:
                for each in (model, whole):
                    each[3][0].weight.mul_(0.5)
            torch.testing.assert_close(
                flow(x).cpu(), whole(x.cuda(0)).cpu(), atol=1e-10, rtol=1e-10
            )
        for _ in range(12):
            torch.testing.assert_close(
                flow(x).cpu(), whole(x.cuda(0)).cpu(), atol=1e-10, rtol=1e-10
            )
    recorded = [one for one in flow.calls.streams.pipelines() if one.is_open]
    assert len(recorded) == 2  # of both shapes
    assert {stage.not_recorded_because for one in recorded for stage in one.stages} == {""}


class _Synchronises(nn.Module):
    """An inverse: the host waits to see whether there is one."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(torch.eye(8, dtype=x.dtype, device=x.device) + x.T @ x)


def test_a_layer_that_allows_no_cuda_graph_runs_eagerly_and_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), _Synchronises(), nn.Linear(8, 4)).double()
    whole = copy.deepcopy(model).cuda(0)
    # its samples meet
    step = unverified(_flow(model)).train_step(functional.mse_loss)
    with pytest.warns(UserWarning, match="runs without CUDA graphs.*layer '1'"):
        loss = step(*_batch(), chunks=CHUNKS)
    assert any("layer '1'" in why for why in step.not_recorded_because.values())
    torch.testing.assert_close(loss.cpu(), _unsplit(whole, [4] * CHUNKS), atol=1e-9, rtol=1e-9)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), its.grad.cpu(), atol=1e-9, rtol=1e-9)
