"""Compiled segments of streams give what the unsplit model gives; what cannot be compiled runs as
it is, told why."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from model_list import CASES
from splitting import twins
from streams import assert_close, placed
from torch import Tensor, fx, nn

from placer import DataFlow
from placer.errors import InputError
from placer.executor.engine.compiled_segments import CompiledSegment
from placer.executor.inference import compiled_streams
from placer.testing import logical_devices


class _Model(nn.Module):
    """Two layers for each of two devices, a skip between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        result: Tensor = self.last(torch.relu(self.third(torch.relu(self.second(y))) + y))
        return result


def _flow(model: nn.Module) -> DataFlow:
    flow = DataFlow(model.eval(), ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, second=0, third=1, last=1)
    flow.update_flow()
    return flow


def _batches(*rows: int) -> list[Tensor]:
    return [torch.randn(count, 4) for count in rows]


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial takes half the time of the one before it."""
    times = (2.0**-trial for trial in itertools.count())
    trial = compiled_streams.trial_ms

    def faster(*given: Any) -> float:
        trial(*given)
        return next(times)

    monkeypatch.setattr(compiled_streams, "trial_ms", faster)


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", ["skips", "unet", "gpt", "lstm_stacked"])
@pytest.mark.usefixtures("always_faster")
def test_compiled_streams_give_what_the_unsplit_model_gives(name: str) -> None:
    case = CASES[name]
    model, whole = (made.float() for made in twins(case.make, training=False))
    flow = placed(model, device_ids=["cpu:0", "cpu:1", "cpu:2"])
    batches = [case.inputs(False) for _ in range(5)]
    results = list(flow.stream((kwargs or args for args, kwargs in batches), compile="aot_eager"))
    assert len(flow.compiled) >= 3 and flow.not_compiled_because == {}
    with torch.no_grad():
        for result, (args, kwargs) in zip(results, batches, strict=True):
            torch.testing.assert_close(
                _leaves(result), _leaves(whole(*args, **kwargs)), atol=1e-4, rtol=1e-4
            )


def _leaves(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


@pytest.mark.usefixtures("always_faster")
def test_a_shape_is_compiled_when_it_comes_for_the_second_time_and_for_itself_alone() -> None:
    seen: list[list[Any]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append([given for given in inputs if isinstance(given, torch.SymInt)])
        return graph.forward

    model = _Model()
    flow, whole = _flow(copy.deepcopy(model)), model.eval()
    for rows, made in (((4, 3, 5), 0), ((4, 4, 4), 2), ((3, 3), 4), ((4, 3), 4)):
        batches = _batches(*rows)
        with torch.no_grad():
            torch.testing.assert_close(
                list(flow.stream(batches, compile=backend)), [whole(x) for x in batches]
            )
        assert len(seen) == made
    assert not any(seen)
    # of the shape that came last
    assert flow.compiled["segment 0 of 2 on cpu:0"] == "0.0312 ms, 0.0625 ms without"


@pytest.mark.usefixtures("always_faster")
def test_streams_of_one_flow_with_and_without_it_stand_side_by_side() -> None:
    flow, batches = _flow(_Model()), _batches(4, 4, 4)
    plain = list(flow.stream(batches))
    assert flow.compiled == flow.not_compiled_because == {}
    torch.testing.assert_close(list(flow.stream(batches, compile="aot_eager")), plain)
    assert [len(pipeline.compiling()) for pipeline in flow.calls.streams.pipelines()] == [0, 2]
    kinds = {type(stage.segment) for stage in flow.calls.streams.pipelines()[1].stages}
    assert kinds == {CompiledSegment}
    flow.update_flow()
    assert flow.compiled == {}


@pytest.mark.usefixtures("always_faster")
def test_weights_that_change_in_place_are_those_that_compiled_segments_use() -> None:
    model = _Model()
    flow, batches = _flow(model), _batches(4, 4, 4)
    before = list(flow.stream(batches, compile="aot_eager"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
        after = list(flow.stream(batches, compile="aot_eager"))
        assert not torch.equal(before[2], after[2])
        torch.testing.assert_close(after, [copy.deepcopy(model)(x) for x in batches])


@pytest.mark.parametrize("after_ms", [2.0, 1.0, 0.996])
def test_a_segment_that_gains_nothing_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, after_ms: float
) -> None:
    times = iter([1.0, after_ms, 1.0, after_ms])
    monkeypatch.setattr(compiled_streams, "trial_ms", lambda *given: next(times))
    flow = _flow(_Model())
    list(flow.stream(_batches(4, 4, 4), compile="aot_eager"))
    assert flow.compiled == {}
    assert set(flow.not_compiled_because.values()) == {
        f"it is no faster: {after_ms:.3g} ms, 1 ms without"
    }
    assert not any(
        isinstance(stage.segment, CompiledSegment)
        for stage in flow.calls.streams.pipelines()[0].stages
    )


def test_a_compiler_that_fails_leaves_the_segments_as_they_were_and_says_why() -> None:
    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        raise NotImplementedError("no such operation")

    model = _Model()
    flow, batches = _flow(model), _batches(4, 4, 4)
    results = list(flow.stream(batches, compile=backend))
    assert flow.compiled == {} and len(flow.not_compiled_because) == 2
    assert all("no such operation" in why for why in flow.not_compiled_because.values())
    with torch.no_grad():
        torch.testing.assert_close(results, [copy.deepcopy(model)(x) for x in batches])


class _Cast(nn.Module):
    """Its first layer casts as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.forward = self._first  # type: ignore[method-assign]

    def _first(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return nn.functional.linear(x, self.first.weight).float()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x))
        return result


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@pytest.mark.usefixtures("always_faster")
def test_a_layer_that_casts_for_itself_is_compiled_and_the_callers_autocast_is_kept() -> None:
    model = _Cast().eval()
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, last=1)
    flow.update_flow()
    batches, before = _batches(4, 4, 4), _modes()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        inside = _modes()
        results = list(flow.stream(batches, compile="aot_eager"))
        assert _modes() == inside
        torch.testing.assert_close(results, [copy.deepcopy(model)(x) for x in batches])
    assert _modes() == before
    assert len(flow.compiled) == 2


