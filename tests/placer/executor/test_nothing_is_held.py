"""What failed, and what is let go of, holds no memory: at once, for no device asks Python to look
for cycles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faults import Faults
from live_storages import LiveStorages
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import BatchOptions, DataFlow, PlacerError, StageError
from placer.executor.training.training_pipeline import Order

CHUNKS = 4


class _Model(nn.Module):
    """Both kinds of layers whose weight gradients can wait, one that fails, and a buffer that a
    step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.middle, self.brittle, self.last = nn.Flatten(), nn.Hardtanh(), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.brittle(self.middle(self.norm(self.first(x)))))
        return result


PLACES = ["cpu:0", "cpu:1", "cpu:2"]
MAP = {"first": 0, "norm": 0, "middle": 1, "brittle": 1, "last": 2}
X, TARGET = torch.randn(8, 1, 8), torch.randn(8, 2)


def _flow(model: nn.Module, recompute: bool = False) -> DataFlow:
    return _place(DataFlow(model, PLACES), recompute)


def _place(flow: DataFlow, recompute: bool = False) -> DataFlow:
    flow.layer_gpus.update(MAP)
    flow.update_flow()
    flow.recompute = [0, 1, 2] if recompute else []
    # whose passes would be the first, and fail
    flow.batch_options = BatchOptions(verify=False)
    for training in (True, False):
        flow.train(training)
        with torch.no_grad():
            flow(X[:2])  # captures; in training the running statistics change
    flow.train()
    return flow


@pytest.fixture(autouse=True)
def no_search_for_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _counted(model: nn.Module) -> LiveStorages:
    return LiveStorages([X, TARGET, *model.parameters(), *model.buffers()])


def _no_memory() -> BaseException:
    return torch.OutOfMemoryError("no room")


@pytest.fixture(scope="module")
def both() -> CapturedOnce:
    return CapturedOnce(_Model, dtype=torch.float32)


@pytest.mark.covering("schedule", "recompute")
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("fault", [_no_memory, KeyboardInterrupt, lambda: ValueError("a fault")])
def test_a_first_pass_that_fails_leaves_nothing(
    schedule: Order, recompute: bool, fault: Callable[[], BaseException], both: CapturedOnce
) -> None:
    with both.flow(device_ids=PLACES) as flow:
        step = _place(flow, recompute).train_step(functional.mse_loss, schedule=schedule)
        with _counted(both.model) as alive, Faults() as faults:
            faults.at["forward", 0] = fault
            with pytest.raises((StageError, KeyboardInterrupt)):
                step(X, TARGET, chunks=CHUNKS)
            assert alive.bytes == 0
            faults.reset()
            assert step(X, TARGET, chunks=CHUNKS).isfinite()


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fault", [_no_memory, lambda: ValueError("a fault")])
def test_a_later_step_that_fails_leaves_no_more_than_there_was_before_it(
    schedule: Order,
    recompute: bool,
    phase: str,
    fault: Callable[[], BaseException],
    both: CapturedOnce,
) -> None:
    with both.flow(device_ids=PLACES) as flow:
        step = _place(flow, recompute).train_step(functional.mse_loss, schedule=schedule)
        with _counted(both.model) as alive, Faults() as faults:
            for _ in range(2):
                step(X, TARGET, chunks=CHUNKS)
            before = alive.bytes
            faults.reset()
            faults.at[phase, 2] = fault
            with pytest.raises(StageError):
                step(X, TARGET, chunks=CHUNKS)
            assert 0 < alive.bytes <= before
            faults.reset()
            for _ in range(2):
                step(X, TARGET, chunks=CHUNKS)
            assert alive.bytes <= before


def test_an_interrupt_leaves_no_passes_of_the_batch_that_it_came_in() -> None:
    model = _Model()
    step = _flow(model).train_step(functional.mse_loss)
    with _counted(model) as alive, Faults() as faults:
        step(X, TARGET, chunks=CHUNKS)
        faults.reset()
        faults.at["backward", 1] = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            step(X, TARGET, chunks=CHUNKS)
        assert step.pipelines == [] and alive.bytes == 0
        faults.reset()
        assert step(X, TARGET, chunks=CHUNKS).isfinite()


def test_a_new_shape_takes_the_memory_of_others_before_it_runs_out() -> None:
    model = _Model()
    step = _flow(model).train_step(functional.mse_loss)
    with _counted(model) as alive, Faults() as faults:
        for size in (8, 4):
            step(X[:size], TARGET[:size], chunks=2)
        faults.reset()
        faults.at["forward", 0] = _no_memory
        with pytest.warns(
            UserWarning, match=r"in addition to the passes of 2 other\(s\), of this step or of"
        ):
            loss = step(X[:6], TARGET[:6], chunks=2)
        assert len(step.pipelines) == 1
        one = alive.bytes
        faults.reset()
        torch.testing.assert_close(step(X[:6], TARGET[:6], chunks=2), loss)
        assert alive.bytes == one


