"""Whatever the map, the shapes, the room and the callers' turns: a stream gives what the unsplit
model gives."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Skips
from splitting import twins
from torch import Tensor

from placer import DataFlow, devices
from placer.testing import logical_devices

LAYERS, FEATURES, DEVICES = 4, 3, 3
MODEL, WHOLE = twins(lambda: Skips(LAYERS, FEATURES), training=False)
CAPTURES = DataFlow(MODEL).placed.captures  # every flow below would make the same


def _flow(places: list[int]) -> DataFlow:
    flow = DataFlow(MODEL, fine_grained=True)
    flow.placed.captures = CAPTURES
    flow.layer_gpus.update(zip(flow.layer_gpus, places, strict=False))
    flow.update_flow()
    return flow


def _batches(sizes: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator) for rows in sizes]


def _check(results: list[Any], batches: list[Tensor]) -> None:
    assert len(results) == len(batches)
    for result, batch in zip(results, batches, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(result.cpu(), WHOLE(batch), atol=1e-12, rtol=1e-12)


PLACES = st.lists(st.integers(0, DEVICES - 1), min_size=LAYERS + 2, max_size=LAYERS + 2)
SIZES = st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=9)
ROOM = st.none() | st.integers(1, 6)


@settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(places=PLACES, sizes=SIZES, in_flight=ROOM)
def test_one_stream_gives_what_the_unsplit_model_gives(
    places: list[int], sizes: list[int], in_flight: int | None
) -> None:
    batches = _batches(sizes, 0)
    with logical_devices(DEVICES):
        flow = _flow(places)
        results = list(flow.stream(batches, in_flight))
        flow.undo()
    _check(results, batches)


@settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    places=PLACES,
    sizes=st.lists(SIZES, min_size=2, max_size=3),
    rooms=st.lists(ROOM, min_size=3, max_size=3),
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["next", "next", "next", "close", "call"])),
        max_size=25,
    ),
)
def test_streams_that_take_turns_and_end_early_give_what_the_unsplit_model_gives(
    places: list[int], sizes: list[list[int]], rooms: list[int | None], turns: list[tuple[int, str]]
) -> None:
    given_batches = [_batches(row, seed) for seed, row in enumerate(sizes)]
    with logical_devices(DEVICES):
        flow = _flow(places)
        streams = [
            flow.stream(batches, room) for batches, room in zip(given_batches, rooms, strict=False)
        ]
        results: list[list[Tensor]] = [[] for _ in streams]
        closed = set()
        for number, turn in turns:
            index = number % len(streams)
            if turn == "next":
                results[index] += [
                    result for result in [next(streams[index], None)] if result is not None
                ]
            elif turn == "close":
                streams[index].close()
                closed.add(index)
            else:  # the flow itself, between two batches of a stream
                batch = given_batches[index][0]
                with torch.no_grad():
                    _check([flow(batch)], [batch])
        for index, stream in enumerate(streams):
            results[index] += stream
        assert flow.calls.streams._moving == []
        flow.undo()
    with devices.unobserved():
        for index, batches in enumerate(given_batches):
            assert index in closed or len(results[index]) == len(batches)
            _check(results[index], batches[: len(results[index])])
