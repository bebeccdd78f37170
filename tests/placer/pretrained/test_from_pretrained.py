"""``from_pretrained``: from a checkpoint folder to the unsplit model's tokens on two devices."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import resting_models
import torch
from generating_models import MAKERS
from model_list import transformers
from pretrained_folders import saved

import placer
from placer import devices
from placer.errors import InfeasibleError, InputError, MissingExtraError
from placer.estimator import checkpoints
from placer.pretrained.checkpoint_folder import checkpoint_folder
from placer.profiler.links import cluster, disk_rate
from placer.schema import Constraints, Device, GenerationOptions, Rate
from placer.testing import logical_devices

GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "min_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
}
REST = pytest.mark.exhaustive
SPLIT = placer.Constraints(min_devices=2)


@pytest.fixture
def two_devices() -> Iterator[None]:
    """Stand-ins that refuse operations on tensors of two devices."""
    with logical_devices(2):
        yield


def placed(path: Any, **options: Any) -> Any:
    given = {"repeats": 1, "devices": ["cpu:0", "cpu:1"], **options}
    if "generation" not in given:
        given.setdefault("context", 64)
    return placer.from_pretrained(path, **given)


def unsplit(name: str, folder: Path, ids: torch.Tensor) -> list[list[int]]:
    """Return the tokens that transformers generates with the same checkpoint."""
    model: Any = type(MAKERS[name]()).from_pretrained(folder, dtype=torch.float32)  # type: ignore[attr-defined]
    found: list[list[int]] = model.eval().generate(ids, **GREEDY).tolist()
    return found


def cache_bytes_per_token(folder: Path) -> int:
    """Return the bytes of keys and values of a token in float32, by the configuration."""
    config = json.loads((folder / "config.json").read_text())
    size = config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size * 4)


def bert_in(folder: Path) -> Path:
    """Save an encoder that generates nothing, without a tokenizer."""
    library = transformers()
    config = library.BertConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    library.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def bert_from(folder: Path) -> Any:
    return transformers().BertForSequenceClassification.from_pretrained(folder).eval()


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=REST) for one in ("gpt2", "mixtral", "t5"))]
)
def test_a_checkpoint_on_two_devices_generates_the_unsplit_models_tokens(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path)
    llm = placed(folder, batch_size=2, constraints=SPLIT)
    assert len(set(llm.placement.layer_devices.values())) == 2
    ids = torch.randint(3, 50, (2, 7))
    assert llm.generate(ids, **GREEDY).tolist() == unsplit(name, folder, ids)


def test_the_second_call_takes_every_measurement_from_the_cache(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placed(llama)
    with caplog.at_level(logging.INFO, "placer.profiler"):
        placed(llama)
    assert re.search(r" 0 layers were measured, [1-9]\d* taken from the cache$", caplog.text, re.M)


def test_the_placement_has_memory_for_keys_and_values_of_the_context(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "DEFAULT_TOKENS", 16)  # of both profiles

    def buffers(context: int) -> int:
        found = placed(llama, context=context).placement
        return sum(device.memory.buffer_bytes for device in found.devices)

    # decoding has room for 64 tokens at least
    assert buffers(128) - buffers(32) == 64 * cache_bytes_per_token(llama)


@pytest.mark.parametrize("most", [256, 74])
def test_the_memory_for_a_context_is_what_decoding_allocates(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Decoding rounds 70 tokens up to 128, also in a model that reads no more than 74."""
    monkeypatch.setattr(checkpoints, "DEFAULT_TOKENS", 16)
    folder = changed(llama, tmp_path / "copy", max_position_embeddings=most)

    def reserved(context: int) -> int:
        found = placed(folder, context=context).placement
        return sum(device.memory.buffer_bytes for device in found.devices)

    llm = placed(folder, context=70)
    llm.generate(torch.randint(3, 50, (1, 7)), max_new_tokens=63, min_new_tokens=63)
    capacity = llm.flow.generation_report.capacity
    assert capacity == 128
    assert reserved(70) - reserved(64) == (capacity - 64) * cache_bytes_per_token(folder)


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "DEFAULT_TOKENS", 16)
    fitting = placed(llama, devices=1, context=64).placement.devices[0].memory.total_bytes
    with pytest.raises(InfeasibleError) as caught:
        placed(
            llama, devices=1, context=256, memory_bytes=fitting + 64 * cache_bytes_per_token(llama)
        )
    message = str(caught.value)
    assert message.startswith("LlamaForCausalLM with texts of 256 tokens does not fit on one ")
    assert "the fullest needs" in message
    # 64 tokens and the memory of 64 more; within a fiftieth
    shorter = message.partition("would fit: texts of ")[2]
    assert re.match(r"12[678] tokens instead of 256", shorter)


