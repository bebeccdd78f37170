"""One flow that several threads call at once, as a server does, answers each as the unsplit model would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from splitting import twins
from torch import Tensor, nn

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
    """Runs through hooks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


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
                expected = whole(x) if way == "call" else torch.cat([whole(part) for part in x.chunk(2)])
                torch.testing.assert_close(WAYS[way](flow, x).cpu(), expected)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(serve, seed) for seed in range(THREADS)]:
            done.result(timeout=120)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [_Net, _Branches])
def test_every_thread_has_the_results_of_its_own_batches(make: type[nn.Module], way: str) -> None:
    _assert_all_are_served(make, way, ["cpu:0", "cpu:1"])


@pytest.mark.gpu
@pytest.mark.usefixtures("often", "exact")
@pytest.mark.parametrize("way", WAYS)
def test_every_thread_has_the_results_of_its_own_batches_on_gpus(way: str) -> None:
    _assert_all_are_served(_Net, way, [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))])