def _train(flow: DataFlow) -> None:
    flow.train_step(functional.mse_loss)(X, TARGET, chunks=CHUNKS)


def _call(flow: DataFlow) -> None:
    flow(X, chunks=CHUNKS)


def _stream(flow: DataFlow) -> None:
    list(flow.eval().stream([X, X]))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("run", [_train, _call, _stream])
def test_want_of_memory_holds_none_even_while_its_error_is_looked_at(
    run: Callable[[DataFlow], None],
) -> None:
    model = _Model()
    flow = _flow(model)
    with _counted(model) as alive, Faults() as faults:
        faults.at["forward", 0] = _no_memory
        try:
            run(flow)
        except torch.OutOfMemoryError:
            assert alive.bytes == 0
        else:
            pytest.fail("it did not fail")


@pytest.mark.covering
@pytest.mark.parametrize("fault", [_no_memory, lambda: ValueError("a fault")])
@pytest.mark.parametrize("batch", [0, 2])
def test_a_stream_that_fails_holds_its_error_no_longer_than_its_caller(
    batch: int, fault: Callable[[], BaseException]
) -> None:
    model = _Model()
    flow = _flow(model).eval()
    with _counted(model) as alive, Faults() as faults:
        faults.at["forward", batch] = fault
        with pytest.raises(StageError):
            list(flow.stream([X] * 4))
        if not isinstance(fault(), torch.OutOfMemoryError):
            assert alive.bytes > 0  # the passes of the shape are kept
            flow.undo()
        assert alive.bytes == 0
        _place(flow).eval()
        faults.reset()
        assert len(list(flow.stream([X] * 4))) == 4


class _Branching(_Model):
    """Runs through hooks."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if bool(result.sum() > -1e9) else -result


class _FailingOptimizer(torch.optim.SGD):
    """Fails as one does that has no default for its closure."""

    def step(self, closure: Any = None) -> Any:
        return closure()


def _step_with_a_failing_optimizer(flow: DataFlow) -> None:
    optimizer = _FailingOptimizer(flow.parameters(), lr=0.1)
    try:
        flow.train_step(functional.mse_loss, optimizer)(X, TARGET, chunks=CHUNKS)
    finally:
        # gradients stay in place, as after any optimizer that fails
        flow.zero_grad()


def _step_with_a_failing_loss(flow: DataFlow) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError(f"of {(output - target).square().mean()}")

    flow.train_step(loss)(X, TARGET, chunks=CHUNKS)


def _applied(flow: DataFlow) -> None:
    with flow.applied() as model:
        model(X).sum().backward()


def _profile(flow: DataFlow) -> None:
    placer.profile(flow.module, X, ["cpu:0"], training=True, progress=False, repeats=1, cache=False)


RUNS = [
    _train,
    _call,
    _step_with_a_failing_optimizer,
    _step_with_a_failing_loss,
    _applied,
    _profile,
]


@pytest.mark.covering
@pytest.mark.parametrize("make", [_Model, _Branching])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore:the model is not captured")
def test_whatever_fails_leaves_nothing_once_its_error_is_dropped(
    run: Callable[[DataFlow], None], make: type[_Model]
) -> None:
    model = make()
    flow = _flow(model)
    with _counted(model) as alive, Faults() as faults:
        if run not in (_step_with_a_failing_optimizer, _step_with_a_failing_loss):
            faults.at["forward", 2 if run is _profile else 0] = lambda: ValueError("a fault")
        failed = ""
        try:
            run(flow)
        except (ValueError, PlacerError) as error:
            failed = str(error)
        assert failed
        assert alive.bytes == 0


def _drop_step(made: dict[str, Any]) -> None:
    del made["step"]


def _replace_step(made: dict[str, Any]) -> None:
    made["step"] = made["flow"].train_step(functional.mse_loss)


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("let_go", [_drop_step, _replace_step])
def test_a_step_that_is_let_go_of_leaves_the_gradients_alone(
    schedule: Order, let_go: Callable[[Any], None]
) -> None:
    model = _Model()
    flow = _flow(model)
    made: dict[str, Any] = {"flow": flow}
    with _counted(model) as alive:
        made["step"] = flow.train_step(functional.mse_loss, schedule=schedule)
        made["step"](X, TARGET, chunks=CHUNKS)
        let_go(made)
        assert alive.bytes == sum(parameter.nbytes for parameter in model.parameters())
        model.zero_grad()
        assert alive.bytes == 0