def test_memory_limits_spread_the_model_over_both_devices(llama: Path) -> None:
    whole = placed(llama, devices=1).placement.devices[0].memory.total_bytes
    llm = placed(llama, devices=2, memory_bytes=whole - 1)
    assert {device.layers > 0 for device in llm.placement.devices} == {True}
    assert all(device.memory.total_bytes < whole for device in llm.placement.devices)


TEXT = placer.GenerationOptions(prompt_tokens=20, new_tokens=12)
GENERATED: dict[str, Any] = {"context": None, "objective": "generation", "generation": TEXT}
CAPACITY = 64
"""Tokens that a static cache has room for, at least."""


@pytest.mark.usefixtures("two_devices")
def test_objective_generation_runs_from_a_checkpoint_to_streamed_text(llama: Path) -> None:
    llm = placed(llama, **GENERATED, constraints=SPLIT)
    assert len(set(llm.placement.layer_devices.values())) == 2
    assert llm.placement.generation.model_dump(include=set(TEXT.model_dump())) == TEXT.model_dump()
    ids = torch.randint(3, 50, (1, 20))
    assert llm.generate(ids, **GREEDY).tolist() == unsplit("llama", llama, ids)
    stream = llm.stream_text("w1 w2 w3")
    assert "".join(stream) and stream.tokens == llm.context - 3 == 29


