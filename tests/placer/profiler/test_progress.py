from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer.profiler import profile as module
from placer.profiler.progress import progress_bar


def test_a_bar_that_is_asked_for_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("always", 2) as step:
        step("layer1")
        step("layer2")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "layer2" in shown.err
    assert "2/2" in shown.err


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_is_shown_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    with progress_bar(shown, 1) as step:  # type: ignore[arg-type]
        step("layer1")
    assert capsys.readouterr() == ("", "")


class Bar:
    """What a bar was told: the number of steps before they began, and each step."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.steps: list[str] = []


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Bar]:
    """Profiles a model, and gives the bar that was shown."""
    bars: list[Bar] = []

    @contextmanager
    def noted(_: Any, total: int) -> Iterator[Callable[[str], None]]:
        bars.append(Bar(total))
        yield bars[-1].steps.append

    monkeypatch.setattr(module, "progress_bar", noted)

    def profiled(model: nn.Module, **options: Any) -> Bar:
        given: dict[str, Any] = {"repeats": 1, "granularity": "fine", "cache": tmp_path}
        module.profile(model, torch.randn(2, 8), ["cpu:0", "cpu:1"], **given | options)
        return bars[-1]

    return profiled


def _chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) if width == 8 else nn.Sequential(nn.Linear(8, width)) for width in widths))


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Mixed(nn.Module):
    """Two layers whose work depends on the batch, and one whose work does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weights = nn.Linear(8, 8), nn.Linear(8, 8)
        self.product = Product()
        self.register_buffer("eye", torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.product(self.first(x), self.weights(self.eye))
        return result


def test_as_many_steps_are_told_as_are_made(bar: Callable[..., Bar]) -> None:
    shown = bar(_chain(8, 8, 8))
    assert shown.total == len(shown.steps) == 3  # the first layer, one for both others, and the link


def test_what_is_in_the_cache_is_no_step(bar: Callable[..., Bar]) -> None:
    bar(_chain(8, 8))
    shown = bar(_chain(8, 8, 4))
    assert shown.steps == ["2.0"] and shown.total == 1
    again = bar(_chain(8, 8, 4))
    assert again.steps == [] and again.total == 0


def test_a_layer_that_several_batch_sizes_share_is_one_step(bar: Callable[..., Bar]) -> None:
    shown = bar(Mixed(), batch_sizes=(2, 4))
    assert shown.total == len(shown.steps)
    assert [shown.steps.count(name) for name in ("first", "weights", "product")] == [2, 1, 2]


def test_after_an_interruption_the_rest_is_left(bar: Callable[..., Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    from placer.profiler import measure

    real = measure.measure_time

    def stop(trial: Any, *rest: Any) -> Any:
        if trial.state[0].shape[0] == 4:
            raise KeyboardInterrupt
        return real(trial, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(measure, "measure_time", stop)
        bar(_chain(8, 8, 4))
    shown = bar(_chain(8, 8, 4))
    assert shown.total == len(shown.steps) == 2  # the layer that was interrupted, and the link
    assert shown.steps[0] == "2.0"
