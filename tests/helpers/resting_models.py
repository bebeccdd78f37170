"""Language models of several blocks, and placements in which parameters rest off their device."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from model_list import transformers

from placer import DataFlow, Placement

LAYERS = 6


def pair(width: int = 32) -> tuple[Any, Any]:
    """Return a Llama with six blocks, and an equal one that stays unsplit."""
    library = transformers()
    torch.manual_seed(0)
    config = library.LlamaConfig(
        vocab_size=60,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = library.LlamaForCausalLM(config).eval()
    return model, copy.deepcopy(model)


EXPERTS, CHOSEN = 8, 2


def mixture(how: str, width: int = 32) -> tuple[Any, Any]:
    """Return a mixture of experts with six blocks, and an equal one that stays unsplit.

    Args:
        how: how transformers computes experts.
        width: of the hidden states.
    """
    library = transformers()
    torch.manual_seed(0)
    config = library.Qwen3MoeConfig(
        vocab_size=60,
        hidden_size=width,
        intermediate_size=width,
        moe_intermediate_size=width // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=64,
        experts_implementation=how,
    )
    model = library.Qwen3MoeForCausalLM(config).eval()
    return model, copy.deepcopy(model)


def spoil(flow: DataFlow) -> None:
    """Let weights that are read without a copy give no number; the slots must exist."""
    resting = flow.placed.hooks.resting
    assert resting is not None
    for slots in resting.slots:
        for memory in slots.memory:
            memory.fill_(255)


def blocks(numbers: Collection[int]) -> list[str]:
    """Return the names of blocks."""
    return [f"model.layers.{number}" for number in numbers]


def placement(
    places: Sequence[str], resting: Collection[str], first: int, on_disk: Collection[str] = ()
) -> Placement:
    """Return a placement with the first blocks on one device, and the rest on another.

    Args:
        places: the two devices.
        resting: the layers whose parameters rest on the host.
        first: the number of blocks on the first device.
        on_disk: the layers whose parameters rest on the disk.
    """
    last = places[int(first < LAYERS)]
    where = {"model.embed_tokens": places[0]}
    where |= {name: places[int(n >= first)] for n, name in enumerate(blocks(range(LAYERS)))}
    where |= {"model.norm": last, "lm_head": last}
    return Placement(
        status="feasible",
        objective="generation",
        layer_devices=where,
        resting=dict.fromkeys(resting, "host") | dict.fromkeys(on_disk, "disk"),
    )


def placed(
    model: Any,
    places: Sequence[str],
    resting: Collection[str],
    first: int = LAYERS,
    on_disk: Collection[str] = (),
    folder: Any = None,
) -> DataFlow:
    """Return a flow with the model on such a placement."""
    flow = DataFlow(model, inference_only=True, disk_folder=folder)
    flow.update_flow(placement(places, resting, first, on_disk))
    return flow
