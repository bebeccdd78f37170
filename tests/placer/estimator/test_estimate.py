"""``placer.estimate`` of modules and checkpoints, against closed forms and the real library."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_list import transformers
from torch import nn

import placer
from placer.errors import InputError
from placer.estimator.kv_cache import cache_bytes, layer_of
from placer.schema import Estimate

BLOCKS, WIDTH = 3, 32


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(BLOCKS)]
    return nn.Sequential(*layers)


INPUTS = torch.zeros(8, WIDTH)
PARAM_BYTES = BLOCKS * WIDTH * WIDTH * 4


def total(found: Estimate, field: str) -> int:
    return sum(getattr(device.memory, field) for device in found.devices)


def test_parameters_gradients_and_adamw_are_their_closed_forms() -> None:
    found = placer.estimate(stack(), INPUTS, "2x1GiB", training=True, reserve_bytes=0)
    assert total(found, "param_bytes") == PARAM_BYTES
    assert total(found, "grad_bytes") == PARAM_BYTES
    # two moments, and a step counter of 4 bytes for each parameter
    assert total(found, "optimizer_bytes") == 2 * PARAM_BYTES + 4 * BLOCKS
    assert found.optimizer == "AdamW" and found.batch_size == 8 and found.chunks == 8


def test_sgd_without_momentum_keeps_no_state() -> None:
    found = placer.estimate(
        stack(), INPUTS, "1GiB", training=True, optimizer="sgd", reserve_bytes=0
    )
    assert total(found, "optimizer_bytes") == 0


def test_inference_has_neither_gradients_nor_an_optimizer() -> None:
    found = placer.estimate(stack(), INPUTS, "1GiB", reserve_bytes=0)
    assert total(found, "grad_bytes") == total(found, "optimizer_bytes") == 0
    assert found.optimizer is None and found.inputs == ("8x32:float32",)


def test_another_dtype_halves_the_parameters_and_leaves_the_model_alone() -> None:
    model = stack()
    found = placer.estimate(model, INPUTS, "1GiB", dtype="bfloat16", reserve_bytes=0)
    assert total(found, "param_bytes") == PARAM_BYTES // 2
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert not any(one.is_meta for one in model.parameters())


def test_a_model_on_meta_is_estimated_like_one_with_weights() -> None:
    with torch.device("meta"):
        without = stack()
    estimates = [
        placer.estimate(one, INPUTS, "2x1GiB", training=True) for one in (stack(), without)
    ]
    assert estimates[0] == estimates[1]


def test_a_smaller_micro_batch_is_estimated_anew() -> None:
    # 1 MiB of each of 512 samples crosses the layers, and a layer has 4 KiB of weights
    inputs = torch.zeros(512, 2048, device="meta")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 8), nn.Linear(8, 2048))
    whole = placer.estimate(model, inputs, "1GiB", reserve_bytes=0).fullest.total_bytes
    found = placer.estimate(model, inputs, [whole - 1], reserve_bytes=0)
    assert found.fits is False
    (change,) = [one for one in found.changes if one.kind == "batch-size"]
    assert change.batch_size == 256
    half = placer.estimate(model, inputs[:256], "1GiB", reserve_bytes=0).fullest.total_bytes
    assert change.total_bytes == half


def test_a_loss_counts_with_smaller_micro_batches_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1000))
    options: dict[str, Any] = {"training": True, "chunks": 1, "reserve_bytes": 0}
    plain = placer.estimate(model, torch.zeros(64, 4), "1GiB", **options)
    options["loss_fn"] = nn.functional.cross_entropy
    target = torch.zeros(64, dtype=torch.int64)
    found = placer.estimate(model, torch.zeros(64, 4), "1GiB", target=target, **options)
    # at least the logarithms of the probabilities, of the size of the output
    more = found.fullest.total_bytes - plain.fullest.total_bytes
    assert more >= 64 * 1000 * 4
    size = found.fullest.total_bytes - 1
    small = placer.estimate(model, torch.zeros(64, 4), [size], target=target, **options)
    assert [one.batch_size for one in small.changes if one.kind == "batch-size"] == [32]


def test_the_garbage_collector_runs_again_after_an_estimate_that_fails() -> None:
    assert gc.isenabled()
    with pytest.raises(InputError):
        placer.estimate(3)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": "2"}, "without its unit"),
        ({"generate": 5, "training": True}, "training has no cache"),
        ({"generate": 5}, "not a model of transformers"),
        ({"dtype": "float33"}, "dtype is 'float33'"),
        ({"dtype": torch.int8}, "dtype is"),
        ({"chunk": 3}, "did you mean 'chunks'"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        placer.estimate(stack(), INPUTS, **arguments)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        placer.estimate(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"neither config\.json nor safetensors"):
        placer.estimate(tmp_path)
    with pytest.raises(InputError, match="model is an int"):
        placer.estimate(3, INPUTS)


# checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama in bfloat16, as ``save_pretrained`` writes it."""
    library = transformers()
    config = library.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("llama")
    library.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def parameter_bytes(folder: Path) -> int:
    model = transformers().LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return sum(one.numel() * one.element_size() for one in model.parameters())


