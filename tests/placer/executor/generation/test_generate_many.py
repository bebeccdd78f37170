"""``flow.generate_many``: results in the order of the prompts, several generations at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generating_models import greedy, pair, split, token_ids
from torch import Tensor, nn

from placer import DataFlow
from placer.errors import InputError

PASSES = 4
OPTIONS = greedy(PASSES + 1)
LATE_S = 60.0
pytestmark = pytest.mark.usefixtures("two_stand_ins")


def _flow() -> tuple[DataFlow, Any]:
    model, reference = pair("llama")
    return split(model), reference


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("generate_many")]


class _Streamer:
    """Calls a function for every token."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def put(self, value: Tensor) -> None:
        self._call()

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    "in_flight", [None, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (1, 3))]
)
def test_results_are_those_of_single_generations_in_order(in_flight: int | None) -> None:
    flow, reference = _flow()
    prompts = [token_ids(seed, rows=1 + seed % 2) for seed in range(4)]
    found = [ids.tolist() for ids in flow.generate_many(prompts, in_flight=in_flight, **OPTIONS)]
    assert found == [reference.generate(ids, **OPTIONS).tolist() for ids in prompts]
    report = flow.generation_report
    assert report.recorded + report.hooked == 4 * PASSES
    assert not _threads()


def test_a_prompt_may_be_a_dict_whose_arguments_come_first() -> None:
    flow, reference = _flow()
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    prompts = [
        {"input_ids": token_ids(1) * mask, "attention_mask": mask},
        {"input_ids": token_ids(2), "max_new_tokens": 2, "min_new_tokens": 2},
    ]
    found = [ids.tolist() for ids in flow.generate_many(prompts, **OPTIONS)]
    assert found == [
        reference.generate(**{**OPTIONS, **prompt}).tolist()  # type: ignore[dict-item]
        for prompt in prompts
    ]
    assert len(found[1][0]) == 9


def test_as_many_generations_as_asked_are_in_flight_at_the_same_time() -> None:
    flow, _ = _flow()
    # each text waits after its first token until the other one has come as far
    both = threading.Barrier(2)
    puts = [0, 0]

    def wait(number: int) -> None:
        puts[number] += 1
        if puts[number] == 2:
            both.wait(LATE_S)

    prompts = [
        {
            "input_ids": token_ids(number, 1),
            "streamer": _Streamer(lambda number=number: wait(number)),
        }
        for number in range(2)
    ]
    assert len([*flow.generate_many(prompts, **OPTIONS)]) == 2


def test_no_more_prompts_are_taken_than_may_be_in_flight() -> None:
    flow, _ = _flow()
    taken: list[int] = []
    go_on = threading.Event()

    def source() -> Iterator[Any]:
        for number in range(4):
            taken.append(number)
            yield {
                "input_ids": token_ids(number, 1),
                "streamer": _Streamer(lambda: go_on.wait(LATE_S)),
            }

    results = flow.generate_many(source(), in_flight=2, **OPTIONS)
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.extend(results))
    consumer.start()
    while len(taken) < 2:
        pass
    consumer.join(0.05)
    assert taken == [0, 1]
    go_on.set()
    consumer.join(LATE_S)
    assert len(found) == 4


def test_an_error_comes_in_the_position_of_its_prompt() -> None:
    flow, reference = _flow()
    results = flow.generate_many(
        [token_ids(1), token_ids(2).float(), token_ids(3)], in_flight=3, **OPTIONS
    )
    assert next(results).tolist() == reference.generate(token_ids(1), **OPTIONS).tolist()
    with pytest.raises(RuntimeError) as caught:
        next(results)
    assert "in prompt 1" in caught.value.__notes__
    assert next(results, None) is None and not _threads()


def test_an_error_of_the_source_comes_after_the_results_before_it() -> None:
    flow, _ = _flow()

    def source() -> Iterator[Tensor]:
        yield token_ids(1)
        raise OSError("no more")

    results = flow.generate_many(source(), **OPTIONS)
    next(results)
    with pytest.raises(OSError, match="no more") as caught:
        next(results)
    assert caught.value.__notes__ == ["raised by the source of the prompts, for prompt 1"]


def test_a_prompt_of_another_type_is_an_error() -> None:
    flow, _ = _flow()
    results = flow.generate_many([token_ids(1), "a text"], **OPTIONS)
    next(results)
    with pytest.raises(InputError, match="give a tensor of token ids, or a dict") as caught:
        next(results)
    assert caught.value.__notes__ == ["in prompt 1"]


