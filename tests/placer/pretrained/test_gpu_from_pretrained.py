"""On real GPUs: a checkpoint folder becomes the tokens that one GPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generating_models import MAKERS
from pretrained_folders import saved

import placer

pytestmark = pytest.mark.gpu

GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "min_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
}
COUNT = min(2, torch.cuda.device_count())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_checkpoint_on_gpus_generates_and_streams_the_tokens_of_one_gpu(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path)
    # wide numbers, so that no rounding decides between two tokens
    llm = placer.from_pretrained(
        folder,
        devices=COUNT,
        context=64,
        dtype="float64",
        constraints=placer.Constraints(min_devices=COUNT),
    )
    assert not any(one.is_meta for one in llm.model.state_dict().values())
    for layer, place in llm.placement.layer_devices.items():
        for weight in llm.model.get_submodule(layer).parameters():
            assert str(weight.device) == place
    kind: Any = type(MAKERS[name]())
    reference = kind.from_pretrained(folder, dtype=torch.float64).eval().cuda(0)
    ids = llm.tokenizer("w1 w2 w3 w4", return_tensors="pt")["input_ids"]
    expected = reference.generate(ids.cuda(0), **GREEDY).cpu()
    for _ in range(2):
        assert llm.generate(ids, **GREEDY).tolist() == expected.tolist()
    text = "".join(llm.stream_text("w1 w2 w3 w4", **GREEDY))
    assert text == llm.tokenizer.decode(expected[0, 4:], skip_special_tokens=True)
    report = llm.flow.generation_report
    assert report.not_recorded_because == "" and report.recorded > 0