def test_a_checkpoint_folder_needs_neither_inputs_nor_weights(checkpoint: Path) -> None:
    found = placer.estimate(checkpoint, devices="2x24GiB")
    assert found.fits
    assert total(found, "param_bytes") == parameter_bytes(checkpoint)
    assert found.inputs == ("input_ids=1x64:int64",)  # as many as the model has positions


def test_the_configuration_alone_gives_the_same_estimate(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text((checkpoint / "config.json").read_text())
    config = transformers().AutoConfig.from_pretrained(checkpoint)
    estimates = [placer.estimate(one, (1, 16), "2x24GiB") for one in (file, config)]
    assert estimates[0] == estimates[1]
    assert estimates[0].inputs == ("input_ids=1x16:int64",)
    assert total(estimates[0], "param_bytes") == parameter_bytes(checkpoint)


def test_the_weights_alone_have_the_bytes_of_the_whole_model(checkpoint: Path) -> None:
    found = placer.estimate(checkpoint / "model.safetensors", devices="24GiB")
    assert found.weights_only
    assert found.fullest.total_bytes == parameter_bytes(checkpoint)
    with pytest.raises(InputError, match="training is given"):
        placer.estimate(checkpoint / "model.safetensors", training=True)


def test_the_cache_is_what_transformers_allocates(checkpoint: Path) -> None:
    model = transformers().LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.zeros(3, 20, dtype=torch.int64)
    cache = model(ids, use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    found = placer.estimate(checkpoint, (3, 8), "2x24GiB", generate=20)
    assert sum(device.cache_bytes for device in found.devices) == real
    # keys and values of 2 heads of 8 in bfloat16, 20 tokens of 3 texts
    assert real == 2 * 2 * 8 * 2 * 20 * 3


def test_shorter_texts_are_offered_where_the_cache_is_too_large(checkpoint: Path) -> None:
    def on(devices: str, tokens: int) -> Estimate:
        return placer.estimate(checkpoint, (1, 8), devices, generate=tokens, reserve_bytes=0)

    half = on("1GiB", 64).fullest.total_bytes
    (shorter,) = [one for one in on(f"{half}B", 128).changes if one.kind == "context"]
    # as exact as a fiftieth of the length
    assert shorter.change in {f"texts of {count} tokens instead of 128" for count in (63, 64)}


def test_the_callers_configuration_stays_as_it_is(checkpoint: Path) -> None:
    model = transformers().LlamaForCausalLM.from_pretrained(checkpoint)
    assert model.config.use_cache
    placer.estimate(model, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}, generate=8)
    assert model.config.use_cache


def test_training_a_checkpoint_includes_its_own_loss(checkpoint: Path) -> None:
    found = placer.estimate(checkpoint, (1, 16), "2x24GiB", training=True)
    assert found.inputs == ("input_ids=1x16:int64", "labels=1x16:int64")
    assert total(found, "grad_bytes") == parameter_bytes(checkpoint)
    # the loss is inside, and a note said that a loss outside is left out
    assert not any("loss" in note for note in found.notes)


def test_sliding_windows_and_encoder_decoders_have_their_own_caches() -> None:
    library = transformers()
    sizes = {"vocab_size": 50, "num_attention_heads": 2, "hidden_size": 16}
    config = library.MistralConfig(
        **sizes, intermediate_size=16, num_hidden_layers=1, num_key_value_heads=1, sliding_window=4
    )
    with torch.device("meta"):
        mistral = library.MistralForCausalLM(config)
        t5 = library.T5ForConditionalGeneration(
            library.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_heads=2, num_layers=2)
        )
    # the window holds the last 3 tokens, to which a new one is added
    assert cache_bytes(mistral, ["model"], 1, 100) == {"model": 2 * 3 * 8 * 4}
    # each decoder layer: keys and values of 2 heads of 4, of its own 10 and the source's 7 tokens
    found = cache_bytes(t5, ["encoder", "decoder"], 1, 10, source_tokens=7)
    assert found == {"decoder": 2 * 2 * (10 + 7) * 2 * 4 * 4}


