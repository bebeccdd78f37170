"""On real GPUs: passes ahead wait for their token, and the host does not wait for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from generating_models import greedy, pair, split, token_ids
from torch import Tensor

from placer import DataFlow, devices

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

NEW = 12
OPTIONS = greedy(NEW)
COUNT = min(2, torch.cuda.device_count())
CYCLES = 50_000_000
"""For which a GPU sleeps: about 30 ms."""


class Late:
    """Lets the device sleep before each pass ahead.

    Attributes:
        passes: an event after each pass.
        pending: for each token that the host has waited for, whether the pass after it was running.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[torch.cuda.Event] = []
        self.pending: list[bool] = []
        ahead = devices.SideStreams.ahead

        @contextmanager
        def slow(own: devices.SideStreams) -> Iterator[None]:
            with ahead(own):
                torch.cuda._sleep(CYCLES)
                yield
                self.passes.append(torch.cuda.Event())
                self.passes[-1].record()

        monkeypatch.setattr(devices.SideStreams, "ahead", slow)

    def put(self, token: Tensor) -> None:
        """Wait for a token."""
        token.tolist()
        self.pending.append(bool(self.passes) and not self.passes[-1].query())

    def end(self) -> None:
        """Do nothing."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late(monkeypatch)


def _placed(name: str) -> tuple[Any, Any, DataFlow]:
    """Return a model that is split over GPUs, an equal one on the first, and the flow."""
    model, reference = (one.cuda(0) for one in pair(name, torch.float64))
    return model, reference, split(model, COUNT)


def _ids(seed: int) -> Tensor:
    return token_ids(seed, rows=1).cuda(0)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
@pytest.mark.parametrize("ways", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
def test_texts_are_those_of_one_gpu_however_late_a_pass_is(
    name: str, ways: dict[str, Any], late: Late
) -> None:
    model, reference, flow = _placed(name)
    for seed in range(3):
        torch.manual_seed(3)
        expected = reference.generate(_ids(seed), **{**OPTIONS, **ways})
        torch.manual_seed(3)
        with flow.applied():
            found = model.generate(_ids(seed), **{**OPTIONS, **ways})
        assert found.tolist() == expected.tolist()
    assert len(late.passes) >= 2 * (NEW - 3)


def test_the_host_does_not_wait_for_the_pass_ahead(late: Late) -> None:
    model, reference, flow = _placed("llama")
    for seed in range(2):
        late.pending.clear()
        with flow.applied():
            found = model.generate(_ids(seed), streamer=late, **OPTIONS)
        assert found.tolist() == reference.generate(_ids(seed), **OPTIONS).tolist()
    # the prompt, its token, a pass that shows the loop; after the last token, only the sleep
    assert late.pending == [False, False, *[True] * (NEW - 1)]


def test_a_pass_waits_for_a_token_that_comes_late() -> None:
    model, reference, flow = _placed("llama")

    def delay(ids: Tensor, scores: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return scores.neg()

    for seed in range(3):
        with flow.applied():
            found = model.generate(_ids(seed), logits_processor=[delay], **OPTIONS)
        expected = reference.generate(_ids(seed), logits_processor=[delay], **OPTIONS)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_pass_that_is_not_needed_leaves_no_trace(name: str, late: Late) -> None:
    model, reference, flow = _placed(name)

    def stop(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 13, device=ids.device)

    options = {**OPTIONS, "min_new_tokens": 1, "return_dict_in_generate": True}
    for seed in range(3):
        with flow.applied():
            found = model.generate(_ids(seed), stopping_criteria=[stop], **options)
        expected = reference.generate(_ids(seed), stopping_criteria=[stop], **options)
        assert found.sequences.tolist() == expected.sequences.tolist()
        pairs = zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True)
        for layer, other in pairs:
            assert layer.get_seq_length() == other.get_seq_length()
            torch.testing.assert_close(layer.keys.cpu(), other.keys.cpu(), atol=1e-10, rtol=1e-10)
    longer = torch.cat([expected.sequences, _ids(7)], 1)
    with flow.applied():
        text = model.generate(longer, past_key_values=found.past_key_values, **OPTIONS)
    wanted = reference.generate(longer, past_key_values=expected.past_key_values, **OPTIONS)
    assert text.tolist() == wanted.tolist()


def test_a_flow_that_is_dropped_leaves_its_streams_to_the_next_one(late: Late) -> None:
    places, others = [torch.device("cuda", number) for number in range(COUNT)], []
    with pytest.raises(devices.NoStreamsError):
        while True:
            others.append(devices.SideStreams(places))
    others.pop()  # the streams of one are free again
    for seed in range(2):
        model, _, flow = _placed("llama")
        with flow.applied():
            model.generate(_ids(seed), **OPTIONS)
        assert late.passes
        late.passes.clear()
        del model, flow
        gc.collect()
