"""Calls without gradients whose shape comes again go through the stream, and are what the model
alone returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import scatter_layers, twins
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from placer import DataFlow
from placer.errors import StageError
from placer.executor.inference import repeated_calls
from placer.executor.inference.stream_pipeline import InferencePipeline
from placer.executor.placed_calls import PlacedCalls
from placer.executor.state.model_fingerprint import Census
from placer.testing import logical_devices

CALLS = 4


class Model(nn.Module):
    """Keywords, a skip past the middle, a number among the results, and a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> Any:
        first = self.first(x * scale)
        return {
            "y": self.last(torch.relu(self.norm(first))),
            "first": first,
            "size": 3,
            "mean": first.mean(),
        }


def _inputs(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 4, dtype=torch.float64), torch.randn((), dtype=torch.float64)


def _assert_equal(result: Any, expected: Any) -> None:
    assert result["size"] == expected["size"]
    for name in ("y", "first", "mean"):
        torch.testing.assert_close(result[name].cpu(), expected[name], atol=1e-10, rtol=1e-10)


def _streamed(flow: DataFlow) -> int:
    return len(flow.calls.streams.pipelines())


@pytest.mark.parametrize(
    ("rows", "chunks"), [(8, 4), (7, 3), pytest.param(8, 2, marks=pytest.mark.exhaustive)]
)
def test_every_call_is_what_the_model_alone_returns(rows: int, chunks: int) -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for call in range(CALLS):
            x, scale = _inputs(call, rows)
            _assert_equal(flow(x, scale=scale, chunks=chunks), reference(x, scale=scale))
            assert bool(_streamed(flow)) == (call > 0)


def test_weights_that_changed_and_another_map_are_seen() -> None:
    model, reference = twins(Model, training=False)
    x, scale = _inputs(0)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        for seed in range(3):
            scatter_layers(flow, 3, seed)
            for _ in range(CALLS):
                for parameter in (*model.parameters(), *reference.parameters()):
                    parameter.mul_(1.1)
                _assert_equal(flow(x, scale=scale, chunks=4), reference(x, scale=scale))
            assert _streamed(flow)


def test_devices_have_work_before_the_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(name), plain(*args))[1])

    model, reference = twins(Model, training=False)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for call in range(2):
            x, scale = _inputs(call)
            flow(x, scale=scale, chunks=4)
        noted(InferencePipeline, "advance")
        noted(Census, "holds")
        x, scale = _inputs(2)
        result = flow(x, scale=scale, chunks=4)
    _assert_equal(result, reference(x, scale=scale))
    assert events[:2] == ["advance", "holds"]
    assert events.count("holds") == 1


def _replace_a_parameter(model: Model) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach() * 2)


def _point_elsewhere(model: Model) -> None:
    model.last.weight.data = model.last.weight.detach() * 2


def _replace_a_module(model: Model) -> None:
    model.norm = nn.Identity()


def _watch(model: Model) -> None:
    model.norm.register_forward_hook(lambda _, __, result: result * 2)


@pytest.mark.parametrize(
    "change", [_replace_a_parameter, _point_elsewhere, _replace_a_module, _watch]
)
def test_a_model_that_was_changed_between_calls_is_seen_to_be_another(
    change: Callable[[Model], None],
) -> None:
    # By then the first segment has run as it was recorded.
    model, reference = twins(Model, training=False)
    x, scale = _inputs(0)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for _ in range(CALLS):
            flow(x, scale=scale, chunks=4)
        change(model), change(reference)
        for _ in range(CALLS):
            _assert_equal(flow(x, scale=scale, chunks=4), reference(x, scale=scale))


@pytest.mark.parametrize("chunks", [1, 4])
def test_hooks_on_every_module_run_as_long_as_they_are_there(chunks: int) -> None:
    model, reference = twins(Model, training=False)
    x, scale = _inputs(0)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for _ in range(2):
            for _ in range(CALLS):
                _assert_equal(flow(x, scale=scale, chunks=chunks), reference(x, scale=scale))
            hook = register_module_forward_hook(
                lambda module, _, result: result * 2 if isinstance(module, nn.Linear) else None
            )
            try:
                _assert_equal(flow(x, scale=scale, chunks=chunks), reference(x, scale=scale))
                assert "every module has hooks" in flow.not_captured_because
            finally:
                hook.remove()
        _assert_equal(flow(x, scale=scale, chunks=chunks), reference(x, scale=scale))
        assert not flow.not_captured_because


