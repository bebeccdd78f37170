"""The profile from few blocks equals the profile of the whole model, or is not used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from placer import zoo
from placer.capture.capture import capture_graph
from placer.estimator import fake_profile
from placer.estimator.device_sizes import sized_cluster
from placer.estimator.repeated_blocks import FEWEST_BLOCKS, short_model
from placer.schema import Profile, ProfileOptions

BLOCKS, WIDTH = 13, 8


class Chain(nn.Module):
    """Equal blocks that run one after the other."""

    def __init__(self, count: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Collected(Chain):
    """The head reads a result from the middle of the chain."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in (3, 11):
                kept.append(x)
        result: Tensor = self.head(sum(kept, start=x))
        return result


class Returned(Chain):
    """A result from the middle of the chain is a result of the model."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return self.head(x), kept[3]  # type: ignore[return-value]


class Numbered(Chain):
    """One block in the middle has one more operation."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x).sin() if number == 11 else block(x)
        result: Tensor = self.head(x)
        return result


class Shared(Chain):
    """The blocks share their weights."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0].weight = self.blocks[0][0].weight  # type: ignore[index]


class Wider(Chain):
    """One block in the middle is larger inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[11] = nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH))


class Residual(Chain):
    """Blocks that add to what they read, in their forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Added() for _ in range(BLOCKS))


class Added(nn.Module):
    """A normalised sum of the input and what a linear layer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.inner(x).relu())
        return result


def _llama() -> nn.Module:
    return zoo.llama(BLOCKS, WIDTH, 2, 2, 2 * WIDTH, 50)


def _gpt() -> nn.Module:
    return zoo.gpt(BLOCKS, WIDTH, 2, 16, 50)


def _profile(model: nn.Module, inputs: Tensor, training: bool, granularity: str) -> Profile:
    options = ProfileOptions(granularity=granularity)
    cluster = sized_cluster([2**30], 0)
    found = fake_profile.estimated_profile(model, inputs, cluster, options, training=training)
    return found.model_copy(update={"graph_hash": ""})


REST = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("make", "granularity"),
    [
        pytest.param(_llama, "auto", marks=REST),
        pytest.param(_llama, "fine", marks=REST),
        pytest.param(_gpt, "blocks", marks=REST),
        (Residual, "blocks"),
        (Residual, "fine"),
        (Chain, "auto"),
    ],
)
def test_the_profile_from_few_blocks_is_the_profile_of_the_whole_model(
    make: Callable[[], nn.Module], granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = make()
        tokens = make in (_llama, _gpt)
        inputs = torch.zeros(2, WIDTH, dtype=torch.int64 if tokens else torch.float32)
    training = granularity != "blocks"
    assert short_model(model.train(training), (inputs,), {}) is not None
    found = _profile(model, inputs, training, granularity)
    monkeypatch.setattr(fake_profile, "short_model", lambda *_: None)
    assert found == _profile(model, inputs, training, granularity)


@pytest.mark.parametrize("make", [Collected, Returned, Numbered, Shared, Wider])
def test_blocks_that_differ_are_all_captured(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
        assert short_model(model, (torch.zeros(2, WIDTH),), {}) is None


def test_a_model_that_needs_values_is_captured_as_a_whole() -> None:
    class Reading(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * x.sum().item())

    with torch.device("meta"):
        model, inputs = Reading(), torch.zeros(2, WIDTH)
    assert short_model(model, (inputs,), {}) is None


def test_only_few_blocks_are_captured_and_the_model_keeps_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def counted(model: Chain, *args: object, **kwargs: object) -> object:
        counts.append(len(model.blocks))
        return capture_graph(model, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("placer.profiler.profile.capture_graph", counted)
    with torch.device("meta"):
        model, inputs = Chain(40), torch.zeros(2, WIDTH)
    _profile(model, inputs, True, "auto")
    assert (counts, len(model.blocks)) == ([FEWEST_BLOCKS], 40)
