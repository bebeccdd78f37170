from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer.profiler import profile as module
from placer.profiler.progress import Bar, progress_bar


def test_a_bar_that_is_asked_for_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("always", 2) as step:
        step("layer1")
        step("layer2")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "layer2" in shown.err
    assert "2/2" in shown.err


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_is_shown_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    with progress_bar(shown, 1) as step:  # type: ignore[arg-type]
        step("layer1")
    assert capsys.readouterr() == ("", "")


def test_a_bar_counts_steps_that_become_known_on_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar("always") as step:
        assert capsys.readouterr().err == ""
        step.expect(1)
        step("capture")
        step.expect(2)
        step("layer1")
        step("layer2")
    assert "3/3" in capsys.readouterr().err


class NotedBar(Bar):
    """Notes the steps that begin, and how many were known of then."""

    def __init__(self) -> None:
        super().__init__(None)
        self.steps: list[str] = []
        self.known: list[int] = []

    def __call__(self, description: str) -> None:
        super().__call__(description)
        self.steps.append(description)
        self.known.append(self.total)


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., NotedBar]:
    """Profiles a model, and gives the bar that was shown."""
    bars: list[NotedBar] = []

    @contextmanager
    def noted(_: Any, total: int) -> Iterator[NotedBar]:
        bars.append(NotedBar())
        bars[-1].expect(total)
        yield bars[-1]

    monkeypatch.setattr(module, "progress_bar", noted)

    def profiled(model: nn.Module, **options: Any) -> NotedBar:
        given: dict[str, Any] = {"repeats": 1, "granularity": "fine", "cache": tmp_path}
        module.profile(model, torch.randn(2, 8), ["cpu:0", "cpu:1"], **given | options)
        return bars[-1]

    return profiled


def _chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(8, 8) if width == 8 else nn.Sequential(nn.Linear(8, width)) for width in widths)
    )


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


def test_as_many_steps_are_told_as_are_made(bar: Callable[..., NotedBar]) -> None:
    shown = bar(_chain(8, 8, 8))
    # the capture, the first layer, one for both others, and the link
    assert shown.total == len(shown.steps) == 4
    assert shown.steps[0] == "capture"
    # layers are known once the model is captured
    assert shown.known == [2, 4, 4, 4]


def test_what_is_in_the_cache_is_no_step(bar: Callable[..., NotedBar]) -> None:
    bar(_chain(8, 8))
    shown = bar(_chain(8, 8, 4))
    assert shown.steps == ["capture", "2.0"] and shown.total == 2
    again = bar(_chain(8, 8, 4))
    assert again.steps == [] and again.total == 0


def test_a_layer_that_several_batch_sizes_share_is_one_step(bar: Callable[..., NotedBar]) -> None:
    shown = bar(Mixed(), batch_sizes=(2, 4))
    assert shown.total == len(shown.steps)
    assert [shown.steps.count(name) for name in ("first", "weights", "product")] == [2, 1, 2]
    assert shown.steps[:2] == ["capture 1 of 2", "capture 2 of 2"]


def test_after_an_interruption_the_rest_is_left(
    bar: Callable[..., NotedBar], monkeypatch: pytest.MonkeyPatch
) -> None:
    from placer.profiler import measure

    real = measure.measure_time

    def stop(trial: Any, *rest: Any, **named: Any) -> Any:
        if trial.state[0].shape[0] == 4:
            raise KeyboardInterrupt
        return real(trial, *rest, **named)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(measure, "measure_time", stop)
        bar(_chain(8, 8, 4))
    shown = bar(_chain(8, 8, 4))
    # the capture, the layer that was interrupted, and the link
    assert shown.total == len(shown.steps) == 3
    assert shown.steps[1] == "2.0"
