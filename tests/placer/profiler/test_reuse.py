"""Profiles from the cache: exactly what has changed is measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Branching
from torch import Tensor, nn

from placer import profiler, zoo
from placer.profiler import measure
from placer.profiler import profile as profile_module
from placer.profiler.cache.file_cache import Cache
from placer.profiler.profile import profile
from placer.schema import Profile
from placer.zoo.resnet import BasicBlock, ResNet

SIZES = (8, 16, 24, 32, 40)


def chain(*sizes: int) -> nn.Module:
    """Layers of which no two are alike; what flows into the first takes no gradient."""
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shapes of the first state tensor of every layer that is measured."""
    seen: list[str] = []
    real = measure.measure_trial

    def count(trial: Any, *rest: Any) -> Any:
        seen.append("x".join(map(str, trial.state[0].shape)) if trial.state else "none")
        return real(trial, *rest)

    monkeypatch.setattr(measure, "measure_trial", count)
    return seen


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., Profile]:
    def take(model: nn.Module, x: Tensor | None = None, **options: Any) -> Profile:
        x = torch.randn(2, next(model.parameters()).shape[-1]) if x is None else x
        given: dict[str, Any] = {"progress": False, "repeats": 1, "cache": tmp_path / "cache"}
        return profile(model, x, ["cpu:0"], **given | options)

    return take


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("layers/*/*.json"))


def test_a_second_profile_measures_nothing_and_says_the_same(take: Any, counted: list[str]) -> None:
    first = take(chain(*SIZES))
    assert len(counted) == 4
    assert take(chain(*SIZES)) == first
    assert len(counted) == 4


def test_a_second_profile_runs_no_layer(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take(chain(*SIZES))
    monkeypatch.setattr(
        measure, "bring_state", lambda *_: pytest.fail("a layer's state was brought to a device")
    )
    take(chain(*SIZES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1]), lambda: torch.randn(2, 3, 32, 32)),
    "unet": (lambda: zoo.unet(width=2), lambda: torch.randn(2, 3, 32, 32)),
    # with constants
    "llama": (lambda: zoo.llama(2, 16, 2, 1, 24, 32), lambda: torch.randint(32, (2, 8))),
    "tied": (lambda: Tied(), lambda: torch.randn(2, 8)),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.shift = torch.ones(8)  # neither a parameter nor a buffer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).relu() + self.shift)
        return result


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_profile_captures_nothing_and_says_the_same(
    take: Any, name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs = MODELS[name]
    first = take(make(), inputs(), training=training, granularity="fine")
    monkeypatch.setattr(
        profile_module, "capture_graph", lambda *_, **__: pytest.fail("it was captured again")
    )
    assert take(make(), inputs(), training=training, granularity="fine") == first


def test_layers_that_are_known_in_another_order_are_another_graph(
    take: Any, counted: list[str]
) -> None:
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Tanh()]
    take(nn.Sequential(*layers, *layers), granularity="fine")
    counted.clear()
    found = take(nn.Sequential(*layers, layers[0], layers[2], layers[1]), granularity="fine")
    assert [layer.module for layer in found.layers] == [
        "Linear",
        "ReLU",
        "Tanh",
        "Linear",
        "Tanh",
        "ReLU",
    ]
    assert [edge.bytes for edge in found.edges] == [64] * 5


def test_several_batch_sizes_are_known_together(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(chain(*SIZES), batch_sizes=(2, 4))
    monkeypatch.setattr(
        profile_module, "capture_graph", lambda *_, **__: pytest.fail("it was captured again")
    )
    assert take(chain(*SIZES), batch_sizes=(2, 4)) == first


def test_an_entry_with_the_names_of_an_earlier_version_is_measured_again(
    take: Any, counted: list[str], tmp_path: Path
) -> None:
    first = take(chain(*SIZES), training=True)
    cache = Cache(tmp_path / "cache")
    for path in entries(tmp_path):
        content = cache.read("layers", path.stem)
        time, memory = (content["measurement"][part] for part in ("time", "memory"))
        time["weights_ms"] = time.pop("weight_grad_ms")
        memory["pass_workspace_bytes"] = memory.pop("recorded_workspace_bytes")
        cache.write("layers", path.stem, content)
    counted.clear()
    again = take(chain(*SIZES), training=True)
    assert len(counted) == len(SIZES) - 1
    assert [layer.name for layer in again.layers] == [layer.name for layer in first.layers]


def test_a_graph_that_cannot_be_read_is_captured_again(take: Any, tmp_path: Path) -> None:
    first = take(chain(*SIZES))
    cache = Cache(tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("graphs/*/*.json")
    for content in ({}, [], cache.read("graphs", path.stem) | {"layers": [{"name": "x"}]}):
        cache.write("graphs", path.stem, content)
        assert take(chain(*SIZES)) == first


def test_a_graph_that_is_cut_by_a_function_is_captured_every_time(
    take: Any, tmp_path: Path
) -> None:
    take(chain(*SIZES), granularity=lambda path, module: True)
    assert not list((tmp_path / "cache").glob("graphs/*/*.json"))


def test_a_changed_layer_measures_only_itself(take: Any, counted: list[str]) -> None:
    take(chain(8, 16, 24, 32))
    counted.clear()
    model = chain(8, 16, 24, 32)
    model[1] = nn.Sequential(nn.Linear(16, 24), nn.Tanh())
    take(model, granularity="submodule")
    assert counted == ["24x16"]


def test_another_width_measures_the_two_layers_that_it_joins(take: Any, counted: list[str]) -> None:
    take(chain(8, 16, 24, 32))
    counted.clear()
    take(chain(8, 16, 20, 32))
    assert counted == ["20x16", "32x20"]


def test_an_interrupted_profile_resumes(
    take: Any, counted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = measure.measure_memory

    def interrupt(trial: Any, training: bool) -> Any:
        if len(counted) == 3:
            raise KeyboardInterrupt
        return real(trial, training)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "measure_memory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take(chain(*SIZES))
    assert len(entries(tmp_path)) == 2
    counted.clear()
    take(chain(*SIZES))
    assert counted == ["32x24", "40x32"]


def test_each_layer_is_one_entry_and_identical_ones_share_it(take: Any, tmp_path: Path) -> None:
    take(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))))
    assert len(entries(tmp_path)) == 2  # the first takes no gradient to its input


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    "broken", ["", "{", "[]", "null", '{"digest": "x", "content": {}}', "\x00"]
)
def test_an_entry_that_cannot_be_read_is_measured_and_written_again(
    take: Any, counted: list[str], tmp_path: Path, broken: str
) -> None:
    take(chain(*SIZES))
    spoilt = entries(tmp_path)[1]
    spoilt.write_text(broken)
    counted.clear()
    take(chain(*SIZES))
    assert len(counted) == 1
    assert json.loads(spoilt.read_text())["content"]["repeats"] == 1


