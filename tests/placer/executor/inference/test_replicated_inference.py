"""Calls and streams without gradients use all replicas, and return the unsplit model's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from replicated import by_stage, replicated
from torch import Tensor, nn

from placer import DataFlow, StageError
from placer.executor.segments import MicroBatch, Segment
from placer.executor.state.replication import Replication
from placer.testing import logical_devices

CLOSE: Any = {"atol": 1e-10, "rtol": 1e-10, "check_device": False}


class Dropping(nn.Module):
    """Dropout also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class Counting(nn.Module):
    """A count of its calls, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


def small(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers, *more).double().eval()


def batch(samples: int = 12) -> Tensor:
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def four() -> Iterator[list[torch.device]]:
    with logical_devices(4) as places:
        yield places


def placed(model: nn.Module, places: list[torch.device], **options: Any) -> DataFlow:
    flow = DataFlow(model, places, places[0])
    flow.update_flow(replicated(model, 2, 2, **options))
    return flow


@contextmanager
def counted() -> Iterator[Counter[tuple[str, int]]]:
    """Yield how often each device ran a segment, by the samples in its micro-batch."""
    found: Counter[tuple[str, int]] = Counter()
    run = Segment.run

    def noted(self: Segment, values: MicroBatch) -> None:
        layer = self.steps[0].layer
        samples = len(values.made(layer.reads[0]))
        found[str(self.device), samples] += 1
        run(self, values)

    with mock.patch.object(Segment, "run", noted):
        yield found


@torch.no_grad()
def test_pipelines_share_each_micro_batch_of_a_call(four: list[torch.device]) -> None:
    model, inputs = small(), batch()
    expected = model(inputs)
    flow = placed(model, four, samples=(4, 2), chunks=2)
    torch.testing.assert_close(flow(inputs), expected, **CLOSE)  # also compares the parts
    with counted() as found:
        torch.testing.assert_close(flow(inputs), expected, **CLOSE)
    assert {place for place, _ in found} == {"cpu:0", "cpu:1", "cpu:2", "cpu:3"}
    assert {samples for place, samples in found if place in ("cpu:0", "cpu:1")} == {4}
    assert {samples for place, samples in found if place in ("cpu:2", "cpu:3")} == {2}
    torch.testing.assert_close(flow(inputs), expected, **CLOSE)


@torch.no_grad()
def test_a_call_that_is_not_cut_runs_in_the_first_pipeline(four: list[torch.device]) -> None:
    model, inputs = small(), batch()
    expected = model(inputs)
    flow = placed(model, four, samples=(3, 3))
    flow(inputs, chunks=1)  # also compares the captured model
    with counted() as found:
        torch.testing.assert_close(flow(inputs, chunks=1), expected, **CLOSE)
    assert found == {("cpu:0", 12): 1, ("cpu:1", 12): 1}


def test_a_call_with_gradients_runs_in_the_first_pipeline(four: list[torch.device]) -> None:
    unsplit, model, inputs = small(), small(), batch()
    unsplit(inputs).sum().backward()
    flow = placed(model, four, samples=(3, 3), chunks=2)
    with counted() as found:
        flow(inputs).sum().backward()
    assert {place for place, _ in found} == {"cpu:0", "cpu:1"}
    for parameter, expected in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, **CLOSE)


def test_replicated_pipelines_take_turns_with_the_batches_of_a_stream(
    four: list[torch.device],
) -> None:
    model, inputs = small(), batch()
    with torch.no_grad():
        expected = [model(one) for one in inputs.split(1)]
    flow = placed(model, four, samples=(4, 2))
    list(flow.stream(inputs.split(1)))  # also compares the captured model
    with counted() as found:
        for result, wanted in zip(flow.stream(inputs.split(1)), expected, strict=True):
            torch.testing.assert_close(result, wanted, **CLOSE)
    assert found["cpu:0", 1] == found["cpu:1", 1] == 2 * found["cpu:2", 1] == 2 * found["cpu:3", 1]


@torch.no_grad()
@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (3, 1), (1, 2, 1), (2, 3)])
def test_calls_and_streams_use_the_replicas_of_every_stage(counts: tuple[int, ...]) -> None:
    model, inputs = small(nn.Linear(3, 3), nn.Linear(3, 2)), batch()
    expected = model(inputs)
    with logical_devices(sum(counts)) as places:
        flow = DataFlow(model, places, places[0])
        flow.update_flow(by_stage(model, counts, chunks=2))
        for _ in range(3):
            torch.testing.assert_close(flow(inputs), expected, **CLOSE)
        parts = [*inputs.split(2), *inputs.split(2)]
        for _ in range(2):
            found = torch.cat(list(flow.stream(parts)))
            torch.testing.assert_close(found, torch.cat([expected, expected]), **CLOSE)
        with counted() as passes:
            flow(inputs)
            list(flow.stream(parts))
    stage = iter(range(sum(counts)))
    for count in counts:
        for place in [f"cpu:{next(stage)}" for _ in range(count)]:
            # a call of 2 micro-batches, and a stream of 12 batches of 2 samples
            samples = sum(size * often for (there, size), often in passes.items() if there == place)
            assert samples == (12 + 24) // count


class Several(nn.Module):
    """Inputs in a list and by name; results in a dict, from both ends of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.double().eval()

    def forward(self, pair: list[Tensor], *, scale: Tensor | None = None) -> Any:
        x = self.first(pair[0]) + self.first(pair[1]).tanh()
        y = self.second(x if scale is None else x * scale).relu()
        z = self.third(y)
        return {"logits": self.last(z), "inner": (x, [z])}


