"""A step that fails says where, leaves the model as it was, and the next step is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import Faults
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow
from placer.errors import MixedDevicesError, StageError
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

CHUNKS = 4


class _Model(nn.Module):
    """The layer that fails is the second of the second device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.before, self.brittle, self.after = nn.Linear(4, 4), nn.Hardtanh(), nn.Tanh()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        result: Tensor = self.last(self.after(self.brittle(self.before(x))))
        return result


PLACES = {"first": 0, "norm": 0, "before": 1, "brittle": 1, "after": 1, "last": 2}


def _flow(model: nn.Module) -> DataFlow:
    return unverified(_place(DataFlow(model)))  # the pass that fails is the first


def _place(flow: DataFlow) -> DataFlow:
    flow.layer_gpus.update(PLACES)
    flow.update_flow()
    return flow


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def _unsplit_step(whole: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part, goal in zip(*(tensor.chunk(CHUNKS) for tensor in _batch()), strict=True):
        loss = functional.mse_loss(whole(part), goal) / CHUNKS
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def _same(model: nn.Module, whole: nn.Module) -> None:
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name].cpu(), value, atol=1e-10, rtol=1e-10, msg=name
        )


@pytest.fixture(scope="module")
def both() -> CapturedOnce:
    return CapturedOnce(_Model)


