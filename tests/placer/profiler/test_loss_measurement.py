"""The loss is counted with the layer that makes the result: what it adds follows from its
operations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import profile
from placer.errors import InputError, ProfileError, ProfilingError
from placer.profiler.loss_measurement import Loss, as_run
from placer.profiler.measurement import Measurement
from placer.profiler.memory import LayerMemory
from placer.profiler.merge import merge_profiles
from placer.profiler.timing import LayerTime
from placer.schema import Profile

BATCH, WIDTH, CLASSES = 8, 16, 32
RESULT = 4 * BATCH * CLASSES
TARGET = 8 * BATCH
CPU = [torch.device("cpu")]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def _batch(size: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))


def _profiled(model: nn.Module, loss_fn: Any = None, target: Any = None, **given: Any) -> Profile:
    options: Any = {
        "progress": False,
        "repeats": 1,
        "granularity": "submodule",
        "cache": False,
    } | given
    found: Profile = profile(model, _batch()[0], CPU, loss_fn=loss_fn, target=target, **options)
    return found


def test_what_the_loss_keeps_is_added_to_the_last_layer_alone() -> None:
    model, target = _model(), _batch()[1]
    alone, both = _profiled(model), _profiled(model, functional.cross_entropy, target)
    assert both.with_loss and not alone.with_loss
    fields = (
        "saved_bytes",
        "forward_workspace_bytes",
        "backward_workspace_bytes",
        "deferred_bytes",
        "param_bytes",
    )
    for before, after in zip(alone.layers[:-1], both.layers[:-1], strict=True):
        assert [getattr(before, field) for field in fields] == [
            getattr(after, field) for field in fields
        ]
    last, with_loss = alone.layers[-1], both.layers[-1]
    counted = 4  # nll_loss keeps the sum of its weights, one number
    # the log-softmax
    assert with_loss.saved_bytes == last.saved_bytes + RESULT + counted + TARGET
    assert with_loss.deferred_bytes == last.deferred_bytes == RESULT
    # Backwards it holds the gradients of the log-softmax and of the result, and for a moment those
    # of the loss.
    assert with_loss.backward_workspace_bytes >= max(last.backward_workspace_bytes, 2 * RESULT)


def test_logits_that_the_loss_makes_floats_of_are_kept_as_such() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, CLASSES, dtype=torch.bfloat16),
            )

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.body(x).bfloat16())
            return made

    model, target = Half(), _batch()[1]
    alone = _profiled(model)
    both = _profiled(model, lambda y, goal: functional.cross_entropy(y.float(), goal), target)
    assert both.layers[-1].saved_bytes == alone.layers[-1].saved_bytes + RESULT + 4 + TARGET
    # the floats, until their log-softmax is there
    assert both.layers[-1].forward_workspace_bytes >= RESULT


def test_times_add_up_on_every_type_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any) -> Measurement:
        return Measurement(LayerTime(1e3, 2e3, 3e3), LayerMemory())

    monkeypatch.setattr(Loss, "measure", measured)
    model, target = _model(), _batch()[1]
    last = _profiled(model, functional.cross_entropy, target).layers[-1]
    (kind,) = last.forward_ms
    assert 1e3 <= last.forward_ms[kind] < 2e3 <= last.backward_ms[kind] < 3e3 <= last.host_ms[kind]
    assert last.weight_grad_ms[kind] < 1e3  # a loss has none


def test_layers_that_are_alike_stay_so_but_for_the_last_one(tmp_path: Path) -> None:
    """Neither what is shared in a run nor what is taken from the cache may have the loss of another
    one."""
    blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    target = torch.randint(WIDTH, (BATCH,))
    given = {"cache": tmp_path}
    before = _profiled(blocks, **given)
    both = _profiled(blocks, functional.cross_entropy, target, **given)
    after = _profiled(blocks, **given)
    assert before.layers == after.layers
    assert both.layers[:-1] == before.layers[:-1]
    assert both.layers[-1].saved_bytes > before.layers[-1].saved_bytes


@dataclass
class Answer:
    scores: Tensor
    hidden: Tensor


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Answer:
        hidden = self.body(x)
        return Answer(self.head(hidden), hidden)


def test_a_loss_is_given_what_the_model_returns_and_the_target_as_it_was(tmp_path: Path) -> None:
    def loss_fn(output: Answer, target: dict[str, Tensor]) -> Tensor:
        assert isinstance(output, Answer)
        return (
            functional.cross_entropy(output.scores, target["label"]) + output.hidden.square().mean()
        )

    target = {"label": _batch()[1]}
    first, again = (_profiled(_Nested(), loss_fn, target, cache=tmp_path) for _ in range(2))
    assert first.layers[-1].name == "head"
    assert first.layers[-1].saved_bytes == again.layers[-1].saved_bytes > RESULT


def test_a_model_that_runs_through_hooks_has_a_loss_too() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.body(x) if x.sum() > -1e9 else x)
            return made

    model, target = Branching(), _batch()[1]
    alone, both = _profiled(model), _profiled(model, functional.cross_entropy, target)
    assert not both.captured
    assert both.layers[-1].saved_bytes == alone.layers[-1].saved_bytes + RESULT + 4 + TARGET


def test_every_batch_size_has_its_own_loss() -> None:
    inputs, target = _batch()
    options: Any = {
        "progress": False,
        "repeats": 1,
        "granularity": "submodule",
        "cache": False,
        "batch_sizes": [4, 8],
    }
    alone = profile(_model(), inputs, CPU, **options)
    both = profile(
        _model(), inputs, CPU, loss_fn=functional.cross_entropy, target=target, **options
    )
    added = [
        b.layers[-1].saved_bytes - a.layers[-1].saved_bytes
        for a, b in zip(alone, both, strict=True)
    ]
    assert added == [4 * 4 * CLASSES + 4 + 8 * 4, RESULT + 4 + TARGET]


def test_a_loss_that_wants_probabilities_gets_some() -> None:
    _profiled(_model(), functional.binary_cross_entropy, torch.rand(BATCH, CLASSES))


class _Weighted(nn.Module):
    """A loss with a weight that could be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * output.mean()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss_fn": functional.cross_entropy}, "loss_fn is given without target"),
        ({"target": torch.zeros(BATCH)}, "target is given without loss_fn"),
        ({"loss_fn": 3, "target": torch.zeros(BATCH)}, "loss_fn is 3; give a function"),
        (
            {"loss_fn": functional.mse_loss, "target": torch.zeros(BATCH + 1, CLASSES)},
            "a batch of 8",
        ),
        (
            {"loss_fn": functional.mse_loss, "target": torch.zeros(BATCH), "training": False},
            "belong to training",
        ),
        (
            {"loss_fn": lambda y, _: y, "target": torch.zeros(BATCH)},
            r"shape \(8, 32\); return one number",
        ),
        (
            {"loss_fn": lambda _, goal: goal.sum(), "target": torch.zeros(BATCH)},
            "a loss without a gradient",
        ),
        (
            {"loss_fn": lambda y, _: y.mean() * 1j, "target": torch.zeros(BATCH)},
            "torch.complex64, which cannot be",
        ),
        (
            {"loss_fn": nn.MSELoss, "target": torch.zeros(BATCH)},
            r"is the class MSELoss; give an instance, such as M",
        ),
        (
            {"loss_fn": _Weighted(), "target": torch.zeros(BATCH)},
            "a parameter of its own, 'weight'",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        _profiled(_model(), **given)


class _Counts(nn.CrossEntropyLoss):
    """Class weights, and a buffer that each call changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(torch.rand(CLASSES))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(output, target)


def test_a_loss_is_left_as_it_was() -> None:
    loss = _Counts()
    _profiled(_model(), loss, _batch()[1])
    assert loss.calls == 0


@pytest.mark.gpu
def test_class_weights_are_where_the_loss_is_measured() -> None:
    loss = _Counts()
    found = profile(
        _model(), _batch()[0], ["cuda:0"], progress=False, loss_fn=loss, target=_batch()[1]
    )
    assert found.with_loss and loss.weight is not None and loss.weight.device.type == "cpu"


def test_a_target_that_the_loss_cannot_take_is_told_with_its_shape_and_that_of_the_results() -> (
    None
):
    told = (
        r"failed on cpu:0, for results of shape \(.*\) and a target of shape \(\d+, 2, 3\): "
        r"RuntimeError: 0D or 1D"
    )
    with pytest.raises(InputError, match=told):
        _profiled(_model(), functional.cross_entropy, torch.zeros(BATCH, 2, 3, dtype=torch.long))


def test_a_loss_that_memory_is_too_small_for_is_no_fault_of_the_target() -> None:
    def large(output: Tensor, _: Tensor) -> Tensor:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    with pytest.raises(
        ProfilingError, match=r"loss_fn failed on cpu:0: RuntimeError: .*allocate memory"
    ):
        _profiled(_model(), large, _batch()[1])


def test_profiles_with_and_without_the_loss_are_not_merged() -> None:
    model, target = _model(), _batch()[1]
    alone, both = _profiled(model), _profiled(model, functional.cross_entropy, target)
    with pytest.raises(ProfileError, match="with_loss"):
        merge_profiles(alone, both)


@pytest.mark.parametrize(("recorded", "kept", "workspace"), [(False, 100, 50), (True, 150, 0)])
def test_a_recorded_loss_has_what_it_works_in_for_good(
    recorded: bool, kept: int, workspace: int
) -> None:
    memory = LayerMemory(
        saved_bytes=100, saved_reads=frozenset({1}), forward_workspace_bytes=50 + 4 * 8
    )
    # the first is only read, and so was counted as workspace
    results = [torch.zeros(8), torch.zeros(3)]
    found = as_run(Measurement(LayerTime(1.0, 1.0, 1.0), memory), results, recorded).memory
    assert (found.saved_bytes, found.forward_workspace_bytes) == (kept, workspace)
