"""On real GPUs: generations in several threads replay CUDA graphs on streams of their own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from generating_models import pair, split
from torch import Tensor

from placer import DataFlow

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

PASSES = 12
OPTIONS = {
    "max_new_tokens": PASSES + 1,
    "min_new_tokens": PASSES + 1,
    "do_sample": False,
    "pad_token_id": 0,
}
COUNT = min(2, torch.cuda.device_count())
LATE_S = 60.0


def _placed(name: str = "llama") -> tuple[Any, Any, DataFlow]:
    """Return a model that is split over GPUs, an equal one on the first, and the flow."""
    model, reference = pair(name, torch.float64)
    model, reference = model.cuda(0), reference.cuda(0)
    return model, reference, split(model, COUNT)


def _ids(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (1, 7), generator=generator).cuda(0)


class _Streamer:
    """Waits after some tokens until another user has one."""

    def __init__(self, sets: threading.Event, waits_for: threading.Event) -> None:
        self.count, self._sets, self._waits_for = -1, sets, waits_for

    def put(self, value: Tensor) -> None:
        self.count += 1
        if self.count == 1:
            self._sets.set()
        if self.count == 3:
            assert self._waits_for.wait(LATE_S)

    def end(self) -> None:
        pass


def test_two_streaming_users_interleave_and_have_the_texts_of_one_gpu() -> None:
    model, reference, flow = _placed()
    events = threading.Event(), threading.Event()
    both = threading.Barrier(2)

    def generate(user: int) -> list[list[list[int]]]:
        streamer = _Streamer(events[user], events[1 - user])
        texts = []
        for number in range(4):
            with flow.applied():
                both.wait(LATE_S)
                given: dict[str, Any] = {"streamer": streamer} if number == 0 else {}
                texts.append(model.generate(_ids(2 * number + user), **OPTIONS, **given).tolist())
        return texts

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generate, (0, 1)))
    for user in (0, 1):
        assert found[user] == [
            reference.generate(_ids(2 * number + user), **OPTIONS).tolist() for number in range(4)
        ]
    assert flow.generation_report.recorded > 4 * PASSES
    assert {*flow.generation_report.stages} == {f"cuda:{place}" for place in range(COUNT)}


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate_many_gives_the_texts_of_one_gpu(name: str) -> None:
    _, reference, flow = _placed(name)
    prompts = [_ids(seed) for seed in range(8)]
    for _ in range(2):  # the second time, all passes are recorded
        found = [ids.tolist() for ids in flow.generate_many(prompts, in_flight=3, **OPTIONS)]
        assert found == [reference.generate(ids, **OPTIONS).tolist() for ids in prompts]
    report = flow.generation_report
    assert report.recorded + report.hooked == 16 * PASSES
    assert report.recorded > 8 * PASSES and report.not_recorded_because == ""


def test_some_texts_are_sampled_while_others_are_recorded() -> None:
    """Random numbers that are drawn on a GPU during a recording are an error of torch."""
    _, _, flow = _placed()
    prompts = [
        {"input_ids": _ids(seed).repeat(1 + seed, 1), "do_sample": True} for seed in range(6)
    ]
    found = [*flow.generate_many(prompts, in_flight=3, **{**OPTIONS, "do_sample": True})]
    assert [ids.shape for ids in found] == [(1 + seed, 8 + PASSES) for seed in range(6)]
    assert flow.generation_report.recorded > 0


def test_results_may_be_used_and_dropped_while_other_texts_are_generated() -> None:
    _, reference, flow = _placed()
    prompts = [_ids(seed) for seed in range(8)]
    sums = []
    with torch.cuda.stream(torch.cuda.Stream(0)):  # type: ignore[no-untyped-call]
        for ids in flow.generate_many(prompts, in_flight=2, **OPTIONS):
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
            sums.append(ids.sum())
            del ids
        found = [int(one) for one in sums]
    assert found == [int(reference.generate(ids, **OPTIONS).sum()) for ids in prompts]
