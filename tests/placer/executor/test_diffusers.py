"""Pipelines of diffusers: the guide's program places one, and it makes the same images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from documentation import blocks
from model_list import transformers

import placer
from placer.testing import logical_devices
from placer_client import suggest_together as suggesting

pytestmark = pytest.mark.integration

GUIDE = "docs/guides/diffusion.md"


def _program() -> str:
    """Return the guide's program that needs diffusers."""
    (found,) = (
        block.text
        for block in blocks()
        if block.page == GUIDE and "from diffusers import" in block.text
    )
    return found


def _tokenizer(library: Any) -> Any:
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return library.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12)


def _pipeline() -> Any:
    """Return a pipeline with the parts of Stable Diffusion XL, tiny and with random weights."""
    library = transformers()
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    config = library.CLIPTextConfig(
        vocab_size=54,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        max_position_embeddings=12,
        projection_dim=32,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
    )
    pipe = diffusers.StableDiffusionXLPipeline(
        unet=unet.eval(),
        vae=vae.eval(),
        text_encoder=library.CLIPTextModel(config).eval(),
        text_encoder_2=library.CLIPTextModelWithProjection(config).eval(),
        tokenizer=_tokenizer(library),
        tokenizer_2=_tokenizer(library),
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", steps_offset=1),
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _image(pipe: Any, **options: Any) -> Any:
    # sizes of latents are half of the image's here
    sizes = {"height": 32, "width": 32, "num_inference_steps": 3, **options}
    random = torch.Generator().manual_seed(1)
    return pipe("a cat", generator=random, output_type="np", **sizes).images


def test_the_guides_program_places_a_pipeline_which_then_makes_the_same_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = _pipeline()
    import diffusers

    expected = _image(pipe)
    monkeypatch.setattr(
        diffusers.StableDiffusionXLPipeline, "from_pretrained", lambda *args, **options: pipe
    )

    def split(models: Any, **options: Any) -> Any:
        """Use both devices, though one would do for a pipeline as small as this."""
        limit = sum(
            parameter.numel() * parameter.element_size()
            for use in models.values()
            for parameter in use.model.parameters()
        )
        quick = {"repeats": 1, "cache": False, "progress": False, "time_limit_s": 5}
        return suggesting.suggest_together(models, memory_bytes=limit, **quick, **options)

    monkeypatch.setattr(placer, "suggest_together", split)
    program = _program().replace("num_inference_steps=steps", "num_inference_steps=2")
    names: dict[str, Any] = {}
    with logical_devices(2):
        exec(compile(program, GUIDE, "exec"), names)
        found, flows = names["found"], names["flows"]
        assert all(load.layers for load in found.devices)
        assert [flow.not_captured_because for flow in flows.values()] == [""] * 4
        with flows.applied():
            image = _image(pipe)
        torch.testing.assert_close(torch.tensor(image), torch.tensor(expected))
        flows.undo()
    torch.testing.assert_close(torch.tensor(_image(pipe)), torch.tensor(expected))
