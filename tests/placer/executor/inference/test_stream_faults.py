"""What goes wrong in a stream is named when its batch has its turn, and the flow streams again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forgetful import Forgetful
from small_models import Skips
from splitting import twins
from streams import ROW, assert_close, placed, skips, unsplit
from torch import Tensor, nn

from placer import DataFlow
from placer.devices import Courier
from placer.errors import InputError, MixedDevicesError, StageError
from placer.testing import logical_devices
from placer.zoo import unet


def test_an_error_of_the_source_comes_when_its_turn_has_come() -> None:
    model, batches = skips()

    def source() -> Iterator[Tensor]:
        yield from batches[:3]
        raise KeyError("the disk is gone")

    results = []
    with logical_devices(3):
        flow = placed(model)
        with pytest.raises(KeyError, match="the disk is gone") as caught:
            for result in flow.stream(source()):
                results.append(result)
        assert_close(results, unsplit(model, batches[:3]))
        assert caught.value.__notes__ == ["raised by the source of the stream, for batch 3"]
        assert_close(list(flow.stream(batches)), unsplit(model, batches))


class _Words(nn.Module):
    """A layer on the second device looks the words up: a word that is not there fails in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Identity(), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(self.first(x) + 1))


def test_an_error_in_a_layer_names_device_layer_and_batch_and_results_before_it_are_whole() -> None:
    torch.manual_seed(0)
    model = _Words().eval()
    batches = [torch.randint(0, 5, (2, 3)) for _ in range(6)]
    expected = unsplit(model, batches)
    results = []
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, table=1, last=0)
        flow.update_flow()
        with pytest.raises(
            StageError,
            match=r"batch 4 failed in the forward pass of segment 0 of 2 on cpu:1, layer 'table': "
            r"IndexError",
        ) as e:
            for result in flow.stream([*batches[:4], torch.full((2, 3), 9), *batches[4:]]):
                results.append(result)
        assert (e.value.device, e.value.layer, e.value.batch) == ("cpu:1", "table", 4)
        assert isinstance(e.value.__cause__, IndexError)
        assert_close(results, expected[:4])
        assert_close(list(flow.stream(batches)), expected)


def test_a_first_batch_that_fails_in_the_middle_leaves_its_shape_to_the_next() -> None:
    torch.manual_seed(0)
    model = _Words().eval()
    batches = [torch.randint(0, 5, (2, 3)) for _ in range(6)]
    expected = unsplit(model, batches)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, table=1, last=0)
        flow.update_flow()
        with pytest.raises(StageError, match="batch 0"):
            next(flow.stream([torch.full((2, 3), 9)]))
        assert_close(list(flow.stream(batches)), expected)
        (pipeline,) = flow.calls.streams.pipelines()
        assert all(len(stage.slots) == stage.count for stage in pipeline.stages)


def test_a_batch_that_the_model_refuses_is_named() -> None:
    model, batches = skips()
    results = []
    with logical_devices(3):
        flow = placed(model)
        with pytest.raises(RuntimeError) as caught:
            for result in flow.stream(
                [*batches[:2], torch.randn(4, ROW + 1, dtype=torch.float64), batches[2]]
            ):
                results.append(result)
        assert "in batch 2 of the stream" in caught.value.__notes__
        assert_close(results, unsplit(model, batches[:2]))
        assert_close(list(flow.stream(batches)), unsplit(model, batches))


def test_after_an_interruption_the_flow_streams_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = skips()
    with logical_devices(3):
        flow = placed(model)
        stream = flow.stream(batches)
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(
                Courier, "send", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                list(stream)
        assert_close(list(flow.stream(batches)), unsplit(model, batches))


@pytest.mark.parametrize(
    "batches", [torch.zeros(3, ROW), {"x": torch.zeros(3, ROW)}, 5, None, "batches"]
)
def test_what_is_no_iterable_of_batches_is_refused(batches: Any) -> None:
    with pytest.raises(InputError, match="give an iterable of batches"):
        DataFlow(nn.Linear(ROW, 1)).stream(batches)


@pytest.mark.parametrize("in_flight", [0, -1, True, 1.5, "2"])
def test_a_number_of_batches_in_flight_that_is_none_is_refused(in_flight: Any) -> None:
    with pytest.raises(InputError, match="in_flight"):
        DataFlow(nn.Linear(ROW, 1)).stream([], in_flight)


def _caught(flow: DataFlow, batches: list[Tensor], expected: list[Tensor]) -> bool:
    try:
        results = list(flow.stream(batches))
    except (StageError, MixedDevicesError):
        return True
    return not all(
        torch.allclose(one.cpu(), other) for one, other in zip(results, expected, strict=True)
    )


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("make", [Skips, lambda: unet(width=2)], ids=["skips", "unet"])
def test_every_transfer_that_is_forgotten_shows_in_a_result(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = twins(make, training=False)
    shape = (4, ROW) if make is Skips else (1, 3, 16, 16)
    batches = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    with torch.no_grad():
        expected = [whole(batch) for batch in batches]
    forgetful = Forgetful(monkeypatch)
    with logical_devices(3):
        flow = placed(model)
        assert not _caught(flow, batches, expected)
        transfers = forgetful.sent
        assert transfers >= 3 * len(batches)
        missed = []
        for forgotten in range(transfers):
            flow.calls.streams.clear()
            forgetful.sent, forgetful.forgotten = 0, forgotten
            if not _caught(flow, batches, expected):
                missed.append(forgotten)
    assert missed == []
