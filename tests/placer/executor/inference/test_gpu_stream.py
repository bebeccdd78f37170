"""On real GPUs: recorded streams equal the unsplit model, whatever the caller does meanwhile;
timelines can be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from small_models import Skips
from splitting import twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, devices
from placer.errors import StageError
from placer.executor.inference import compiled_streams
from placer.zoo import gpt, resnet18, unet

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


def _flow(model: nn.Module, interleaved: bool = False, **options: Any) -> DataFlow:
    """The model over all GPUs, in contiguous parts or in turn."""
    flow = DataFlow(model, **options)
    count = torch.cuda.device_count()
    names = list(flow.layer_gpus)
    for index, name in enumerate(names):
        flow.layer_gpus[name] = index % count if interleaved else index * count // len(names)
    flow.update_flow()
    return flow


def _close(given: list[Tensor], expected: list[Tensor]) -> None:
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), atol=1e-8, rtol=1e-8)


CASES = {
    "resnet18": (resnet18, lambda rows: torch.randn(rows, 3, 64, 64, dtype=torch.float64)),
    "unet": (lambda: unet(width=8), lambda rows: torch.randn(rows, 3, 64, 64, dtype=torch.float64)),
    "tied gpt": (
        lambda: gpt(layers=6, width=64, heads=4, context=16, vocabulary=50, tied=True),
        lambda rows: torch.randint(50, (rows, 16)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_stream_equals_the_unsplit_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data = CASES[name]
    model, whole = twins(make, training=False)
    batches = [data(4).cuda(0) for _ in range(6)]
    with torch.no_grad():
        expected = [whole.cuda(0)(batch) for batch in batches]
    times, trial = iter(range(1000, 0, -10)), compiled_streams.trial_ms
    monkeypatch.setattr(
        compiled_streams, "trial_ms", lambda *given: trial(*given) and float(next(times))
    )  # always faster
    flow = _flow(model)
    _close(list(flow.stream(batches, compile=True)), expected)
    stages = flow.calls.streams.pipelines()[0].stages
    assert len(flow.compiled) == len(stages)
    assert not flow.not_compiled_because and not any(stage.not_recorded_because for stage in stages)


@pytest.mark.parametrize("interleaved", [False, True], ids=["parts", "in turn"])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_stream_equals_the_unsplit_model(name: str, interleaved: bool) -> None:
    make, data = CASES[name]
    model, whole = twins(make, training=False)
    batches = [data(rows).cuda(0) for rows in [4] * 12 + [3] + [4] * 5 + [2] * 4]
    with torch.no_grad():
        expected = [whole.cuda(0)(batch) for batch in batches]
    flow = _flow(model, interleaved)
    for _ in range(2):
        # nothing waits until all are issued
        _close(list(flow.stream(batches)), expected)
        # each is waited for
        _close([result.cpu() for result in flow.stream(batches)], expected)
    reasons = [
        stage.not_recorded_because
        for p in flow.calls.streams.pipelines()
        for stage in p.stages
        if p.is_open
    ]
    assert reasons and reasons == [""] * len(reasons)


def _skips() -> tuple[nn.Module, nn.Module, list[Tensor]]:
    model, whole = twins(lambda: Skips(layers=8, features=256), training=False)
    return model, whole.cuda(0), [torch.randn(64, 256, dtype=torch.float64) for _ in range(16)]


@torch.no_grad()
def _expected(whole: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [whole(batch.cuda(0)).cpu() for batch in batches]


@pytest.mark.parametrize("where", ["cuda", "pinned", "host"])
def test_a_source_may_write_its_next_batch_over_the_last(where: str) -> None:
    model, whole, batches = _skips()
    buffer = torch.empty_like(
        batches[0], device="cuda:0" if where == "cuda" else "cpu", pin_memory=where == "pinned"
    )

    def source() -> Iterator[Tensor]:
        for batch in batches:
            yield buffer.copy_(batch)

    _close(list(_flow(model).stream(source())), _expected(whole, batches))


def test_memory_that_the_caller_frees_and_takes_again_disturbs_no_batch() -> None:
    model, whole, batches = _skips()

    def source() -> Iterator[Tensor]:
        for batch in batches:
            given = batch.to("cuda:0", non_blocking=True)
            yield given * 1.0
            del given
            # in the memory of an earlier batch
            torch.full((64, 256), torch.nan, dtype=torch.float64, device="cuda:0")

    results = []
    for result in _flow(model).stream(source()):
        results.append(result.clone())
        del result
        torch.full((64, 256), torch.nan, dtype=torch.float64, device="cuda:0")
    _close(results, _expected(whole, batches))


def test_results_may_go_to_the_host() -> None:
    model, whole, batches = _skips()
    flow = _flow(model, output_device="cpu")
    results = list(flow.stream(batches))
    assert all(result.device.type == "cpu" for result in results)
    _close(results, _expected(whole, batches))


def test_a_stream_that_is_closed_early_leaves_the_flow_usable_and_weights_may_change_at_once() -> (
    None
):
    model, whole, batches = _skips()
    flow = _flow(model)
    for _ in range(3):
        stream = flow.stream(batches * 4)
        _close([next(stream) for _ in range(3)], _expected(whole, batches[:3]))
        stream.close()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                ours.mul_(0.9)
                theirs.mul_(0.9)
        _close(list(flow.stream(batches)), _expected(whole, batches))


def test_two_flows_may_stream_at_the_same_time() -> None:
    model, whole, batches = _skips()
    other, _ = twins(lambda: Skips(layers=8, features=256), training=False)
    pairs = list(zip(_flow(model).stream(batches), _flow(other).stream(batches), strict=True))
    for index in range(2):
        _close([pair[index] for pair in pairs], _expected(whole, batches))


def test_another_map_between_two_batches_moves_those_that_come_after() -> None:
    model, whole, batches = _skips()
    flow = _flow(model)
    stream = flow.stream(batches)
    results = [next(stream) for _ in range(4)]
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = (index + 1) % torch.cuda.device_count()
    flow.update_flow()
    results += stream
    _close(results, _expected(whole, batches))


class _Reads(nn.Module):
    """Exported, but no CUDA graph can hold it: the middle layer copies to the host and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), _ThroughHost(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class _ThroughHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu().tanh().to("cuda:0") + 1


def test_a_layer_that_no_graph_can_hold_runs_eagerly_and_is_named() -> None:
    model, whole = twins(_Reads, training=False)
    model, whole = model.cuda(0), whole.cuda(0)
    batches = [torch.randn(4, 16, dtype=torch.float64, device="cuda:0") for _ in range(6)]
    with torch.no_grad():
        expected = [whole(batch) for batch in batches]
    flow = DataFlow(model, ["cuda:0"])
    flow.update_flow()
    with pytest.warns(UserWarning, match="segment 0 of 1 on cuda:0 runs without CUDA graphs"):
        _close(list(flow.stream(batches)), expected)
    reasons = [
        stage.not_recorded_because for p in flow.calls.streams.pipelines() for stage in p.stages
    ]
    assert any("layer 'middle'" in reason for reason in reasons)


class _Hungry(nn.Module):
    """Takes more memory than there is when a batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.unsqueeze(1) + torch.zeros(1, 2**14, 1, device=x.device)
        return self.layer(wide.mean(1))


def test_out_of_memory_names_the_layer_and_the_batch_and_the_flow_streams_again() -> None:
    model, whole = twins(_Hungry, training=False)
    model, whole = model.cuda(0), whole.cuda(0)
    few = [torch.randn(rows, 4, dtype=torch.float64, device="cuda:0") for rows in (4, 4, 4)]
    # 256 GiB between two operations
    many = torch.randn(2**19, 4, dtype=torch.float64, device="cuda:0")
    with torch.no_grad():
        expected = [whole(batch) for batch in few]
    flow = DataFlow(model, ["cuda:0"])
    flow.update_flow()
    results = []
    with pytest.raises(StageError, match="batch 2 failed") as caught:
        for result in flow.stream([*few[:2], many, few[2]]):
            results.append(result)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    _close(results, expected[:2])
    _close(list(flow.stream(few)), expected)


def _can_be(rows: Any, tolerance_ms: float = 0.2) -> None:
    """Passes of a device follow one another; a pass comes behind the copies that it waits for, as
    clocks agree."""
    passes = {(row.stage, row.kind, row.micro_batch): row for row in rows if row.target is None}
    by_device: dict[str, list[Any]] = {}
    for row in rows:
        assert row.end_ms >= row.start_ms
        if row.kind in ("forward", "backward", "weights"):
            by_device.setdefault(row.lane, []).append(row)
        phase = "backward" if row.kind == "gradients" else "forward"
        if row.kind in ("values", "gradients", "inputs"):
            assert row.end_ms <= passes[row.target, phase, row.micro_batch].start_ms + tolerance_ms
        if row.kind in ("values", "gradients"):
            assert row.start_ms >= passes[row.stage, phase, row.micro_batch].end_ms - tolerance_ms
    for work in by_device.values():
        for one, other in pairwise(sorted(work, key=lambda row: row.start_ms)):
            assert other.start_ms >= one.end_ms - 1e-3
    assert len(by_device) == torch.cuda.device_count()


@pytest.mark.alone
def test_the_measured_timeline_of_a_step_and_of_a_stream_can_be(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = unet(width=32).train()
    inputs, target = torch.randn(32, 3, 96, 96), torch.randint(2, (32, 96, 96))
    flow = _flow(model)
    step = flow.train_step(functional.cross_entropy, schedule="zero-bubble")
    trained = flow.measure(inputs, target, step=step, chunks=8)
    _can_be(trained.measured)
    stages = len({row.stage for row in trained.rows})
    assert len(trained.rows) == 8 * 3 * stages
    streamed = flow.eval().measure(inputs, chunks=8)
    _can_be(streamed.measured)
    assert len(streamed.rows) == 8 * stages
    streamed.save_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 1000


@pytest.mark.alone
def test_times_of_marks_on_unlike_devices_are_on_one_axis() -> None:
    places = devices.available()
    clock = devices.Clock(places)
    reached = []
    for place in [*places, *places]:
        lane = devices.Lane(place)
        with lane:
            torch.ones(8, device=place).add_(1)
        mark = lane.mark(timed=True)
        devices.synchronise(place)
        reached.append(clock.ms(mark, place))
        sleep(0.002)  # far more than devices' axes differ
    # each was waited for before the next was issued
    assert reached == sorted(reached)
    assert reached[0] > 0


def test_calls_whose_shape_comes_again_are_recorded_and_are_the_unsplit_models() -> None:
    count = torch.cuda.device_count()
    torch.manual_seed(0)
    model = resnet18().double().eval()
    whole = copy.deepcopy(model).cuda(0)
    flow = DataFlow(model)
    names = list(flow.layer_gpus)
    for index, layer in enumerate(names):
        flow.layer_gpus[layer] = index * count // len(names)
    flow.update_flow()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(16, 3, 64, 64, dtype=torch.float64, device="cuda:0")
            torch.testing.assert_close(flow(x, chunks=4), whole(x), atol=1e-8, rtol=1e-8)
    (pipeline,) = flow.calls.streams.pipelines()
    assert [stage.not_recorded_because for stage in pipeline.stages] == [""] * len(pipeline.stages)
