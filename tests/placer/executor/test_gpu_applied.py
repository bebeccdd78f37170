"""On real GPUs: models generate, and train on methods of their own, split as they do unsplit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_cases import without_dropout
from model_list import CASES
from splitting import scatter_layers

from placer import DataFlow

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_generate_gives_what_it_gives_unsplit(name: str, ways: dict[str, Any]) -> None:
    if name.startswith("T5") and "cache_implementation" in ways:
        pytest.skip("transformers itself makes no such cache for it")
    torch.manual_seed(0)
    model = without_dropout(CASES[name].make().double().eval()).cuda(0)
    whole = copy.deepcopy(model)
    flow = DataFlow(model, fine_grained=True)
    scatter_layers(flow, torch.cuda.device_count())
    for length in (5, 8, 5):
        ids = torch.randint(2, 50, (2, length), generator=torch.Generator().manual_seed(length)).cuda(0)
        options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **ways}
        expected = whole.generate(ids, **options)
        with flow.applied():
            found = model.generate(ids, **options)
        assert found.tolist() == expected.tolist()
    assert flow.not_captured_because == ""
