"""Flows that several threads call at once, as a server does, answer each as the unsplit model
would."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch
from splitting import twins
from torch import Tensor, nn
from torch.nn import functional
from unverified import unverified

from placer import DataFlow

THREADS, CALLS = 4, 15


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x).relu()).relu())
        return result


class _Branches(_Net):
    """Runs through hooks; whole batches and their parts take the same branch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.isfinite().all() else -x)


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _streamed(flow: DataFlow, x: Tensor) -> Tensor:
    return torch.cat([*flow.stream(x.chunk(2))])


WAYS: dict[str, Callable[[DataFlow, Tensor], Tensor]] = {
    "call": lambda flow, x: flow(x),
    "micro-batches": lambda flow, x: flow(x, chunks=2),
    "stream": _streamed,
}


def _assert_all_are_served(make: type[nn.Module], way: str, devices: list[str]) -> None:
    model, whole = twins(make, training=False)
    flow = DataFlow(model, device_ids=devices)
    flow.layer_gpus.update(first=devices[0], middle=devices[-1], last=devices[0])
    flow.update_flow()

    def serve(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(CALLS):
                x = torch.randn(6, 8, dtype=torch.float64, generator=random)
                expected = (
                    whole(x) if way == "call" else torch.cat([whole(part) for part in x.chunk(2)])
                )
                torch.testing.assert_close(WAYS[way](flow, x).cpu(), expected)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(serve, seed) for seed in range(THREADS)]:
            done.result(timeout=120)


@pytest.mark.covering
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [_Net, _Branches])
def test_every_thread_has_the_results_of_its_own_batches(make: type[nn.Module], way: str) -> None:
    _assert_all_are_served(make, way, ["cpu:0", "cpu:1"])


@pytest.mark.gpu
@pytest.mark.usefixtures("often", "exact")
@pytest.mark.parametrize("way", WAYS)
def test_every_thread_has_the_results_of_its_own_batches_on_gpus(way: str) -> None:
    _assert_all_are_served(
        _Net, way, [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    )


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_threads_take_turns_at_steps_of_one_flow(shared: bool) -> None:
    """They ran into one another's micro-batches, and the process ended in "corrupted double-linked
    list"."""
    model, whole = twins(_Net)
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, middle=1, last=0)
    flow.update_flow()
    x, goal = torch.ones(6, 8, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.float64)
    expected = functional.mse_loss(whole(x), goal).detach()
    steps = [flow.train_step(functional.mse_loss)] * THREADS
    if not shared:
        steps = [flow.train_step(functional.mse_loss) for _ in range(THREADS)]

    def train(number: int) -> None:
        for _ in range(CALLS):
            torch.testing.assert_close(steps[number](x, goal, chunks=3), expected)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(train, number) for number in range(THREADS)]:
            done.result(timeout=120)


