"""A traced pass that is run again: order across devices, shared copies, and differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from placer import devices
from placer.executor.generation.tracing.operation_trace import OperationTrace
from placer.executor.generation.tracing.trace_replay import TraceReplay
from placer.testing import logical_devices


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[list[torch.device]]:
    with torch.no_grad(), logical_devices(2) as places:
        yield places


def _at(value: Tensor, place: int) -> Tensor:
    return devices.copy(value, torch.device("cpu", place))


def _moved(value: Tensor, place: int) -> Tensor:
    return devices.move(value, torch.device("cpu", place))


def _replayed(run: Callable[[], Tensor]) -> tuple[TraceReplay, Callable[[], Tensor]]:
    """Trace a pass; return its replay, and a function that runs it and returns its result."""
    with OperationTrace() as tracer:
        result = run()
    assert tracer.trace.obstacle == ""
    number = tracer.number(result)
    assert number is not None
    replay = TraceReplay(tracer.trace, [number])
    replay.record()

    def again() -> Tensor:
        replay.run()
        return replay.value(number).cpu()

    return replay, again


def test_a_pass_over_two_devices_runs_again_on_other_inputs() -> None:
    x, weight = _at(torch.arange(4.0), 0), _at(torch.full((4,), 2.0), 1)

    def run() -> Tensor:
        return _moved(_moved(x * 3, 1) * weight, 0) + x

    replay, again = _replayed(run)
    assert [str(piece.device) for piece in replay.pieces] == ["cpu:0", "cpu:1", "cpu:0"]
    x.copy_(_at(torch.tensor([1.0, -2.0, 0.5, 4.0]), 0))
    assert again().tolist() == [7.0, -14.0, 3.5, 28.0]


@pytest.mark.parametrize("computes_on_host", [True, False])
def test_layers_on_the_cpu_are_pieces_between_those_of_a_device(computes_on_host: bool) -> None:
    """``HOST`` is the CPU itself, as on a machine with GPUs, and not a stand-in."""
    x, weight = _at(torch.arange(4.0), 0), torch.full((4,), 2.0)

    def run() -> Tensor:
        return _moved(devices.move(x * 3, devices.HOST) * weight, 0) + x

    with OperationTrace(computes_on_host) as tracer:
        result = run()
    if not computes_on_host:
        assert tracer.trace.obstacle == "it copies a tensor to the host"
        return
    number = tracer.number(result)
    assert number is not None and tracer.trace.obstacle == ""
    replay = TraceReplay(tracer.trace, [number])
    replay.record()
    assert [str(piece.device) for piece in replay.pieces] == ["cpu:0", "cpu", "cpu:0"]
    x.copy_(_at(torch.tensor([1.0, -2.0, 0.5, 4.0]), 0))
    replay.run()
    assert replay.value(number).cpu().tolist() == [7.0, -14.0, 3.5, 28.0]


def test_a_value_is_copied_once_for_all_readers_of_a_device() -> None:
    x = _at(torch.arange(4.0), 0)

    def run() -> Tensor:
        mask = x + 1
        total = _moved(x, 1)
        for _ in range(5):
            total = total * _moved(mask, 1)
        return total

    replay, again = _replayed(run)
    assert sum(len(piece.arrivals) for piece in replay.pieces) == 2
    assert again().tolist() == [value * (value + 1) ** 5 for value in range(4)]


def test_a_copy_reads_what_its_source_held_at_that_time() -> None:
    x, kept = _at(torch.ones(3), 0), _at(torch.zeros(3), 0)

    def run() -> Tensor:
        kept.add_(x)
        first = _moved(kept, 1)
        kept.add_(x)
        second = _moved(kept, 1)
        return first * 10 + second

    _, again = _replayed(run)
    # kept is 2 after the trace
    assert again().tolist() == [34.0] * 3
    assert kept.tolist() == [4.0] * 3


def test_a_copy_into_a_tensor_comes_after_its_earlier_readers() -> None:
    x, target = _at(torch.ones(3), 0), _at(torch.full((3,), 5.0), 1)

    def run() -> Tensor:
        before = target * 1
        target.copy_(x + 1)
        return before + target

    _, again = _replayed(run)
    target.fill_(7)
    assert again().tolist() == [9.0] * 3
    assert target.tolist() == [2.0] * 3


def _operations(replay: TraceReplay, name: str) -> int:
    operations = (one for piece in replay.pieces for one in piece.operations)
    return sum(str(one.function).startswith(f"aten.{name}.") for one in operations)


def test_equal_operations_on_equal_values_run_once() -> None:
    x, mask = _at(torch.ones(3), 0), _at(torch.tensor([True, False, True]), 0)

    def run() -> Tensor:
        total = x
        for turn in range(4):
            total = total + torch.where(mask.logical_not(), -1.0, 2.0) * (turn % 2)
        return total

    replay, again = _replayed(run)
    counts = [_operations(replay, name) for name in ("logical_not", "where", "mul", "add")]
    assert counts == [1, 1, 2, 4]
    mask.logical_not_()
    assert again().tolist() == [-1.0, 5.0, -1.0]


def test_an_operation_runs_again_once_its_input_has_changed() -> None:
    x, kept = _at(torch.ones(3), 0), _at(torch.zeros(3), 0)

    def run() -> Tensor:
        before = (kept + 1) * 2
        kept[1:].add_(x[1:])  # through a view of the memory
        return before * 10 + (kept + 1) * 2

    _, again = _replayed(run)
    kept.zero_()
    assert again().tolist() == [22.0, 24.0, 24.0]


def test_equal_values_that_change_in_place_have_memory_of_their_own() -> None:
    x = _at(torch.ones(3), 0)

    def run() -> Tensor:
        one, other = x + 1, x + 1
        one.mul_(5)
        return one - other

    _, again = _replayed(run)
    assert again().tolist() == [8.0] * 3


def test_random_numbers_are_drawn_each_time() -> None:
    x = _at(torch.zeros(64), 0)
    replay, again = _replayed(lambda: torch.rand_like(x) - torch.rand_like(x))
    assert _operations(replay, "rand_like") == 2
    assert 0 not in again().tolist()


def test_a_result_shares_no_memory_with_an_equal_value() -> None:
    x = _at(torch.ones(3), 0)
    with OperationTrace() as tracer:
        results = [x * 2, x * 2]
    numbers = [tracer.number(one) for one in results]
    replay = TraceReplay(tracer.trace, [one for one in numbers if one is not None])
    replay.record()
    replay.run()
    first, second = (replay.value(number) for number in numbers if number is not None)
    first.zero_()
    assert second.tolist() == [2.0] * 3


def test_numbers_of_python_are_kept_and_numbers_of_tensors_computed_again() -> None:
    x = _at(torch.ones(2), 1)

    def run() -> Tensor:
        return torch.where(x > 0, torch.tensor(3.0, device=x.device), torch.tensor(-1.0)) + x.sum()

    _, again = _replayed(run)
    x.copy_(_at(torch.tensor([-1.0, 2.0]), 1))
    assert again().tolist() == [0.0, 4.0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, turn: x * turn, "differs from token to token"),
        (lambda x, turn: x[:turn] * 2, "differs from token to token"),
        (lambda x, turn: x + torch.tensor([float(turn)] * 3, device=x.device), "Python numbers"),
        (lambda x, turn: x * 2 if turn == 1 else x * 2 * 1, "number of operations"),
        (lambda x, turn: x + _KEPT[turn], "did not make"),
    ],
)
def test_passes_that_depend_on_the_turn_differ(
    change: Callable[[Tensor, int], Tensor], why: str
) -> None:
    x = _at(torch.ones(3), 0)
    _KEPT.update({turn: _at(torch.full((3,), float(turn)), 0) for turn in (1, 2)})
    traces = []
    for turn in (1, 2):
        with OperationTrace() as tracer:
            change(x, turn)
        traces.append(tracer.trace)
    assert why in traces[0].difference(traces[1])
    assert traces[0].difference(traces[0]) == ""


_KEPT: dict[int, Tensor] = {}


def test_a_pass_is_the_same_while_the_numbers_that_it_reads_are() -> None:
    x, seen = _at(torch.ones(3), 0), _at(torch.zeros(1), 1)

    def run() -> Tensor:
        result = x * 2 if bool((_moved(x, 1).sum() + seen).item() > 2) else x * 3
        seen.add_(1)
        return result

    replay, again = _replayed(run)
    seen.zero_()
    assert replay.is_same() and again().tolist() == [2.0] * 3
    x.fill_(4)  # another number, 12 instead of 3
    assert not replay.is_same()
    x.fill_(1)
    assert not replay.is_same()  # ``seen`` is 1 now, and the number 4
    seen.zero_()
    assert replay.is_same()


def test_passes_that_read_other_numbers_differ() -> None:
    x = _at(torch.ones(3), 0)
    traces = []
    for value in (1.0, 1.0, 2.0):
        x.fill_(value)
        with OperationTrace() as tracer:
            assert x.sum().item() == 3 * value
        traces.append(tracer.trace)
    assert traces[0].difference(traces[1]) == ""
    assert "numbers on the host" in traces[0].difference(traces[2])


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda x: (x * nn.Parameter(torch.ones(1, device=x.device))).item(), "on the host"),
        (lambda x: x.add_(1).sum().item(), "on the host"),
        (lambda x: x[x > 0], "on the host"),
        (lambda x: devices.move(x, devices.HOST), "to the host"),
        (lambda x: torch.tensor([1.0], device=x.device).add_(x), "Python numbers"),
    ],
)
def test_what_a_recording_cannot_hold_is_an_obstacle(
    run: Callable[[Tensor], object], why: str
) -> None:
    x = _at(torch.ones(1), 0)
    with OperationTrace() as tracer:
        run(x)
    assert why in tracer.trace.obstacle
