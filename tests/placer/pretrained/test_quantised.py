"""``from_pretrained`` of checkpoints whose weights bitsandbytes or torchao quantised."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from model_list import transformers

import placer
from placer.errors import InputError, MissingExtraError
from placer.pretrained import quantised as quantised_module
from placer.testing import logical_devices

# imported by the tests that need them: bitsandbytes imports the compiler of torch
pytestmark = pytest.mark.skipif(
    not (find_spec("bitsandbytes") and find_spec("torchao")),
    reason="bitsandbytes or torchao is not installed",
)

GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "min_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
}
REST = pytest.mark.exhaustive
TEXT = placer.GenerationOptions(prompt_tokens=20, new_tokens=12)


def methods(name: str) -> Any:
    """Return transformers' configuration of a method of quantisation."""
    library = transformers()
    if name == "four bits":
        return library.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    if name == "eight bits":
        return library.BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return library.TorchAoConfig(Int8WeightOnlyConfig())


def read(folder: Path, **options: Any) -> Any:
    """Return the model as transformers reads it."""
    kind = transformers().LlamaForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, **options).eval()


def quantised(name: str, folder: Path) -> Path:
    """Save a tiny Llama with quantised weights, as transformers does."""
    library = transformers()
    torch.manual_seed(0)
    # bitsandbytes packs rows of 64 numbers or more
    config = library.LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=59,
    )
    library.LlamaForCausalLM(config).save_pretrained(folder / "plain")
    model = read(folder / "plain", quantization_config=methods(name))
    model.save_pretrained(folder / "quantised")
    return folder / "quantised"


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the numbers in a folder's file of safetensors."""
    content = (folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    spans = (one["data_offsets"] for name, one in header.items() if name != "__metadata__")
    return sum(end - start for start, end in spans)


def placed(folder: Path, **options: Any) -> Any:
    split = placer.Constraints(min_devices=2)
    given = {"devices": ["cpu:0", "cpu:1"], "repeats": 1, "constraints": split, **options}
    return placer.from_pretrained(folder, **given)


@pytest.mark.parametrize("name", ["four bits", "torchao", pytest.param("eight bits", marks=REST)])
def test_quantised_weights_generate_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    folder = quantised(name, tmp_path)
    ids = torch.randint(3, 50, (1, 7))
    expected = read(folder).generate(ids, **GREEDY)
    with logical_devices(2):
        llm = placed(folder, objective="generation", generation=TEXT)
        assert llm.generate(ids, **GREEDY).tolist() == expected.tolist()
    assert llm.flow.generation_report.recorded > 0
    found = sum(one.memory.param_bytes + one.memory.buffer_bytes for one in llm.placement.devices)
    assert found == pytest.approx(stored_bytes(folder), rel=0.02)


@pytest.mark.parametrize("limit", ["host_memory_bytes", "disk_bytes"])
def test_quantised_weights_do_not_rest_on_the_host(limit: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{limit} is given, but .* are quantised"):
        placed(quantised("torchao", tmp_path), **{limit: "1GiB"})


def described(llama: Path, folder: Path, **quantization: Any) -> Path:
    """Return a folder whose configuration describes quantised weights."""
    config = json.loads((llama / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (folder / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
def test_a_package_that_is_missing_is_named(
    method: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers()
    monkeypatch.setattr(quantised_module, "find_spec", lambda name: None)
    folder = described(llama, tmp_path / "folder", load_in_4bit=False, quant_method=method)
    with pytest.raises(MissingExtraError, match=f"which is not installed: pip install {method}"):
        placed(folder)


def test_what_transformers_misses_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers()
    from transformers.quantizers import quantizer_bnb_4bit

    monkeypatch.setattr(quantizer_bnb_4bit, "is_accelerate_available", lambda: False)
    four = described(llama, tmp_path / "four", load_in_4bit=True, quant_method="bitsandbytes")
    with pytest.raises(MissingExtraError, match=r"bitsandbytes: .*pip install 'accelerate>="):
        placed(four)


def test_what_does_not_fit_quantised_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"quantised by gptq; .*placer\.load\(model, placement"):
        placed(described(llama, tmp_path / "gptq", quant_method="gptq", bits=4))
    four = described(llama, tmp_path / "four", load_in_4bit=True, quant_method="bitsandbytes")
    with pytest.raises(
        InputError, match=r"dtype is torch\.bfloat16, but the weights in .* are quan"
    ):
        placed(four, dtype="bfloat16")
