"""Passes that are issued before the host knows whether a text goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generating_models import greedy, pair, split, token_ids
from torch import Tensor, nn

from placer import DataFlow
from placer.executor.generation.decoding import Decoding

pytestmark = pytest.mark.usefixtures("two_stand_ins")

NEW = 8
OPTIONS = greedy(NEW)
ONE = {"rows": 1}


class Log:
    """Counts passes ahead.

    Attributes:
        issued: passes ahead.
        accepted: those whose call came.
        taken_back: the others.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.issued = self.accepted = self.taken_back = 0
        run, accepts, take_back = Decoding.run_ahead, Decoding.accepts, Decoding.take_back

        def issue(own: Decoding, *args: Any) -> Any:
            found = run(own, *args)
            self.issued += found is not None
            return found

        def accept(own: Decoding, *args: Any) -> bool:
            found = accepts(own, *args)
            self.accepted += found
            return found

        def undo(own: Decoding, *args: Any) -> None:
            take_back(own, *args)
            self.taken_back += 1

        monkeypatch.setattr(Decoding, "run_ahead", issue)
        monkeypatch.setattr(Decoding, "accepts", accept)
        monkeypatch.setattr(Decoding, "take_back", undo)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers so far, which are 0 from then on."""
        found = self.issued, self.accepted, self.taken_back
        self.issued = self.accepted = self.taken_back = 0
        return found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def _placed(name: str = "llama") -> tuple[Any, Any, DataFlow]:
    """Return a model whose passes of one token are recorded, an equal one, and the flow."""
    model, reference = pair(name)
    flow = split(model)
    _text(flow, token_ids(9, **ONE))
    return model, reference, flow


def _text(flow: DataFlow, ids: Tensor, **options: Any) -> Any:
    with flow.applied() as model:
        return model.generate(ids, **{**OPTIONS, **options})


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_token_but_the_first_two_comes_from_a_pass_ahead(name: str, log: Log) -> None:
    _, reference, flow = _placed(name)
    assert log.counts[1] > 0  # as soon as there is a recording
    ids = token_ids(1, **ONE)
    assert _text(flow, ids).tolist() == reference.generate(ids, **OPTIONS).tolist()
    # the prompt gives a token, and the first pass shows what the loop does between passes
    assert log.counts == (NEW - 2, NEW - 2, 0)


def test_the_pass_is_issued_before_the_host_waits_for_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, flow = _placed()
    order = []
    run = Decoding.run_ahead

    def issue(own: Decoding, *args: Any) -> Any:
        order.append("issue")
        return run(own, *args)

    class Streamer:
        def put(self, value: Tensor) -> None:
            value.tolist()
            order.append("wait")

        def end(self) -> None:
            pass

    monkeypatch.setattr(Decoding, "run_ahead", issue)
    _text(flow, token_ids(1, **ONE), streamer=Streamer())
    # the prompt is given to the streamer, too
    assert order == ["wait", "wait"] + ["issue", "wait"] * (NEW - 1)


class _Stop:
    """Stops a text at its fifth new token."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, text: Tensor, scores: Any, **_: Any) -> Tensor:
        self.count += 1
        return torch.full((len(text),), self.count == 5)


def _stopped() -> dict[str, Any]:
    return {"stopping_criteria": [_Stop()], "min_new_tokens": 1, "return_dict_in_generate": True}


@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_a_text_that_ends_early_leaves_the_unsplit_models_cache(name: str, log: Log) -> None:
    _, reference, flow = _placed(name)
    ids = token_ids(1, **ONE)
    _ = log.counts
    found = _text(flow, ids, **_stopped())
    expected = reference.generate(ids, **{**OPTIONS, **_stopped()})
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert log.counts == (4, 3, 1)
    mine, others = (
        getattr(one.past_key_values, "self_attention_cache", one.past_key_values).layers
        for one in (found, expected)
    )
    for layer, other in zip(mine, others, strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        torch.testing.assert_close(layer.keys.cpu(), other.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.values.cpu(), other.values, atol=1e-5, rtol=1e-5)


def test_a_second_turn_after_an_early_end(log: Log) -> None:
    _, reference, flow = _placed()
    ids = token_ids(1, **ONE)
    first = _text(flow, ids, **_stopped())
    wanted = reference.generate(ids, **{**OPTIONS, **_stopped()})
    assert log.taken_back == 1
    longer = torch.cat([wanted.sequences, token_ids(4, **ONE)], 1)
    found = _text(flow, longer, past_key_values=first.past_key_values)
    expected = reference.generate(longer, past_key_values=wanted.past_key_values, **OPTIONS)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "ways",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=["beams", "assisted", "static"],
)
def test_other_loops_have_no_passes_ahead(ways: dict[str, Any], log: Log) -> None:
    model, reference = pair("llama")
    flow = split(model)
    ids = token_ids(2, rows=1, columns=4).repeat(1, 3)
    for _ in range(2):
        found = _text(flow, ids, **ways)
        assert found.tolist() == reference.generate(ids, **{**OPTIONS, **ways}).tolist()
    assert log.issued == 0


