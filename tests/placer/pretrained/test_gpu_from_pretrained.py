"""On real GPUs: a checkpoint folder becomes the tokens that one GPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generating_models import MAKERS
from model_list import transformers
from pretrained_folders import saved

import placer

pytestmark = pytest.mark.gpu

GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "min_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
}
TEXT = placer.GenerationOptions(prompt_tokens=8, new_tokens=12)
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


def test_objective_generation_predicts_and_generates_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    llm = placer.from_pretrained(
        folder,
        devices=COUNT,
        dtype="float64",
        objective="generation",
        generation=TEXT,
        constraints=placer.Constraints(min_devices=COUNT),
    )
    assert llm.placement.generation is not None
    assert (llm.placement.generation.token_ms or 0.0) > 0
    kind: Any = type(MAKERS["llama"]())
    reference = kind.from_pretrained(folder, dtype=torch.float64).eval().cuda(0)
    ids = torch.randint(3, 50, (1, 8))
    expected = reference.generate(ids.cuda(0), **GREEDY).cpu()
    assert llm.generate(ids, **GREEDY).tolist() == expected.tolist()
    assert llm.flow.generation_report.recorded > 0


def test_four_bit_weights_give_the_logits_of_one_gpu(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    library = transformers()
    config = library.LlamaConfig(
        vocab_size=60,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=59,
    )
    torch.manual_seed(0)
    library.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantised = library.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=library.BitsAndBytesConfig(load_in_4bit=True),
        dtype=torch.float16,
        device_map={"": 0},
    ).eval()
    quantised.save_pretrained(tmp_path / "four")
    ids = torch.randint(3, 50, (1, 8))
    with torch.no_grad():
        expected = quantised(ids.cuda(0)).logits.float().cpu()
    llm = placer.from_pretrained(
        tmp_path / "four",
        devices=COUNT,
        context=64,
        constraints=placer.Constraints(min_devices=COUNT),
    )
    with torch.no_grad():
        found = llm.flow(ids).logits.float().cpu()
    # half precision, and weights of four bits that are the same
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)
    assert llm.generate(ids, **GREEDY).shape == (1, 20)