def _serve(model: nn.Module, devices: list[str]) -> str:
    """A flow of a model of this thread's own, called in all ways; why it was not captured."""
    whole = copy.deepcopy(model)
    flow = DataFlow(model, device_ids=devices)
    flow.layer_gpus.update(first=devices[0], middle=devices[-1], last=devices[0])
    flow.update_flow()
    for way in WAYS:
        for _ in range(3):
            x = torch.randn(6, 8, dtype=torch.float64)
            with torch.no_grad():
                torch.testing.assert_close(WAYS[way](flow, x).cpu(), whole(x))
    step = flow.train_step(functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        x, goal = torch.randn(6, 8, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.float64)
        theirs.zero_grad()
        loss = functional.mse_loss(whole(x), goal)
        loss.backward()
        theirs.step()
        torch.testing.assert_close(step(x, goal, chunks=2).cpu(), loss.detach())
    return flow.not_captured_because


def _assert_each_is_served(devices: list[str]) -> None:
    models = [_Net().double() for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        served = [pool.submit(_serve, model, devices) for model in models]
        assert [done.result(timeout=120) for done in served] == [""] * THREADS


@pytest.mark.usefixtures("often")
def test_flows_of_their_own_in_threads_are_captured_and_right() -> None:
    """Others draw random numbers meanwhile, which is no fault of the model's."""
    _assert_each_is_served(["cpu:0", "cpu:1"])


class _Counts(_Branches):
    """Knows how many threads were in it at once, at the most."""

    def __init__(self, inside: list[int]) -> None:
        super().__init__()
        self._inside = inside

    def forward(self, x: Tensor) -> Tensor:
        self._inside.append(self._inside[-1] + 1)
        try:
            sleep(0.001)
            return super().forward(x)
        finally:
            self._inside.append(self._inside[-1] - 1)


@pytest.mark.usefixtures("often")
def test_flows_of_one_model_take_turns_as_each_moves_its_weights() -> None:
    inside = [0]
    model, whole = _Counts(inside).double().eval(), _Branches().double().eval()
    whole.load_state_dict(model.state_dict())

    def serve(place: str, other: str) -> None:
        flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update(first=place, middle=other, last=place)
        flow.update_flow()
        with torch.no_grad():
            for _ in range(CALLS):
                x = torch.randn(6, 8, dtype=torch.float64)
                torch.testing.assert_close(flow(x).cpu(), whole(x))

    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(serve, *places) for places in (("cpu:0", "cpu:1"), ("cpu:1", "cpu:0"))
        ]:
            done.result(timeout=120)
    assert len(inside) >= 4 * CALLS and max(inside) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("often", "exact")
def test_flows_of_their_own_in_threads_are_captured_and_right_on_gpus() -> None:
    _assert_each_is_served([f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))])


class _Synchronises(_Net):
    """The host waits to see whether there is an inverse."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(
            x @ torch.linalg.inv(torch.eye(8, dtype=x.dtype, device=x.device) + x.T @ x)
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("often", "exact")
@pytest.mark.parametrize("make", [_Net, _Synchronises])
def test_a_thread_may_wait_for_a_device_while_another_one_records(make: type[_Net]) -> None:
    """It was told that it called a synchronizing operation; what may not be recorded is told all
    the same."""
    model, whole = twins(make)
    whole.cuda(0)
    flow = unverified(DataFlow(model))  # samples meet in an inverse
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    over = threading.Event()

    def wait() -> int:
        count, here = 0, torch.ones(8, device="cuda:0")
        while not over.is_set():
            count += int(here.cpu().sum()) // 8
        return count

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        waiting = pool.submit(wait)
        try:
            for rows in (4, 6, 6, 8, 8):
                x, goal = (
                    torch.randn(rows, 8, dtype=torch.float64),
                    torch.zeros(rows, 3, dtype=torch.float64),
                )
                parts = zip(x.cuda(0).chunk(2), goal.cuda(0).chunk(2), strict=True)
                expected = sum(
                    functional.mse_loss(whole(part), zeros).detach() / 2 for part, zeros in parts
                )
                torch.testing.assert_close(step(x, goal, chunks=2), expected)
        finally:
            over.set()
        assert waiting.result(timeout=60) > 1
    assert bool(step.not_recorded_because) == (make is _Synchronises)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
def test_steps_are_recorded_while_a_loader_pins_batches_in_a_thread() -> None:
    device = torch.device("cuda", 0)
    model, whole = twins(_Net)
    whole.to(device)
    flow = DataFlow(model, device_ids=[device])
    flow.update_flow()
    step = flow.train_step(functional.mse_loss)
    over = threading.Event()

    def pin() -> int:
        size = 0
        while not over.is_set():
            size += 1
            # each size anew: nothing is cached
            torch.empty(100_000 * size).pin_memory().to(device, non_blocking=True)
        return size

    with ThreadPoolExecutor(1) as pool:
        pinned = pool.submit(pin)
        try:
            for rows in (4, 6, 8):
                x, goal = (
                    torch.randn(rows, 8, dtype=torch.float64),
                    torch.zeros(rows, 3, dtype=torch.float64),
                )
                expected = functional.mse_loss(whole(x.to(device)), goal.to(device)).detach()
                torch.testing.assert_close(step(x, goal, chunks=2), expected)
        finally:
            over.set()
        assert pinned.result(timeout=60) > 1
    assert {
        stage.not_recorded_because for pipeline in step.pipelines for stage in pipeline.stages
    } == {""}