def test_results_go_where_the_flow_says_now() -> None:
    model, _ = twins(Model, training=False)
    x, scale = _inputs(0)
    with logical_devices(3) as devices, torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for flow.output_device in (*devices, *devices):
            for _ in range(CALLS):
                assert flow(x, scale=scale, chunks=4)["y"].device == flow.output_device


class _Counts(nn.Module):
    """Writes to a buffer in every call, or draws random numbers, first of all."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.linear, self.last = draws, nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            x = x + torch.rand_like(x)
        else:
            self.calls += 1
        return self.last(self.linear(x))


@pytest.mark.parametrize("draws", [True, False])
def test_what_leaves_something_runs_only_once_the_model_was_looked_at(draws: bool) -> None:
    model = _Counts(draws).eval()
    x = torch.randn(8, 4)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        for _ in range(CALLS):
            flow(x, chunks=4)
        before = int(model.calls), torch.get_rng_state()
        expected = flow(x, chunks=4)
        torch.set_rng_state(before[1])
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())
        torch.testing.assert_close(flow(x, chunks=4), expected)
    assert int(model.calls) == before[0] + (0 if draws else 8)


def test_results_stay_when_later_calls_come() -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        batches = [_inputs(call) for call in range(CALLS)]
        results = [flow(x, scale=scale, chunks=4) for x, scale in batches]
        for result, (x, scale) in zip(results, batches, strict=True):
            _assert_equal(result, reference(x, scale=scale))


@pytest.mark.parametrize("training", [True, False])
def test_what_is_trained_is_not_streamed(training: bool) -> None:
    model, _ = twins(Model, training)
    x, scale = _inputs(0)
    with logical_devices(2), torch.set_grad_enabled(not training):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        for _ in range(CALLS):
            flow(x, scale=scale, chunks=2)
    assert not _streamed(flow)


def test_a_layer_that_fails_later_is_named_with_its_micro_batch() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).eval()
    good, bad = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[0], [1], [2], [9]])
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        expected = flow(good, chunks=4)
        flow(good, chunks=4)
        with pytest.raises(
            StageError, match="micro-batch 3 failed in the forward pass of segment 0"
        ):
            flow(bad, chunks=4)
        torch.testing.assert_close(flow(good, chunks=4), expected)


def test_without_memory_for_recordings_a_call_is_issued_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(InferencePipeline, "_open", full)
    model, reference = twins(Model, training=False)
    x, scale = _inputs(0)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        flow(x, scale=scale, chunks=4)
        with pytest.warns(UserWarning, match="no memory to record it"):
            _assert_equal(flow(x, scale=scale, chunks=4), reference(x, scale=scale))
        _assert_equal(flow(x, scale=scale, chunks=4), reference(x, scale=scale))
        assert not _streamed(flow)


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins are taken for GPUs: of calls that are not cut theirs alone may be recorded."""
    monkeypatch.setattr(
        PlacedCalls, "_can_be_streamed", lambda calls, sizes: not torch.is_grad_enabled()
    )


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize(("share", "streamed"), [(-1.0, True), (2.0, False)])
def test_a_call_that_is_not_cut_is_streamed_where_it_waits_for_the_host(
    share: float, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_calls, "_HOSTS_SHARE", share)
    model, reference = twins(Model, training=False)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        for call in range(9):
            x, scale = _inputs(call)
            # a value that changes in place is seen in the next call
            with torch.no_grad():
                model.last.bias.add_(1.0)
                reference.last.bias.add_(1.0)
            _assert_equal(flow(x, scale=scale), reference(x, scale=scale))
            assert bool(_streamed(flow)) == (streamed and call >= 4)
        x, scale = _inputs(1, rows=5)
        _assert_equal(flow(x, scale=scale), reference(x, scale=scale))
        assert _streamed(flow) == int(streamed)


class _Keeps(nn.Module):
    """Leaves a tensor in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept[0] = self.first(x + kept[0])
        result: Tensor = self.last(kept[0])
        return result


@pytest.mark.usefixtures("uncut")
def test_a_call_that_leaves_something_in_its_inputs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_calls, "_HOSTS_SHARE", -1.0)
    model, reference = twins(_Keeps, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        ours, theirs = (
            [torch.zeros(3, 4, dtype=torch.float64)],
            [torch.zeros(3, 4, dtype=torch.float64)],
        )
        for _ in range(8):
            x = torch.ones(3, 4, dtype=torch.float64)
            torch.testing.assert_close(flow(x, ours).cpu(), reference(x, theirs))
        torch.testing.assert_close(ours[0].cpu(), theirs[0])
        assert not _streamed(flow)
