"""Calls inside ``flow.applied()`` go through hooks until they have taken as long there as a capture
takes."""

from __future__ import annotations

import pytest
import torch
from counted_captures import count_captures
from model_list import CASES
from splitting import scatter_layers, twins

from placer import DataFlow
from placer.executor import model_captures
from placer.executor.model_captures import Waiting


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(("seconds", "captures"), [(1.0, 0), (1e-9, 1)])
def test_a_model_is_captured_when_its_calls_have_taken_as_long_on_hooks(
    monkeypatch: pytest.MonkeyPatch, seconds: float, captures: int
) -> None:
    """Tokens then come one capture in all, as it is known by then that lengths vary; the prompt
    waits for its own."""
    model, reference = twins(CASES["LlamaForCausalLM"].make, training=False)
    flow = DataFlow(model, ["cpu:0", "cpu:1"], fine_grained=True)
    scatter_layers(flow, 2)
    made = count_captures(monkeypatch)
    monkeypatch.setattr(model_captures, "_CAPTURE_S", seconds)
    ids = torch.arange(2, 7).repeat(2, 1)
    with flow.applied(record=False):
        for _ in range(2):
            found = model.generate(ids, max_new_tokens=5, pad_token_id=0)
            assert (
                found.tolist() == reference.generate(ids, max_new_tokens=5, pad_token_id=0).tolist()
            )
            assert len(made) == captures
    flow(ids)  # waits for nothing
    assert len(made) == captures + 1


def test_kinds_of_calls_wait_each_for_itself_and_anew_after_a_capture() -> None:
    waiting, short, long = Waiting(), [torch.zeros(2, 3)], [torch.zeros(2, 5)]
    for _ in range(2):
        assert waiting.waits("one", short, 1.0)
        waiting.note(0.6)
    assert waiting.waits("other", short, 1.0)
    assert not waiting.waits("one", long, 1.0)
    assert waiting.free("one", long) == [{1}] and waiting.free("other", long) == [set()]
    assert waiting.waits("one", long, 1.0)
    waiting.forget()
    assert waiting.free("one", long) == [set()]