@torch.no_grad()
@pytest.mark.parametrize("counts", [(2, 1), (1, 2, 1)])
def test_calls_and_streams_take_lists_and_uneven_batches_and_return_several_tensors(
    counts: tuple[int, ...],
) -> None:
    model = Several()
    whole = Several()

    def given(samples: int) -> dict[str, Any]:
        pair = [batch(samples), batch(samples) + 1]
        return {"pair": pair, "scale": pair[0].sum(1, keepdim=True)}

    def check(found: Any, expected: Any) -> None:
        for one, other in zip(
            *map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True
        ):
            torch.testing.assert_close(one, other, **CLOSE)

    with logical_devices(sum(counts)) as places:
        flow = DataFlow(model, places, places[0])
        flow.update_flow(by_stage(model, counts, chunks=2))
        for samples in (12, 7, 7, 1, 12):
            inputs = given(samples)
            check(flow(**inputs), whole(**inputs))
            check(flow(inputs["pair"]), whole(inputs["pair"]))
        batches = [given(samples) for samples in (4, 4, 4, 4, 4, 1)]
        for _ in range(2):
            for found, inputs in zip(flow.stream(batches), batches, strict=True):
                check(found, whole(**inputs))
        with counted() as passes:
            flow(**given(7))
        assert {place for place, _ in passes} == set(map(str, places))


def test_a_stream_after_a_training_step_has_the_new_weights(four: list[torch.device]) -> None:
    model, inputs, target = small(), batch(), torch.arange(12) % 3
    flow = placed(model, four, samples=(3, 3), chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = flow.train_step(nn.functional.cross_entropy, optimizer)
    before = list(flow.stream(inputs.split(6)))
    model.train()
    step(inputs, target)
    model.eval()
    found = list(flow.stream(inputs.split(6)))
    unsplit = small()
    unsplit.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found), unsplit(inputs), **CLOSE)
    assert not torch.allclose(torch.cat(before), torch.cat(found))


@pytest.mark.parametrize("layer", [Dropping, Counting])
def test_layers_that_draw_or_change_state_run_in_the_first_pipeline(
    four: list[torch.device], layer: type[nn.Module]
) -> None:
    model, inputs = small(layer()), batch()
    flow = placed(model, four, samples=(3, 3), chunks=2)
    list(flow.stream([inputs]))  # also compares the captured model
    with counted() as found:
        for _ in flow.stream(inputs.split(3)):
            pass
    assert {place for place, _ in found} == {"cpu:0", "cpu:1"}


def test_an_error_names_the_device_of_its_pipeline(four: list[torch.device]) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()
    flow = placed(model, four)
    right = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        StageError, match=r"batch 1 failed in .* segment 0 of 2 on cpu:2, layer '0'"
    ):
        list(flow.stream([right, right + 5]))


@pytest.mark.parametrize(
    ("samples", "turns"),
    [((1, 1), (0, 1)), ((3, 1), (0, 0, 0, 1)), ((6, 4, 2), (0, 1, 0, 0, 1, 2)), ((5,), (0,))],
)
def test_batches_take_turns_in_proportion_to_samples(
    samples: tuple[int, ...], turns: tuple[int, ...]
) -> None:
    assert Replication(samples=samples).turns == turns