def test_masks_that_depend_on_values_do_not_hide_the_cache() -> None:
    library = transformers()
    config = library.BartConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=50,
    )
    with torch.device("meta"):
        bart = library.BartForConditionalGeneration(config)
    found = cache_bytes(bart, ["model"], 1, 10, source_tokens=7)
    assert found == {"model": 2 * (10 + 7) * 16 * 4}


def test_a_mixture_of_experts_in_float32_has_a_cache_in_float32() -> None:
    library = transformers()
    config = library.MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        vocab_size=50,
    )
    with torch.device("meta"):
        mixtral = library.MixtralForCausalLM(config)
    assert cache_bytes(mixtral, ["model"], 1, 10) == {"model": 2 * 10 * 8 * 4}


def test_a_cache_belongs_to_the_layer_that_runs_its_module() -> None:
    layers = ["embed", "m.0", "m.1.q", "m.1.k", "m.2+norm", "m.3@1"]
    assert layer_of("m.0.attention", layers) == "m.0"
    assert layer_of("m.1", layers) == "m.1.q"
    assert layer_of("m.2.attention", layers) == "m.2+norm"
    assert layer_of("m.3", layers) == "m.3@1"
    with pytest.raises(InputError, match=r"'m\.10'"):
        layer_of("m.10", layers)


def test_packages_that_do_not_fit_together_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ImportError("no LlamaConfig") from RuntimeError(
            "operator torchvision::nms is missing"
        )

    monkeypatch.setattr(transformers().AutoConfig, "from_pretrained", failing)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"torchvision::nms.*install versions of torch"):
        placer.estimate(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot read"),
        ("{}", "has no model_type"),
        ('{"model_type": "no-such-model"}', "transformers .* cannot read"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "quantised weights"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(
    tmp_path: Path, content: str, words: str
) -> None:
    transformers()
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=words):
        placer.estimate(tmp_path)


def test_images_have_the_size_of_the_configuration(tmp_path: Path) -> None:
    library = transformers()
    config = library.ViTConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        architectures=["ViTForImageClassification"],
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = placer.estimate(tmp_path)
    assert found.inputs == ("pixel_values=1x3x32x32:float32",)


def test_an_encoder_decoder_without_a_largest_length_gets_the_default_length() -> None:
    library = transformers()
    config = library.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_heads=2, num_layers=1, use_cache=False
    )
    config.architectures = ["T5ForConditionalGeneration"]
    found = placer.estimate(config, devices="1GiB")
    assert found.inputs == ("input_ids=1x1024:int64", "decoder_input_ids=1x1024:int64")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((64,), "the shape of input_ids is 64; give samples and tokens, as in 1x64"),
        (
            {"input_ids": torch.zeros(2, 8)},
            "input_ids is float32, but tokens are whole numbers; write input_ids=2x8:int64",
        ),
    ],
)
def test_inputs_that_are_no_tokens_are_named(checkpoint: Path, inputs: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        placer.estimate(checkpoint, inputs)
    assert str(raised.value) == words


def test_parameters_that_the_inputs_do_not_use_are_named() -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
            self.text = nn.Linear(4, 4)

        def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
            found: torch.Tensor = self.text(text)
            return found if image is None else found + self.image(image).sum()

    model, text = TwoTowers(), torch.zeros(2, 4)
    notes = placer.estimate(model, text, devices="1GiB").notes
    assert (
        "4.1 KiB of parameters are left out, because the model does not run image with these"
        " inputs; give inputs with which it does"
    ) in notes
    used = placer.estimate(model, (text, torch.zeros(2, 32)), devices="1GiB").notes
    assert not any("left out, because" in note for note in used)
