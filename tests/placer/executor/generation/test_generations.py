"""Several threads that generate at once: each has the texts that it has alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from generating_models import greedy, pair, split, token_ids
from torch import Tensor

from placer import DataFlow
from placer.executor.generation import generations

PASSES = 5
OPTIONS = greedy(PASSES + 1)
LATE_S = 60.0
pytestmark = pytest.mark.usefixtures("two_stand_ins")


class _Streamer:
    """Notes tokens, and waits at one of them.

    Args:
        sets: set with the first token after the prompt.
        waits_for: waited for after some tokens; None for nothing.
        after: how many.
    """

    def __init__(
        self, sets: threading.Event, waits_for: threading.Event | None = None, after: int = 0
    ) -> None:
        self.tokens: list[int] = []
        self._sets, self._waits_for, self._after = sets, waits_for, after
        self._count = -1

    def put(self, value: Tensor) -> None:
        self._count += 1
        self.tokens += value.flatten().tolist()
        if self._count == 1:
            self._sets.set()
        if self._count == self._after and self._waits_for is not None:
            assert self._waits_for.wait(LATE_S), "the other user has no token"

    def end(self) -> None:
        self.tokens.append(-1)


def _expected(reference: Any, seed: int, **options: Any) -> list[list[int]]:
    found: list[list[int]] = reference.generate(token_ids(seed), **{**OPTIONS, **options}).tolist()
    return found


@pytest.mark.parametrize("enters", [True, False], ids=["each applies", "one applies"])
def test_the_second_streaming_user_gets_a_token_before_the_first_one_has_all(enters: bool) -> None:
    model, reference = pair("llama")
    flow = split(model)
    first, second = threading.Event(), threading.Event()
    streamers = [_Streamer(first, second, after=2), _Streamer(second, first, after=2)]

    def generate(user: int) -> Any:
        given = {**OPTIONS, "streamer": streamers[user]}
        if not enters:
            return model.generate(token_ids(user, 1), **given)
        with flow.applied():
            return model.generate(token_ids(user, 1), **given)

    def both() -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            users = [pool.submit(generate, user) for user in (0, 1)]
            return [user.result(LATE_S) for user in users]

    if enters:
        both()
    else:
        with flow.applied():
            both()
    for user in (0, 1):
        expected = reference.generate(token_ids(user, 1), **OPTIONS)
        assert streamers[user].tokens == [*expected[0].tolist(), -1]


def test_texts_of_threads_are_those_of_the_unsplit_model_and_come_from_recordings() -> None:
    model, reference = pair("llama")
    flow = split(model)

    def generate(seed: int) -> Any:
        with flow.applied():
            return model.generate(token_ids(seed), **OPTIONS).tolist()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(generate, range(6)))
    assert found == [_expected(reference, seed) for seed in range(6)]
    report = flow.generation_report
    assert report.recorded + report.hooked == 6 * PASSES
    assert {"cpu:0", "cpu:1"} == {*report.stages}
    # up to three slots, of which each traces two tokens; more only while another user is busy
    assert report.recorded > PASSES
    assert "generate" not in vars(model) and "hf_device_map" not in vars(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ways", [{"num_beams": 3}, {"record": False}], ids=["beams", "hooks"])
def test_threads_with_other_ways_to_generate(ways: dict[str, Any]) -> None:
    model, reference = pair("t5")
    flow = split(model)
    ways = dict(ways)
    record = ways.pop("record", True)

    def generate(seed: int) -> Any:
        with flow.applied(record=record):
            return model.generate(token_ids(seed), **{**OPTIONS, **ways}).tolist()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generate, range(2)))
    assert found == [_expected(reference, seed, **ways) for seed in range(2)]
    assert bool(flow.generation_report.recorded) == record


@pytest.mark.exhaustive
def test_loops_of_the_users_own_interleave() -> None:
    model, reference = pair("llama")
    flow = split(model)
    both = threading.Barrier(2)

    def text(run: Any, seed: int) -> list[int]:
        tokens, given, cache = [], token_ids(seed, 1), None
        with torch.no_grad():
            for _ in range(PASSES):
                result = run(input_ids=given, past_key_values=cache, use_cache=True)
                given, cache = result.logits[:, -1:].argmax(-1).cpu(), result.past_key_values
                tokens += given.flatten().tolist()
        return tokens

    def generate(seed: int) -> list[int]:
        with flow.applied():
            both.wait(LATE_S)
            return text(model, seed)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generate, (1, 2)))
    assert found == [text(reference, seed) for seed in (1, 2)]
    assert flow.generation_report.recorded + flow.generation_report.hooked == 2 * PASSES - 2


def test_a_thread_goes_on_with_the_cache_of_another_one() -> None:
    model, reference = pair("llama")
    flow = split(model)
    options = {**OPTIONS, "return_dict_in_generate": True}

    def turn(ids: Tensor, cache: Any) -> Any:
        with flow.applied():
            return model.generate(ids, past_key_values=cache, **options)

    first = turn(token_ids(1), None)
    expected = reference.generate(token_ids(1), **options)
    more = torch.cat([expected.sequences, token_ids(2)], 1)
    wanted = reference.generate(more, past_key_values=expected.past_key_values, **options)
    with ThreadPoolExecutor(1) as pool, flow.applied():
        # meanwhile this thread's text overwrites the static memory that the cache had views of
        second = pool.submit(turn, more, first.past_key_values)
        model.generate(token_ids(3), **OPTIONS)
        assert second.result(LATE_S).sequences.tolist() == wanted.sequences.tolist()


@pytest.mark.exhaustive
def test_a_model_that_changes_is_recorded_again_in_every_slot() -> None:
    model, reference = pair("llama")
    flow = split(model)
    seeds = threading.Barrier(2)

    def generate(seed: int) -> Any:
        with flow.applied():
            seeds.wait(LATE_S)
            return model.generate(token_ids(seed), **OPTIONS).tolist()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(generate, (1, 2)))
        for one in (model, reference):
            layer = one.model.layers[0].mlp
            layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight * -2)
        found = list(pool.map(generate, (1, 2)))
    assert found == [_expected(reference, seed) for seed in (1, 2)]


def test_more_generations_than_slots_go_through_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "_MOST_SLOTS", 1)
    model, reference = pair("llama")
    flow = split(model)
    with ThreadPoolExecutor(1) as pool, flow.applied():
        found = pool.submit(lambda: model.generate(token_ids(1), **OPTIONS).tolist()).result(LATE_S)
    assert found == _expected(reference, 1)
    assert "generations run at once" in flow.generation_report.not_recorded_because


def test_a_thread_that_leaves_last_restores_the_model() -> None:
    model, _ = pair("llama")
    flow = split(model)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with flow.applied():
            inside.set()
            assert leave.wait(LATE_S)
            model.generate(token_ids(1), **OPTIONS)

    with ThreadPoolExecutor(1) as pool:
        with flow.applied():
            other = pool.submit(stay)
            assert inside.wait(LATE_S)
        assert "generate" in vars(model)
        leave.set()
        other.result(LATE_S)
    assert "generate" not in vars(model)
    assert not any(child._forward_hooks for child in model.modules())


def test_layers_move_once_all_threads_have_left() -> None:
    model, reference = pair("llama")
    flow = split(model)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> Any:
        with flow.applied():
            inside.set()
            assert leave.wait(LATE_S)
            return model.generate(token_ids(1), **OPTIONS).tolist()

    def move(flow: DataFlow) -> None:
        flow.layer_gpus.update({name: 1 - int(at) for name, at in flow.layer_gpus.items()})
        flow.update_flow()

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(stay)
        assert inside.wait(LATE_S)
        moving = pool.submit(move, flow)
        with pytest.raises(TimeoutError):
            moving.result(0.05)
        leave.set()
        assert other.result(LATE_S) == _expected(reference, 1)
        moving.result(LATE_S)
    with flow.applied():
        assert model.generate(token_ids(1), **OPTIONS).tolist() == _expected(reference, 1)
    assert flow.generation_report.stages == ("cpu:1", "cpu:0")