def _fails_in_the_second_step(
    both: CapturedOnce,
    phase: str,
    micro_batch: int,
    fault: Callable[[], BaseException],
    expected: Any,
    schedule: Order,
) -> BaseException:
    """One good step, one that fails, one good step; then undo. Compared with two steps of the
    unsplit model."""
    model, whole = both.model, both.reference
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)
    )
    with logical_devices(3), Faults() as faults, both.flow() as flow:
        step = _place(flow).train_step(functional.mse_loss, ours, schedule)
        step(*_batch(), chunks=CHUNKS)
        _unsplit_step(whole, theirs)
        faults.reset()
        faults.at[phase, micro_batch] = fault
        with pytest.raises(expected) as caught:
            step(*_batch(), chunks=CHUNKS)
        faults.reset()
        _same(model, whole)
        assert all(parameter.grad is None for parameter in model.parameters())
        loss = step(*_batch(), chunks=CHUNKS).cpu()
        faults.reset()
        torch.testing.assert_close(loss, _unsplit_step(whole, theirs), atol=1e-10, rtol=1e-10)
        flow.undo()
    _same(model, whole)
    return caught.value


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
@pytest.mark.parametrize("micro_batch", [0, 2, CHUNKS - 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_exception_names_segment_layer_and_micro_batch(
    phase: str, micro_batch: int, schedule: Order, both: CapturedOnce
) -> None:
    error = _fails_in_the_second_step(
        both, phase, micro_batch, lambda: ValueError("a fault"), StageError, schedule
    )
    assert isinstance(error, StageError)
    assert (error.device, error.layer, error.batch) == ("cpu:1", "brittle", micro_batch)
    assert isinstance(error.__cause__, ValueError)
    place = f"the {phase} pass of segment 1 of 3 on cpu:1, layer 'brittle'"
    assert str(error) == f"micro-batch {micro_batch} failed in {place}: ValueError: a fault"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_is_also_torchs_own_error_and_says_what_helps(
    phase: str, both: CapturedOnce
) -> None:
    def fault() -> BaseException:
        return torch.OutOfMemoryError("no room for 2 GiB")

    error = _fails_in_the_second_step(both, phase, 1, fault, torch.OutOfMemoryError, "1f1b")
    assert isinstance(error, StageError) and (error.device, error.layer, error.batch) == (
        "cpu:1",
        "brittle",
        1,
    )
    assert (
        "no room for 2 GiB; place fewer layers there, or cut the batch into more micro-batches"
        in str(error)
    )


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_interrupt_stays_one_and_its_note_says_where(phase: str, both: CapturedOnce) -> None:
    error = _fails_in_the_second_step(both, phase, 2, KeyboardInterrupt, KeyboardInterrupt, "1f1b")
    note = (
        f"while micro-batch 2 was in the {phase} pass of segment 1 of 3 on cpu:1, layer 'brittle'"
    )
    assert error.__notes__ == [note]


def test_placers_own_errors_keep_their_type(both: CapturedOnce) -> None:
    error = _fails_in_the_second_step(
        both, "forward", 1, lambda: MixedDevicesError("mixed"), MixedDevicesError, "1f1b"
    )
    assert "micro-batch 1" in error.__notes__[0]


def test_a_failure_while_the_pipeline_is_prepared_leaves_everything_as_it_was() -> None:
    torch.manual_seed(0)
    model = _Model().double()
    whole = copy.deepcopy(model)
    with logical_devices(3), Faults() as faults:
        step = _flow(model).train_step(
            functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        faults.at["forward", 0] = lambda: ValueError("a fault")
        with pytest.raises(
            StageError, match="micro-batch 0 failed in the first pass of segment 1 of 3 on cpu:1"
        ):
            step(*_batch(), chunks=CHUNKS)
        _same(model, whole)
        faults.reset()
        loss = step(*_batch(), chunks=CHUNKS).cpu()
    expected = _unsplit_step(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    _same(model, whole)


def test_a_loss_that_fails_is_named_as_the_loss() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss")

    with logical_devices(3):
        step = _flow(_Model().double()).train_step(loss_fn)
        with pytest.raises(StageError, match=r"on cpu:2, layer '\(loss\)': ValueError: no loss"):
            step(*_batch(), chunks=CHUNKS)


def test_gradients_that_waited_are_dropped_with_the_batch_that_failed() -> None:
    torch.manual_seed(0)
    model = _Model().double()
    whole = copy.deepcopy(model)
    with logical_devices(3), Faults() as faults:
        flow = _flow(model)
        step = flow.train_step(functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        step(*_batch(), chunks=CHUNKS, update=False)
        running = {name: value.clone() for name, value in model.named_buffers()}
        faults.reset()
        faults.at["backward", 3] = lambda: ValueError("a fault")
        with pytest.raises(StageError):
            step(*_batch(), chunks=CHUNKS, update=False)
        for name, value in model.named_buffers():
            torch.testing.assert_close(value, running[name])
        faults.reset()
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), whole.buffers(), strict=True):
                buffer.copy_(value)
        step(*_batch(), chunks=CHUNKS)
    _unsplit_step(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    _same(model, whole)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_call_that_fails_names_segment_layer_and_micro_batch_too(chunks: int) -> None:
    torch.manual_seed(0)
    model = _Model().double().eval()
    inputs = _batch()[0]
    expected = model(inputs)
    with logical_devices(3), Faults() as faults:
        flow = _flow(model)
        faults.reset()
        faults.at["forward", chunks - 1] = lambda: ValueError("a fault")
        with pytest.raises(
            StageError,
            match=f"micro-batch {chunks - 1} failed in the forward pass of segment 1 of 3",
        ):
            flow(inputs, chunks=chunks)
        faults.reset()
        torch.testing.assert_close(flow(inputs, chunks=chunks).detach().cpu(), expected.detach())


class _Branching(nn.Module):
    """A branch on a tensor's value: it runs through hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Sequential(nn.Hardtanh(), nn.Linear(4, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x))
        result: Tensor = self.two(x if x.sum() > 1e9 else -x)
        return result


@pytest.mark.parametrize("chunks", [1, CHUNKS])
@pytest.mark.parametrize("kind", [_Model, _Branching])
def test_a_loss_that_lacks_its_target_says_so(kind: type[nn.Module], chunks: int) -> None:
    # it was torch's "argument 'target' (position 2) must be Tensor, not NoneType" alone.
    with logical_devices(3):
        flow = DataFlow(kind().double())
        flow.update_flow()
        with pytest.raises(
            StageError,
            match=r"not NoneType; loss_fn\(output, target\) got the target None; if it needs "
            r"another one, call step\(inputs, target\)$",
        ):
            flow.train_step(nn.CrossEntropyLoss())(_batch()[0], chunks=chunks)


@pytest.mark.parametrize(
    ("phase", "place"), [("forward", "on cpu:1, layer 'two.0'"), ("backward", "on cpu:0")]
)
def test_a_model_that_runs_through_hooks_is_left_as_it_was_too(phase: str, place: str) -> None:
    torch.manual_seed(0)
    model = _Branching().double()
    whole = copy.deepcopy(model)
    ours, theirs = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)
    )
    with logical_devices(2), Faults() as faults:
        flow = DataFlow(model)
        flow.layer_gpus["two"] = 1
        flow.update_flow()
        step = flow.train_step(functional.mse_loss, ours)
        step(*_batch(), chunks=CHUNKS)
        assert flow.not_captured_because
        _unsplit_step(whole, theirs)
        faults.reset()
        faults.at[phase, 2] = lambda: ValueError("a fault")
        with pytest.raises(
            StageError,
            match=f"micro-batch 2 failed in the training pass {place}: ValueError: a fault",
        ):
            step(*_batch(), chunks=CHUNKS)
        _same(model, whole)
        assert all(parameter.grad is None for parameter in model.parameters())
        faults.reset()
        step(*_batch(), chunks=CHUNKS)
    _unsplit_step(whole, theirs)
    _same(model, whole)