def test_what_a_compiler_leaves_of_the_callers_modes_is_put_right() -> None:
    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__()
        torch.set_grad_enabled(True)
        raise NotImplementedError("half way")

    flow, before = _flow(_Model()), _modes()
    with torch.no_grad():
        list(flow.stream(_batches(4, 4, 4), compile=backend))
        assert not torch.is_grad_enabled()
    assert _modes() == before
    assert len(flow.not_compiled_because) == 2


class _Cache(nn.Module):
    """Room for as many rows as batches come, of which each leaves one; and a layer that writes to
    what it is given."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(rows, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, self.place, x[:1])
        self.place.add_(1)
        result: Tensor = self.last(self.first(x).relu_())
        return result


@pytest.mark.usefixtures("always_faster")
def test_trials_leave_no_trace_in_what_a_model_counts() -> None:
    model = _Cache(rows=4).eval()
    whole = copy.deepcopy(model)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, last=1)
    flow.update_flow()
    batches = _batches(4, 4, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(
            list(flow.stream(batches, compile="aot_eager")), [whole(x) for x in batches]
        )
    torch.testing.assert_close(model.rows, whole.rows)
    assert model.place == whole.place == 4


def test_of_two_shapes_the_one_that_came_last_says_whether_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(compiled_streams, "trial_ms", lambda *given: next(times))
    flow = _flow(_Model())
    list(flow.stream(_batches(4, 4, 3, 3), compile="aot_eager"))
    assert flow.compiled == {} and len(flow.not_compiled_because) == 2
    list(flow.stream(_batches(4), compile="aot_eager"))
    assert len(flow.compiled) == 2 and flow.not_compiled_because == {}


def test_a_model_that_runs_through_hooks_is_not_compiled_and_that_is_said() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            result: Tensor = self.last(y) if y.sum() > 0 else y
            return result

    flow = DataFlow(Chooses().eval(), ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, last=1)
    flow.update_flow()
    list(flow.stream(_batches(4, 4), compile="aot_eager"))
    assert "runs through hooks" in flow.not_compiled_because["the model"]


class _Counted(nn.Module):
    """The second layer reads a number that the first one's result gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(y) * y.sum().item()
        return result


def test_what_reads_a_number_of_values_is_not_compiled_and_says_so() -> None:
    model = _Counted().eval()
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, last=1)
    flow.update_flow()
    batches = _batches(4, 4, 4)
    results = list(flow.stream(batches, compile="aot_eager"))
    told = flow.not_compiled_because["segment 1 of 2 on cpu:1"]
    assert "a number that depends on values of tensors" in told
    with torch.no_grad():
        torch.testing.assert_close(results, [copy.deepcopy(model)(x) for x in batches])


def test_under_logical_devices_nothing_is_compiled_and_that_is_said() -> None:
    model = _Model().double().eval()
    batches = [batch.double() for batch in _batches(4, 4, 4)]
    with torch.no_grad():
        expected = [copy.deepcopy(model)(batch) for batch in batches]
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, second=0, third=1, last=1)
        flow.update_flow()
        results = list(flow.stream(batches, compile="aot_eager"))
    assert set(flow.not_compiled_because.values()) == {"logical_devices looks at every operation"}
    assert_close(results, expected)


@pytest.mark.parametrize("compile", ["inducter", 2, ["inductor"]])
def test_what_is_no_backend_is_refused_before_a_batch_is_taken(compile: Any) -> None:
    with pytest.raises(InputError, match="compile="):
        _flow(_Model()).stream(iter([]), compile=compile)


@pytest.mark.usefixtures("always_faster")
def test_a_batch_is_measured_compiled_where_that_is_asked_for() -> None:
    flow = _flow(_Model())
    (batch,) = _batches(8)
    plain = flow.measure(batch, chunks=2)
    assert flow.compiled == {} and not any("is compiled" in note for note in plain.notes)
    compiled = flow.measure(batch, chunks=2, compile="aot_eager")
    assert len(flow.compiled) == 2
    for index, gain in enumerate(flow.compiled.values()):
        assert f"segment {index} on cpu:{index} is compiled: {gain}" in compiled.notes
    # all but their times
    assert {row[:4] for row in compiled.rows} == {row[:4] for row in plain.rows}


def test_a_measurement_says_why_a_segment_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_streams, "gains", lambda after_ms, before_ms: False)
    (batch,) = _batches(8)
    notes = _flow(_Model()).measure(batch, chunks=2, compile="aot_eager").notes
    for index in range(2):
        assert any(
            note.startswith(f"segment {index} on cpu:{index} is not compiled: ") for note in notes
        )


def test_a_step_is_measured_as_it_was_made() -> None:
    flow = _flow(_Model())
    step = flow.train_step(nn.functional.mse_loss)
    (batch,) = _batches(4)
    with pytest.raises(InputError, match=r"a step runs as train_step\(compile=...\) made it"):
        flow.measure(batch, batch, step=step, compile=True)
    with pytest.raises(InputError, match="is not a backend of"):
        flow.measure(batch, compile="inductr")
