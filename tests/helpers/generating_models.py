"""Tiny language models of transformers, and a map that puts their blocks on several devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from model_list import transformers
from torch import Tensor, nn

from placer import DataFlow

_SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 59,
    "bos_token_id": 58,
}


def _like_llama(
    name: str, config_name: str | None = None, **options: Any
) -> Callable[..., nn.Module]:
    def make(**sizes: Any) -> nn.Module:
        library = transformers()
        config = getattr(library, config_name or f"{name}Config")(**{**_SIZES, **options, **sizes})
        model: nn.Module = getattr(library, f"{name}ForCausalLM")(config)
        return model

    return make


def _gpt2() -> nn.Module:
    library = transformers()
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    model: nn.Module = library.GPT2LMHeadModel(
        library.GPT2Config(**sizes, eos_token_id=59, bos_token_id=58)
    )
    return model


def _t5() -> nn.Module:
    library = transformers()
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    model: nn.Module = library.T5ForConditionalGeneration(
        library.T5Config(**sizes, num_heads=4, decoder_start_token_id=0, eos_token_id=59)
    )
    return model


def _bart() -> nn.Module:
    library = transformers()
    sides = ("encoder", "decoder")
    sizes = {
        **{f"{side}_layers": 2 for side in sides},
        **{f"{side}_attention_heads": 4 for side in sides},
        **{f"{side}_ffn_dim": 48 for side in sides},
    }
    model: nn.Module = library.BartForConditionalGeneration(
        library.BartConfig(
            vocab_size=60,
            d_model=32,
            max_position_embeddings=128,
            eos_token_id=59,
            forced_eos_token_id=None,
            **sizes,
        )
    )
    return model


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "llama": _like_llama("Llama"),
    "qwen2": _like_llama("Qwen2"),
    "mistral": _like_llama("Mistral", sliding_window=6, num_hidden_layers=4),
    "mixtral": _like_llama("Mixtral", num_local_experts=4),
    "gemma3": _like_llama(
        "Gemma3",
        config_name="Gemma3TextConfig",
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt2": _gpt2,
    "t5": _t5,
    "bart": _bart,
}
"""By name, what makes each model.

Each of two devices gets one block, or two where caches have windows: several caches share a device
then, or caches of both kinds.
"""


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model and an equal one that stays unsplit."""
    torch.manual_seed(0)
    model = MAKERS[name]().to(dtype).eval()
    return model, copy.deepcopy(model)


def greedy(new: int) -> dict[str, Any]:
    """Return the options of ``generate`` for exactly ``new`` greedy tokens."""
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def token_ids(seed: int, rows: int = 2, columns: int = 7) -> Tensor:
    """Return prompts of random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (rows, columns), generator=generator)


def split(model: nn.Module, count: int = 2, **options: Any) -> DataFlow:
    """Return a flow with the blocks of a model in halves, or more parts, on the devices.

    Args:
        model: any; its lists of modules are its blocks.
        count: number of devices.
        options: of the flow.
    """
    flow = DataFlow(model, fine_grained=True, **options)
    blocks = {
        f"{path}.{index}.": index * count // len(child)
        for path, child in model.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1
        for index in range(len(child))
    }
    for name in flow.layer_gpus:
        place = [at for block, at in blocks.items() if f"{name}.".startswith(block)]
        is_last = name.endswith(("lm_head", "ln_f", "model.norm"))
        flow.layer_gpus[name] = place[0] if place else (count - 1) * is_last
    flow.update_flow()
    return flow