def test_objective_generation_takes_both_passes_from_the_cache(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placed(llama, **GENERATED)
    with caplog.at_level(logging.INFO, "placer.profiler"):
        placed(llama, **GENERATED)
    taken = r" 0 layers were measured, [1-9]\d* taken from the cache$"
    assert len(re.findall(taken, caplog.text, re.M)) == 2


def test_objective_generation_has_memory_for_the_cache_of_every_sequence(llama: Path) -> None:
    text = TEXT.model_copy(update={"sequences_in_flight": 3})
    memory = [
        device.memory
        for device in placed(
            llama, **{**GENERATED, "generation": text}, batch_size=2
        ).placement.devices
    ]
    cached = sum(device.cache_bytes for device in memory)
    assert cached == 3 * 2 * CAPACITY * cache_bytes_per_token(llama)
    # rotary frequencies are other buffers
    assert sum(device.buffer_bytes for device in memory) < cached
    assert all(device.total_bytes > device.cache_bytes for device in memory if device.cache_bytes)


@REST
def test_objective_generation_names_the_memory_that_is_missing(llama: Path) -> None:
    text = placer.GenerationOptions(prompt_tokens=20, new_tokens=200, sequences_in_flight=2)
    options = {**GENERATED, "generation": text, "devices": 1}
    whole = placed(llama, **options).placement.devices[0].memory
    with pytest.raises(InfeasibleError) as caught:
        placed(llama, **options, memory_bytes=whole.total_bytes - whole.cache_bytes // 2)
    message = str(caught.value)
    assert message.startswith(
        "LlamaForCausalLM with texts of 220 tokens, 2 at the same time, does not fit on one "
    )
    # 256 tokens of capacity had room before, and half of them have room now; within a fiftieth
    shorter = message.partition("would fit: texts of ")[2]
    assert shorter.startswith(("127 tokens instead of 220", "128 tokens instead of 220"))


def test_objective_generation_measures_prompts_of_any_length(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "DEFAULT_TOKENS", 16)
    llm = placed(llama, **GENERATED)
    lengths = []
    llm.model.model.embed_tokens.register_forward_pre_hook(
        lambda _, given: lengths.append(given[0].shape[1])
    )
    llm.generate(torch.randint(3, 50, (1, 20)), max_new_tokens=2)
    llm.generate(torch.randint(3, 50, (1, 27)), max_new_tokens=2)
    assert [length for length in lengths if length > 1] == [20, 20, 7]


def test_compiled_decoding_generates_the_unsplit_models_tokens(llama: Path) -> None:
    llm = placed(llama, compile="aot_eager")
    ids = torch.randint(3, 50, (1, 7))
    assert llm.generate(ids, **GREEDY).tolist() == unsplit("llama", llama, ids)
    report = llm.flow.generation_report
    assert len(report.compiled) + len(report.not_compiled_because) == 1


def test_weights_are_converted_to_the_dtype_that_was_asked_for(llama: Path) -> None:
    llm = placed(llama, dtype="bfloat16")
    assert {one.dtype for one in llm.model.parameters()} == {torch.bfloat16}
    assert not any(one.requires_grad for one in llm.model.parameters())


def test_a_prompt_that_is_longer_than_the_measured_one_passes_in_pieces(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "DEFAULT_TOKENS", 16)
    llm = placed(llama)
    lengths = []
    llm.model.model.embed_tokens.register_forward_pre_hook(
        lambda _, given: lengths.append(given[0].shape[1])
    )
    ids = torch.randint(3, 50, (1, 39))
    assert llm.generate(ids, **GREEDY).tolist() == unsplit("llama", llama, ids)
    assert lengths[:3] == [16, 16, 7]


def test_an_encoder_runs_as_a_flow_and_generates_nothing(tmp_path: Path) -> None:
    bert = placed(bert_in(tmp_path), context=None, constraints=SPLIT)
    ids = torch.randint(3, 50, (2, 7))
    torch.testing.assert_close(bert.flow(ids).logits.cpu(), bert_from(tmp_path)(ids).logits)
    assert bert.tokenizer is None and bert.context is None
    with pytest.raises(InputError, match="BertForSequenceClassification generates no text"):
        bert.generate(ids)
    with pytest.raises(InputError, match="context is 8, but Bert"):
        placer.from_pretrained(tmp_path, context=8)


def test_a_model_name_is_resolved_like_transformers_does(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    entry = tmp_path / "models--tiny--llama"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    shutil.copytree(llama, entry / "snapshots" / ("0" * 40))
    assert checkpoint_folder("tiny/llama").samefile(entry / "snapshots" / ("0" * 40))
    message = "no folder tiny/other, and the hub could not be reached .*; give the path"
    with pytest.raises(InputError, match=message):
        placed("tiny/other")


def test_a_name_that_the_hub_refuses_is_named_with_the_hubs_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*given: Any, **options: Any) -> str:
        raise RuntimeError("404 Client Error.\n\nRepository Not Found")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    message = "no folder tiny/other, and the hub did not provide .*: 404 Client Error; correct"
    with pytest.raises(InputError, match=message):
        placed("tiny/other")


def changed(llama: Path, folder: Path, **config: Any) -> Path:
    """Return a copy of the checkpoint with changed fields of its configuration."""
    shutil.copytree(llama, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": -1}, "context=-1: give a whole number of tokens, 1 or more"),
        ({"context": True}, "context=True: give"),
        ({"context": 257}, "context is 257, but LlamaForCausalLM reads at most 256 tokens"),
        ({"batch_size": 0}, "batch_size=0: give a whole number of texts, 1 or more"),
        ({"dtype": "int7"}, "dtype is 'int7'; give float32"),
        ({"devices": []}, "devices is an empty list"),
        ({"memory_bytes": -5}, "memory_bytes of cpu:0 is -5"),
        ({"objective": "generation"}, "objective is 'generation', but the lengths of the texts"),
        ({**GENERATED, "context": 64}, "generation has the length of the texts; leave context out"),
        (
            {**GENERATED, "generation": TEXT.model_copy(update={"new_tokens": 237})},
            r"prompt_tokens \+ new_tokens is 257, but LlamaForCausalLM reads at most 256",
        ),
        ({"compile": "fast"}, "compile='fast' is not a backend of torch.compile"),
        ({"training": True}, "training is True, but from_pretrained places inference"),
        ({"contxt": 5}, "from_pretrained has no argument 'contxt'"),
    ],
)
def test_a_wrong_argument_is_named(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        placed(llama, **options)


def test_a_path_without_a_checkpoint_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder /no/such/folder"):
        placed("/no/such/folder")
    with pytest.raises(InputError, match="path is an int; give the path"):
        placed(3)
    with pytest.raises(InputError, match=r"is a file; give the folder"):
        placed(llama / "config.json")
    with pytest.raises(InputError, match=r"has no config\.json; give a folder as"):
        placed(tmp_path)
    weightless = changed(llama, tmp_path / "weightless")
    (weightless / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights; download"):
        placed(weightless)


def test_an_architecture_that_cannot_be_made_is_named_with_the_way_around(
    llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"cannot read.*config\.json"):
        placed(changed(llama, tmp_path / "unknown", model_type="unheard-of"))
    library = transformers()
    config = library.WhisperConfig(
        d_model=12, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2
    )
    config.decoder_attention_heads = 2
    config.architectures = ["WhisperForConditionalGeneration"]
    whisper = changed(llama, tmp_path / "whisper")
    config.save_pretrained(whisper)
    with pytest.raises(InputError, match=r"WhisperFor.* reads 'input_features'.*placer\.load"):
        placed(whisper)


def test_without_transformers_the_error_names_the_extra(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch-placer\[transformers\]'"):
        placed(llama)


def test_weights_that_do_not_fit_rest_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = resting_models.pair()
    model.save_pretrained(tmp_path)
    describe = cluster._describe

    def with_rate(*args: Any) -> Device:
        # stand-ins have no link to the host, so nothing would rest
        rate = Rate(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
        return describe(*args).model_copy(update={"from_host": rate})

    monkeypatch.setattr(cluster, "_describe", with_rate)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    given: dict[str, Any] = {"devices": ["cpu:0"], "memory_bytes": 9 * weights // 10}
    with logical_devices(1):
        with pytest.raises(InfeasibleError):
            placed(tmp_path, **given)
        llm = placed(tmp_path, host_memory_bytes="1GiB", **given)
        assert llm.placement.resting
        found = llm.generate(torch.arange(3, 12)[None], **GREEDY)
    assert found.tolist() == reference.generate(torch.arange(3, 12)[None], **GREEDY).tolist()
    assert llm.flow.generation_report.recorded > 0


def test_one_block_is_computed_on_the_cpu_while_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cpu:0`` copies weights as a GPU does; ``cpu:1`` has the host's memory."""
    model, reference = resting_models.pair()
    model.save_pretrained(tmp_path)
    describe = cluster._describe

    def with_rate(device: torch.device, *args: Any) -> Device:
        rate = Rate(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
        return describe(device, *args).model_copy(
            update={"from_host": None if device.index else rate}
        )

    monkeypatch.setattr(cluster, "_describe", with_rate)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    others = ["model.embed_tokens", "model.norm", "lm_head"]
    others += [f"model.layers.{number}" for number in (0, 1, 2, 4, 5)]
    rules = Constraints(
        pinned={"model.layers.3": "cpu:1"}, forbidden=dict.fromkeys(others, ("cpu:1",))
    )
    with logical_devices(2):
        llm = placed(
            tmp_path,
            devices=["cpu:0", "cpu:1"],
            memory_bytes={"cpu:0": 7 * weights // 10},
            host_memory_bytes="1GiB",
            objective="generation",
            generation=GenerationOptions(prompt_tokens=9, new_tokens=8),
            constraints=rules,
        )
        assert set(llm.placement.resting.values()) == {"host"}
        assert llm.placement.layer_devices["model.layers.3"] == "cpu:1"
        found = llm.generate(torch.arange(3, 12)[None], **GREEDY)
    assert found.tolist() == reference.generate(torch.arange(3, 12)[None], **GREEDY).tolist()
    assert llm.flow.generation_report.recorded > 0


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_rest_in_the_files_of_the_checkpoint(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Almost no host memory: converted weights go to files of their own, others stay."""
    model, reference = resting_models.pair()
    model.save_pretrained(tmp_path / "model")
    describe = cluster._describe
    monkeypatch.setattr(disk_rate, "SIZES", (2**12, 2**14))

    def with_rate(*args: Any) -> Device:
        rate = Rate(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
        return describe(*args).model_copy(update={"from_host": rate})

    monkeypatch.setattr(cluster, "_describe", with_rate)
    monkeypatch.setenv("PLACER_DISK", str(tmp_path / "disk"))
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    if dtype is not None:
        reference, weights = reference.to(torch.bfloat16), weights // 2
    given: dict[str, Any] = {"devices": ["cpu:0"], "memory_bytes": 9 * weights // 10}
    limits = {"host_memory_bytes": 1, "disk_bytes": "1GiB", "dtype": dtype}
    with logical_devices(1):
        llm = placed(tmp_path / "model", **limits, **given)
        assert set(llm.placement.resting.values()) == {"disk"}
        found = llm.generate(torch.arange(3, 12)[None], **GREEDY)
    assert found.tolist() == reference.generate(torch.arange(3, 12)[None], **GREEDY).tolist()
    files = devices.MappedFiles()
    own = "disk" if dtype else "model/model.safetensors"
    for name, parameter in llm.model.named_parameters():
        file = files.of(parameter)
        rests = any(name.startswith(f"{layer}.") for layer in llm.placement.resting)
        assert (file is not None) == rests
        assert file is None or file.path.startswith(str(tmp_path / own))
    report = llm.flow.generation_report
    assert not report.recorded
    assert report.not_recorded_because.endswith(
        "rest on the disk, and a recording cannot read files"
    )