def test_an_entry_whose_numbers_were_changed_does_not_count(
    take: Any, counted: list[str], tmp_path: Path
) -> None:
    take(chain(*SIZES))
    spoilt = entries(tmp_path)[0]
    entry = json.loads(spoilt.read_text())
    entry["content"]["measurement"]["time"]["forward_ms"] += 1
    spoilt.write_text(json.dumps(entry))
    counted.clear()
    take(chain(*SIZES))
    assert len(counted) == 1


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    "changed",
    [
        {"training": False},
        {"optimizer": "sgd"},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},
        {"repeats": 2},
        {"x": torch.randn(3, 8)},
    ],
    ids=["inference", "optimizer", "optimizer of unknown code", "more repeats", "batch size"],
)
def test_what_times_depend_on_is_measured_anew(
    take: Any, counted: list[str], changed: dict[str, Any]
) -> None:
    take(chain(*SIZES))
    counted.clear()
    take(chain(*SIZES), **changed)
    assert len(counted) == 4


def test_a_switch_of_torch_that_chooses_kernels_makes_other_entries(
    take: Any, counted: list[str]
) -> None:
    take(chain(*SIZES))
    torch.use_deterministic_algorithms(True)
    try:
        take(chain(*SIZES))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(counted) == 8


def test_other_device_types_have_entries_of_their_own(
    take: Any, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take(chain(*SIZES))
    monkeypatch.setattr(profiler.conditions.devices, "type_name", lambda device: "another")
    take(chain(*SIZES))
    assert len(counted) == 8


def test_the_learning_rate_of_an_optimizer_makes_no_difference(
    take: Any, counted: list[str]
) -> None:
    for rate in (0.1, 0.2):
        model = chain(*SIZES)
        take(model, optimizer=torch.optim.SGD(model.parameters(), lr=rate))
    assert len(counted) == 4


def test_fewer_repeats_than_before_are_enough(take: Any, counted: list[str]) -> None:
    take(chain(*SIZES), repeats=3)
    take(chain(*SIZES), repeats=2)
    assert len(counted) == 4


def test_channels_last_is_another_layer(take: Any, counted: list[str]) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    take(model, x)
    take(model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    assert len(counted) == 2


def test_layers_of_a_model_that_runs_through_hooks_are_measured_every_time(
    take: Any, counted: list[str]
) -> None:
    for _ in range(2):
        assert not take(Branching()).captured
    assert len(counted) == 4


def test_layers_with_custom_operators_are_measured_every_time(
    take: Any, counted: list[str]
) -> None:
    torch.library.define("placer_tests::doubled", "(Tensor x) -> Tensor")
    torch.library.impl("placer_tests::doubled", "CPU", lambda x: 2 * x)
    torch.library.register_fake("placer_tests::doubled", torch.empty_like)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.ops.placer_tests.doubled(x)
            return result

    for _ in range(2):
        assert take(
            nn.Sequential(nn.Linear(8, 8), Custom()), training=False, granularity="fine"
        ).captured
    assert counted == ["8x8", "none", "none"]


def test_without_a_cache_everything_is_measured_and_nothing_is_kept(
    take: Any, counted: list[str], tmp_path: Path
) -> None:
    for _ in range(2):
        take(chain(*SIZES), cache=False)
    assert len(counted) == 8
    assert entries(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_costs_only_time(
    take: Any, counted: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        take(chain(*SIZES), cache=tmp_path / "file" / "folder")
    assert len(counted) == 8
    assert sum("nothing is cached: cannot write to" in message for message in caplog.messages) == 2
