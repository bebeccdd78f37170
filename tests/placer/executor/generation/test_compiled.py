"""Compiled passes of decoding: the unsplit model's tokens, and the plain pass where they fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import resting_models
import torch
from generating_models import greedy, pair, split, token_ids
from torch import Tensor, fx

from placer import DataFlow, devices
from placer.errors import InputError
from placer.executor.generation.tracing import compiled_pieces
from placer.executor.generation.tracing.operation_trace import OperationTrace
from placer.executor.generation.tracing.trace_replay import TraceReplay
from placer.testing import logical_devices

PASSES = 5
OPTIONS = greedy(PASSES + 1)
BACKEND = "aot_eager"
"""It runs the graph with its changes of inputs taken apart, as torch's own backend gets it."""


def trials(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Let every trial take a multiple of the time of the trial before it.

    Args:
        monkeypatch: pytest's.
        factor: below 1 for compiled pieces that are faster.
    """
    times = (factor**number for number in itertools.count())
    run_trial = compiled_pieces.trial_ms

    def trial(*given: Any) -> float:
        run_trial(*given)
        return next(times)

    monkeypatch.setattr(compiled_pieces, "trial_ms", trial)


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, 0.5)


def assert_tokens(compile: Any, name: str = "llama") -> DataFlow:
    """Assert that texts with compiled passes are the unsplit model's; return the flow."""
    model, reference = pair(name)
    flow = split(model)
    for seed in (1, 2):
        with flow.applied(compile=compile):
            found = model.generate(token_ids(seed), **OPTIONS)
        assert found.tolist() == reference.generate(token_ids(seed), **OPTIONS).tolist()
    report = flow.generation_report
    assert (report.recorded, report.hooked) == (2 * PASSES - 2, 2)
    return flow


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("gpt2", "t5"))]
)
def test_texts_are_the_unsplit_models(name: str) -> None:
    report = assert_tokens(BACKEND, name).generation_report
    assert report.compiled == ("cpu: 0.5 ms, 1 ms without",)
    assert report.not_compiled_because == ()


@pytest.mark.exhaustive
def test_torchs_own_compiler_gives_the_unsplit_models_texts() -> None:
    report = assert_tokens(True).generation_report
    assert len(report.compiled) + len(report.not_compiled_because) == 1


def test_what_is_no_faster_runs_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, 1.0)
    report = assert_tokens(BACKEND).generation_report
    assert report.compiled == ()
    assert report.not_compiled_because == ("cpu: it is no faster: 1 ms, 1 ms without",)


@pytest.mark.usefixtures("always_faster")
def test_what_a_compiler_refuses_runs_without_it() -> None:
    def refusing(graph: fx.GraphModule, inputs: Any) -> Any:
        raise NotImplementedError("not today")

    report = assert_tokens(refusing).generation_report
    assert report.compiled == ()
    assert len(report.not_compiled_because) == 1
    assert "not today" in report.not_compiled_because[0]