def test_closing_it_cancels_what_runs_and_frees_the_static_caches() -> None:
    flow, reference = _flow()
    counts = [0, 0, 0]

    def count(number: int) -> None:
        counts[number] += 1

    prompts = [
        {
            "input_ids": token_ids(number, 1),
            "streamer": _Streamer(lambda number=number: count(number)),
            # without the close, the later texts would take minutes
            **({"max_new_tokens": 200, "min_new_tokens": 200} if number else {}),
        }
        for number in range(3)
    ]
    results = flow.generate_many(prompts, in_flight=2, **OPTIONS)
    next(results)
    results.close()
    assert not _threads()
    assert counts[0] == PASSES + 2 and max(counts[1:]) < 150
    assert not flow.calls.decoding._idle
    flow.update_flow()
    with flow.applied() as model:
        run: Any = model.generate
        found = run(token_ids(5), **OPTIONS)
    assert found.tolist() == reference.generate(token_ids(5), **OPTIONS).tolist()


def test_it_may_be_used_inside_applied_while_another_thread_waits_to_move_layers() -> None:
    flow, reference = _flow()
    moving = threading.Thread(target=flow.update_flow)
    with flow.applied():
        moving.start()
        while not flow.lock._queue:
            pass
        found = [
            ids.tolist() for ids in flow.generate_many([token_ids(1), token_ids(2)], **OPTIONS)
        ]
    moving.join(LATE_S)
    assert not moving.is_alive()
    assert found == [reference.generate(token_ids(seed), **OPTIONS).tolist() for seed in (1, 2)]


@pytest.mark.exhaustive
def test_a_returned_cache_is_not_overwritten_by_the_next_text() -> None:
    flow, reference = _flow()
    options = {**OPTIONS, "return_dict_in_generate": True}
    found = [*flow.generate_many([token_ids(seed) for seed in range(3)], in_flight=1, **options)]
    for seed, result in enumerate(found):
        expected = reference.generate(token_ids(seed), **options)
        for layer, other in zip(
            result.past_key_values.layers, expected.past_key_values.layers, strict=True
        ):
            torch.testing.assert_close(layer.keys.cpu(), other.keys, atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive
def test_autocast_of_the_caller_holds() -> None:
    flow, _ = _flow()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [*flow.generate_many([token_ids(1)], **OPTIONS)]
    assert "autocast" in flow.generation_report.not_recorded_because


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, True])
def test_in_flight_is_a_count(in_flight: Any) -> None:
    flow, _ = _flow()
    with pytest.raises(InputError, match=r"in_flight=.*1 or more"):
        flow.generate_many([token_ids(1)], in_flight=in_flight)


@pytest.mark.parametrize("prompts", [token_ids(1), {"input_ids": token_ids(1)}, "a text", 3])
def test_prompts_are_several(prompts: Any) -> None:
    flow, _ = _flow()
    with pytest.raises(InputError, match="give an iterable of prompts"):
        flow.generate_many(prompts)


@pytest.mark.parametrize("name", ["streamer", "past_key_values"])
def test_what_belongs_to_one_text_is_given_with_its_prompt(name: str) -> None:
    flow, _ = _flow()
    with pytest.raises(InputError, match=f"{name} cannot be shared"):
        flow.generate_many([token_ids(1)], **{name: object()})


def test_it_needs_a_placed_flow_of_a_model_that_generates() -> None:
    model, _ = pair("llama")
    with pytest.raises(InputError, match=r"call flow\.update_flow\(\) first"):
        DataFlow(model).generate_many([token_ids(1)])
    flow = DataFlow(nn.Sequential(nn.Linear(2, 2)))
    flow.update_flow()
    with pytest.raises(InputError, match="Sequential has no method generate"):
        flow.generate_many([token_ids(1)])


class _Recurrent(nn.Module):
    """A model that keeps the state of its text in an attribute, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 8), nn.GRUCell(8, 8), nn.Linear(8, 9)
        self.state: Tensor | None = None

    def forward(self, ids: Tensor, begins: bool) -> Tensor:
        state = None if begins else self.state
        for place in range(ids.shape[1]):
            state = self.body(self.embed(ids[:, place]), state)
        self.state = state
        found: Tensor = self.head(state)
        return found

    def generate(self, inputs: Tensor, max_new_tokens: int) -> Tensor:
        ids = inputs
        for number in range(max_new_tokens):
            new = self(ids if number == 0 else ids[:, -1:], begins=number == 0)
            ids = torch.cat([ids, new.argmax(-1, keepdim=True).to(ids.device)], 1)
        return ids


def test_texts_whose_state_is_in_modules_are_generated_one_after_another() -> None:
    torch.manual_seed(0)
    model = _Recurrent().eval()
    prompts = [torch.randint(9, (1, 3)) for _ in range(4)]
    with torch.no_grad():
        expected = [model.generate(ids, 12).tolist() for ids in prompts]
        flow = DataFlow(model)
        flow.layer_gpus.update(embed=0, body=0, head=1)
        flow.update_flow()
        with pytest.warns(UserWarning, match="'state' of 'the model'"):
            found = list(flow.generate_many(prompts, in_flight=3, max_new_tokens=12))
    assert [ids.tolist() for ids in found] == expected
