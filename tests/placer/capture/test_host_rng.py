"""Random numbers of a model, distinguished from other threads' numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch import Tensor, nn

from placer.capture.capture import capture_graph
from placer.errors import CaptureError


@pytest.fixture
def others() -> Iterator[None]:
    """Run a thread that draws from Python's and torch's generators all the time."""
    over, begun = threading.Event(), threading.Event()

    def draw() -> None:
        while not over.is_set():
            random.random()
            torch.rand(2)
            begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait(10)
    yield
    over.set()
    thread.join(10)


class _Does(nn.Module):
    """A linear layer that also calls a function."""

    def __init__(self, extra: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self._extra = nn.Linear(4, 4), extra

    def forward(self, x: Tensor) -> Tensor:
        self._extra()
        result: Tensor = nn.functional.dropout(self.linear(x))
        return result


@pytest.mark.usefixtures("others")
def test_a_model_is_captured_while_other_threads_draw() -> None:
    assert [
        layer.name
        for layer in capture_graph(_Does(lambda: None), torch.randn(2, 4), hooks=False).layers
    ] == ["linear"]


DRAWS = {
    "draws from Python's random": lambda: random.randint(0, 3),
    "draws from numpy.random": lambda: numpy.random.rand(),
    "seeds torch's generator": lambda: torch.manual_seed(random.Random().randint(0, 10**9)),
}


@pytest.mark.parametrize("why", DRAWS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_that_draws_is_not(why: str, threads: int, request: pytest.FixtureRequest) -> None:
    if threads > 1:
        request.getfixturevalue("others")
    with pytest.raises(CaptureError, match=f"^forward {why}, and a graph"):
        capture_graph(_Does(DRAWS[why]), torch.randn(2, 4), hooks=False)


@pytest.mark.usefixtures("others")
def test_what_other_threads_drew_is_not_drawn_again() -> None:
    """The states are restored only where this thread has changed them, at the second trace."""
    seen = set()
    for _ in range(3):
        capture_graph(_Does(lambda: None), torch.randn(2, 4), hooks=False)
        seen.add(torch.rand(1).item())
    assert len(seen) == 3