@pytest.mark.usefixtures("always_faster")
def test_a_compiled_pass_with_another_result_is_not_used() -> None:
    def doubling(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *given: tuple(2 * one for one in graph(*given))

    report = assert_tokens(doubling).generation_report
    assert report.compiled == ()
    assert "the compiled pass gives another result" in report.not_compiled_because[-1]


@pytest.mark.usefixtures("two_stand_ins")
def test_checked_stand_ins_run_without_a_compiler() -> None:
    report = assert_tokens(BACKEND).generation_report
    assert report.not_compiled_because == ("logical_devices looks at every operation",)


@pytest.mark.usefixtures("two_stand_ins")
def test_weights_on_the_host_run_without_a_compiler() -> None:
    model, reference = resting_models.pair()
    flow = resting_models.placed(model, ["cpu:0", "cpu:1"], resting_models.blocks([1, 2]))
    with flow.applied(compile=BACKEND):
        found = model.generate(token_ids(1), **OPTIONS)
    assert found.tolist() == reference.generate(token_ids(1), **OPTIONS).tolist()
    assert flow.generation_report.not_compiled_because == (
        "weights rest on the host, and are copied between operations",
    )


@pytest.mark.usefixtures("always_faster")
def test_several_texts_in_flight_are_compiled() -> None:
    model, reference = pair("llama")
    flow = split(model)
    prompts = [token_ids(seed) for seed in range(3)]
    found = [
        ids.tolist() for ids in flow.generate_many(prompts, in_flight=1, compile=BACKEND, **OPTIONS)
    ]
    assert found == [reference.generate(ids, **OPTIONS).tolist() for ids in prompts]
    assert len(flow.generation_report.compiled) == 1


@pytest.mark.usefixtures("always_faster")
def test_blocks_with_and_without_a_compiler_have_recordings_of_their_own() -> None:
    model, _ = pair("llama")
    flow = split(model)
    recorded = []
    for compile in (False, BACKEND, False, BACKEND):
        with flow.applied(compile=compile), flow.applied():
            model.generate(token_ids(1), **OPTIONS)
        recorded.append(flow.generation_report.recorded)
    # two passes of each kind run before its recording, and none when the kind comes again
    assert recorded == [PASSES - 2, 2 * PASSES - 4, 3 * PASSES - 4, 4 * PASSES - 4]


def test_wrong_arguments_are_named() -> None:
    model, _ = pair("llama")
    flow = split(model)
    with pytest.raises(InputError, match="compile needs recorded passes"):
        flow.applied(record=False, compile=True)
    with pytest.raises(InputError, match="compile='fast' is not a backend"):
        flow.applied(compile="fast")
    with pytest.raises(InputError, match="compile=3: give True, False"):
        flow.generate_many([token_ids(1)], compile=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("always_faster")
def test_pieces_of_several_devices_are_compiled_each() -> None:
    with torch.no_grad(), logical_devices(2):
        first, second = torch.device("cpu", 0), torch.device("cpu", 1)
        x = devices.copy(torch.arange(4.0), first)
        total, weight = devices.copy(torch.zeros(4), first), devices.copy(torch.ones(4), second)
        with OperationTrace() as tracer:
            halves = (x * 3).chunk(2)
            total.add_(x)
            there = devices.move(torch.cat([halves[1], halves[0]]), second) + weight
            result = devices.move(there, first) + total
        number = tracer.number(result)
        assert number is not None
        plain = TraceReplay(tracer.trace, [number])
        plain.record()
        total.zero_()
        plain.run()

    def restore(place: torch.device) -> None:
        if place == first:
            total.zero_()

    with torch.no_grad():
        made = compiled_pieces.compilation(tracer.trace, [number], plain, BACKEND, restore)
        assert made.replay is not None and made.obstacles == []
        assert [gain.partition(": ")[0] for gain in made.gains] == ["cpu:0", "cpu:1", "cpu:0"]
        made.replay.record()
        restore(first)
        x.copy_(Tensor([1.0, 2.0, 3.0, 4.0]))
        made.replay.run()
    assert made.replay.value(number).tolist() == [11.0, 15.0, 7.0, 11.0]
    assert total.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_operation_may_leave_out_results() -> None:
    """As cuDNN's attention does; here the middle one of three gradients."""
    torch.manual_seed(0)
    given, x, weight = torch.randn(1, 3, 4), torch.randn(1, 2, 4), torch.randn(3, 2, 1)
    options = ([3], [1], [0], [1], False, [0], 1, [True, False, True])
    run = torch.ops.aten.convolution_backward.default
    with torch.no_grad(), OperationTrace() as tracer:
        first, left_out, last = run(given, x, weight, *options)
        result = first.sum() + 2 * last
    assert left_out is None
    number = tracer.number(result)
    assert number is not None
    replay = TraceReplay(tracer.trace, [number])
    (piece,) = replay.pieces
    values = replay.values()
    compiled_pieces.CompiledPiece(piece.operations, [number], BACKEND).run(values)
    # a kernel of one entry: each input is the sum over the outputs, with the weights
    expected = (weight[:, :, 0].T @ given[0]).sum() + 2 * given.sum((0, 2))
    torch.testing.assert_close(values[number], expected)
