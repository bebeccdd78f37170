"""How many batches of a stream are on their way, where each is, and what may change meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from splitting import scatter_layers
from streams import ROW, assert_close, placed, skips, unsplit
from torch import Tensor

from placer.executor.inference.stream_pipeline import InferencePipeline
from placer.testing import logical_devices


def test_a_batch_enters_the_first_segment_while_earlier_ones_are_in_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issued: list[tuple[int, int]] = []
    advance = InferencePipeline.advance

    def noted(self: InferencePipeline, passage: Any) -> None:
        issued.append((passage.number, passage.stage))
        advance(self, passage)

    monkeypatch.setattr(InferencePipeline, "advance", noted)
    model, batches = skips()
    with logical_devices(3):
        flow = placed(model)
        # the shape is known from here on
        assert len(list(flow.stream(batches[:2]))) == 2
        stages = max(stage for _, stage in issued) + 1
        issued.clear()
        list(flow.stream(batches))
    order = {entry: index for index, entry in enumerate(issued)}
    assert len(order) == len(batches) * stages
    for number in range(len(batches) - 1):
        assert order[number + 1, 0] < order[number, stages - 1]
        for stage in range(stages - 1):  # a device turns to the older batch first
            assert order[number, stage + 1] < order[number + 1, stage + 1]


def test_values_go_straight_from_their_maker_to_their_readers() -> None:
    model, batches = skips()
    with logical_devices(3) as places:
        flow = placed(model)
        courier = flow.calls.streams.courier
        courier.trace = []
        list(flow.stream(batches[:3]))
    way = {place: index for index, place in enumerate(places)}
    hops = {
        (way[item.source], way[item.target]) for item in courier.trace if item.label[0] is not None
    }
    # Skips reads everything that was made before, everywhere
    assert {(0, 1), (0, 2), (1, 2)} <= hops
    assert all(
        item.label[1] is None or item.target.index == item.label[1] for item in courier.trace
    )


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_no_more_batches_are_taken_than_may_be_in_flight(in_flight: int) -> None:
    model, batches = skips()
    taken = handed_out = 0

    def source() -> Iterator[Tensor]:
        nonlocal taken
        for batch in batches:
            taken += 1
            assert taken - handed_out <= in_flight
            yield batch

    expected = unsplit(model, batches)
    with logical_devices(3):
        results = []
        for result in placed(model).stream(source(), in_flight):
            handed_out += 1
            results.append(result)
    assert_close(results, expected)


def test_as_many_batches_are_taken_as_fill_the_pipeline_and_two_ahead() -> None:
    model, batches = skips()
    source = iter(batches)
    with logical_devices(3):
        flow = placed(model, 3)
        stream = flow.stream(source)
        next(stream)
        (_, pipeline) = next(iter(flow.calls.streams._pipelines.values()))
        assert len(batches) - len(list(source)) == len(pipeline.stages) + 2


def test_with_one_in_flight_a_batch_may_depend_on_the_result_before() -> None:
    model, _ = skips()
    made = [torch.zeros(4, ROW, dtype=torch.float64)]

    def source() -> Iterator[Tensor]:
        for _ in range(4):
            yield made[-1]

    with logical_devices(3):
        for result in placed(model).stream(source(), in_flight=1):
            made.append(result.cpu())
    x = made[0]
    for result in made[1:]:
        (x,) = unsplit(model, [x])
        assert_close(result, x)


def test_a_stream_that_is_closed_early_leaves_the_flow_as_it_was() -> None:
    model, batches = skips()
    expected = unsplit(model, batches)
    with logical_devices(3):
        flow = placed(model)
        stream = flow.stream(batches)
        assert_close([next(stream), next(stream)], expected[:2])
        stream.close()
        assert flow.calls.streams._moving == []
        assert_close(list(flow.stream(batches)), expected)
        assert_close(flow(batches[0]).detach(), expected[0])


def test_two_streams_of_one_flow_may_take_turns() -> None:
    model, batches = skips()
    expected = unsplit(model, batches)
    with logical_devices(3):
        flow = placed(model)
        pairs = list(zip(flow.stream(batches), flow.stream(batches[::-1]), strict=True))
    assert_close([one for one, _ in pairs], expected)
    assert_close([other for _, other in pairs], expected[::-1])


def test_a_stream_that_is_left_open_does_not_disturb_another() -> None:
    model, batches = skips()
    expected = unsplit(model, batches)
    with logical_devices(3):
        flow = placed(model)
        first = flow.stream(batches)
        results = [next(first)]
        assert_close(list(flow.stream(batches[::-1])), expected[::-1])
        results += first
    assert_close(results, expected)


def test_a_source_may_write_its_next_batch_over_the_last() -> None:
    model, batches = skips()

    def source() -> Iterator[Tensor]:
        buffer = torch.empty_like(batches[0])
        for batch in batches:
            yield buffer.copy_(batch)

    with logical_devices(3):
        results = list(placed(model).stream(source()))
    assert_close(results, unsplit(model, batches))


def test_another_map_between_two_batches_moves_those_that_come_after() -> None:
    model, batches = skips()
    expected = unsplit(model, batches)
    with logical_devices(3):
        flow = placed(model)
        stream = flow.stream(batches)
        results = [next(stream)]
        scatter_layers(flow, 3, seed=5)
        results += stream
    assert_close(results, expected)
