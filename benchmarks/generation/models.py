"""The Llamas of the benchmark, their maps, and how fast devices can read their weights."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

LARGE_LAYERS = 80
"""Layers of a Llama with 70 billion parameters."""

MIXTURE_LAYERS = 6
"""Layers of the mixture of experts, of the 48 of the model with its shapes."""

_READ_BYTES = 4 * 2**30
"""Bytes that are read to measure a GPU's bandwidth: far more than its cache holds."""


def places() -> list[Any]:
    """Return the two devices over which one text is split, or the only one."""
    from ..executor import cases

    return cases.places()[:2]


def shown_places() -> str:
    """Return the number of ``places``, such as ``2 devices``."""
    from placer.utils.units import count_text

    return count_text(len(places()), "device")


def has_targets() -> bool:
    """Return whether the requested times apply, which are for a large model on two GPUs."""
    from ..executor import cases

    return not cases.is_small() and len(places()) > 1


def options(new: int) -> dict[str, Any]:
    """Return the options of ``generate`` for exactly ``new`` greedy tokens."""
    return {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def prompts(count: int, batch: int, length: int, place: Any) -> list[Any]:
    """Return groups of prompts of random tokens.

    Args:
        count: groups.
        batch: prompts in a group.
        length: tokens of a prompt.
        place: the device.
    """
    import torch

    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, 100, (batch, length), generator=random).to(place) for _ in range(count)
    ]


def llama(is_tiny: bool) -> Any:
    """Return a Llama with 6.7 billion parameters, on the default device in use."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, layers, heads = (64, 128, 4, 4) if is_tiny else (4096, 11008, 32, 32)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    config = LlamaConfig(
        vocab_size=100 if is_tiny else 32000,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        torch_dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def mixture(is_tiny: bool) -> Any:
    """Return a mixture of experts on the default device in use, which is ``meta`` if it is large.

    It has the shapes of Qwen3 with 30 billion parameters, but fewer layers.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    width, inner, layers, heads = (64, 32, 4, 4) if is_tiny else (2048, 768, MIXTURE_LAYERS, 32)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    config = Qwen3MoeConfig(
        vocab_size=100 if is_tiny else 151936,
        hidden_size=width,
        intermediate_size=8 * inner,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        head_dim=128 if not is_tiny else 16,
        num_experts=128 if not is_tiny else 8,
        num_experts_per_tok=8 if not is_tiny else 2,
        torch_dtype=dtype,
    )
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


def small_llama(is_tiny: bool) -> Any:
    """Return ``llama`` with random values, where models are made."""
    import torch

    from ..executor import cases

    torch.manual_seed(0)
    with cases.home():
        return llama(is_tiny)


def name_of(model: Any, is_tiny: bool) -> str:
    """Return the name of ``small_llama`` in rows."""
    parameters = sum(one.numel() for one in model.parameters())
    return "tiny Llama" if is_tiny else f"Llama of {parameters / 1e9:.2g} billion parameters, bf16"


def large_llama(places: Sequence[Any]) -> Any:
    """Return a model with the shapes of 70 billion parameters, each layer made on its device.

    It has as many of the 80 layers as fit.

    Args:
        places: the devices.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..executor import cases

    if cases.is_small():
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
        heads, layers, dtype = 4, 4, torch.float32
    else:
        sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
        heads, dtype = 64, torch.bfloat16
        free = sum(torch.cuda.mem_get_info(place)[0] for place in places)
        layer_bytes = 2 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672)
        # the rest is for embeddings, caches and recordings
        layers = min(LARGE_LAYERS, int(0.75 * free / layer_bytes))
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        torch_dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    # its buffers are computed, which meta cannot
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(places[0])
    torch.manual_seed(0)
    for name, place in split(layers, places).items():
        module = model.get_submodule(name).to_empty(device=place)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return model.eval()


def large_name(model: Any) -> str:
    """Return the name of ``large_llama`` in rows."""
    from ..executor import cases

    layers = len(model.model.layers)
    return "tiny Llama" if cases.is_small() else f"Llama-70B's shapes, {layers} layers, bf16"


def split(layers: int, places: Sequence[Any]) -> dict[str, Any]:
    """Return a map of modules that gives each device as many layers.

    Args:
        layers: of the Llama.
        places: the devices.
    """
    return {
        "model.embed_tokens": places[0],
        **{
            f"model.layers.{number}": places[number * len(places) // layers]
            for number in range(layers)
        },
        "model.norm": places[-1],
        "lm_head": places[-1],
    }


def placed(model: Any, places: Sequence[Any]) -> Any:
    """Return a ``DataFlow`` of a Llama under ``split``."""
    from placer import DataFlow, Placement

    flow = DataFlow(model, list(places))
    layers = {name: str(at) for name, at in split(len(model.model.layers), places).items()}
    flow.update_flow(Placement(status="feasible", objective="throughput", layer_devices=layers))
    return flow


def least_token_ms(model: Any) -> float:
    """Return the time in ms in which the devices of a model can read its weights, one by one.

    A token reads one row of the embeddings, and all other weights.

    Args:
        model: a Llama whose weights are on their devices.
    """
    found: dict[Any, int] = {}
    for name, one in model.named_parameters():
        if not name.startswith("model.embed_tokens."):
            found[one.device] = found.get(one.device, 0) + one.nbytes
    return sum(1e3 * size / _bytes_per_s(place) for place, size in found.items())


def _bytes_per_s(place: Any) -> float:
    """Return the bandwidth at which a device reads its memory: the median of five sums."""
    import torch

    size = _READ_BYTES if place.type == "cuda" else 2**24
    if place.type == "cuda":
        free = torch.cuda.mem_get_info(place)[0]
        size = min(size, free // 2)
    numbers = torch.ones(size // 4, dtype=torch.float32, device=place)
    seconds = []
    for _ in range(6):
        began = perf_counter()
        numbers.sum().item()  # waits for the device
        seconds.append(perf_counter() - began)
    return float(size / median(seconds[1:]))