def test_without_recording_there_are_none(log: Log) -> None:
    model, _, flow = _placed()
    _ = log.counts
    with flow.applied(record=False):
        model.generate(token_ids(1, **ONE), **OPTIONS)
    assert log.issued == 0


class _Streamer:
    """Does something with the model after each token."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def put(self, value: Tensor) -> None:
        self._act()

    def end(self) -> None:
        pass


def test_a_streamer_may_run_the_model_between_two_passes(log: Log) -> None:
    model, reference, flow = _placed()
    ids, others = token_ids(1, **ONE), token_ids(2, **ONE)
    texts = []

    def act() -> None:
        model(others)
        texts.append(model.generate(others, **{**OPTIONS, "max_new_tokens": NEW}).tolist())

    _ = log.counts
    found = _text(flow, ids, streamer=_Streamer(act))
    assert found.tolist() == reference.generate(ids, **OPTIONS).tolist()
    assert texts == [reference.generate(others, **OPTIONS).tolist()] * (NEW + 1)
    issued, accepted, taken_back = log.counts
    assert issued == accepted + taken_back and taken_back > 0


def test_weights_that_change_between_two_passes_count(log: Log) -> None:
    texts = []
    ids = token_ids(1, **ONE)
    model, reference, flow = _placed()
    for one in (model, reference):
        count = iter(range(100))

        def act(head: nn.Module = one.lm_head, count: Any = count) -> None:
            if next(count) == 5:
                with torch.no_grad():
                    head.weight.neg_()

        if one is model:
            _ = log.counts
            texts.append(_text(flow, ids, streamer=_Streamer(act)).tolist())
            assert log.taken_back == 1
        else:
            texts.append(one.generate(ids, streamer=_Streamer(act), **OPTIONS).tolist())
    assert texts[0] == texts[1]


def test_a_criterion_of_the_user_may_fail(log: Log) -> None:
    _, reference, flow = _placed()
    ids = token_ids(1, **ONE)

    def fail(text: Tensor, scores: Any, **_: Any) -> Tensor:
        if text.shape[1] >= 12:
            raise RuntimeError("no more")
        return torch.zeros(len(text), dtype=torch.bool)

    with pytest.raises(RuntimeError, match="no more"):
        _text(flow, ids, stopping_criteria=[fail])
    assert _text(flow, ids).tolist() == reference.generate(ids, **OPTIONS).tolist()
    assert log.issued == log.accepted + log.taken_back


def test_the_models_methods_are_its_own_again_afterwards() -> None:
    model, _, flow = _placed()
    with flow.applied():
        assert "prepare_inputs_for_generation" in vars(model)
    assert not {"generate", "prepare_inputs_for_generation"} & vars(model).keys()


def test_only_a_thread_in_the_callers_streams_goes_ahead(log: Log) -> None:
    model, reference, flow = _placed()
    prompts = [token_ids(seed, **ONE) for seed in range(4)]
    _ = log.counts
    found = [one.tolist() for one in flow.generate_many(prompts, in_flight=2, **OPTIONS)]
    assert found == [reference.generate(ids, **OPTIONS).tolist() for ids in prompts]
    assert log.issued == 0

    texts: dict[int, Any] = {}

    def generate(seed: int) -> None:
        with flow.applied():
            texts[seed] = model.generate(prompts[seed], **OPTIONS).tolist()

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[seed] for seed in range(4)] == found
