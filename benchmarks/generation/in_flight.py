"""Tokens per second of several groups of sequences in flight, and of one group at a time.

The model fits on no single GPU: a Llama with the shapes of 70 billion parameters, with as many of
its 80 layers as fit on the GPUs. Its weights are made on their devices. The same groups go one
after another through ``model.generate`` in ``flow.applied()``, and then through
``flow.generate_many`` with as many in flight as there are devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

from .. import record

_TURNS = 3
"""Most turns: a turn of the large model takes 20 s."""

_LEAST_RATIO = 3.2
"""The requested ratio for four devices: a pipeline of four stages that is idle for a fifth."""

_WARM_TOKENS = 8
"""Tokens after which every group's passes are recorded, with the capacity of the whole texts."""


def rows(turns: int) -> Iterator[dict[str, Any]]:
    """Yield the tokens per second of both ways, their ratio, and whether the tokens are equal.

    Args:
        turns: how often each way runs.
    """
    import torch

    from ..executor import cases

    places = cases.places() if cases.on_gpus() else cases.places(2)
    count = len(places)
    layers, model = _model(places)
    batch, length, new = (2, 8, 12) if cases.is_small() else (8, 128, 64)
    random = torch.Generator().manual_seed(0)
    groups = [
        torch.randint(2, 100, (batch, length), generator=random).to(places[0]) for _ in range(count)
    ]
    flow = _flow(model, places)
    ways: dict[str, Callable[[int], list[list[list[int]]]]] = {
        "several": lambda tokens: _several(flow, groups, tokens),
        "one": lambda tokens: _one(flow, groups, tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts = {}
    for way in ways.values():
        way(_WARM_TOKENS)
    for turn in range(min(turns, _TURNS)):
        for name in list(ways) if turn % 2 == 0 else reversed(ways):
            began = perf_counter()
            texts[name] = ways[name](new)
            rates[name].append(count * batch * new / (perf_counter() - began))
    flow.undo()
    kind = "tiny Llama" if cases.is_small() else f"Llama-70B's shapes, {layers} layers, bf16"
    case = f"{kind}, {count} groups of {batch} x {length} tokens and {new} more, {count} devices"
    value = {name: median(found) for name, found in rates.items()}
    several = rates["several"]
    yield record.row(
        case,
        "tokens per second, several groups in flight",
        "tokens/s",
        round(value["several"], 1),
        spread=(round(min(several), 1), round(max(several), 1)),
        peers={"one group at a time": round(value["one"], 1)},
    )
    yield record.row(
        case,
        "several groups in flight, in tokens per second of one group at a time",
        "x",
        round(value["several"] / value["one"], 3),
        target=_LEAST_RATIO if cases.on_gpus() and count == 4 else None,
        smaller_is_better=False,
    )
    same = [
        one == other
        for some, others in zip(texts["several"], texts["one"], strict=True)
        for text, twin in zip(some, others, strict=True)
        for one, other in zip(text, twin, strict=True)
    ]
    yield record.row(
        case,
        "tokens in flight that equal the tokens of one group at a time",
        "%",
        100.0 * sum(same) / len(same),
    )


def _model(places: list[Any]) -> tuple[int, Any]:
    """Return the number of layers, and a model with random weights on the devices of its layers."""
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
        layers = min(80, int(0.75 * free / layer_bytes))
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
    rotary = type(model.model.rotary_emb)(config).to(places[0])
    model.model.rotary_emb = rotary
    names = _map(layers, places)
    torch.manual_seed(0)
    for name, part in names.items():
        module = model.get_submodule(name).to_empty(device=part)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return layers, model.eval()


def _map(layers: int, places: list[Any]) -> dict[str, Any]:
    """Return the device of each module: as many layers on each."""
    return {
        "model.embed_tokens": places[0],
        **{
            f"model.layers.{number}": places[number * len(places) // layers]
            for number in range(layers)
        },
        "model.norm": places[-1],
        "lm_head": places[-1],
    }


def _flow(model: Any, places: list[Any]) -> Any:
    from placer import DataFlow, Placement

    flow = DataFlow(model, places)
    names = {name: str(place) for name, place in _map(len(model.model.layers), places).items()}
    flow.update_flow(Placement(status="feasible", objective="throughput", layer_devices=names))
    return flow


def _options(new: int) -> dict[str, Any]:
    return {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def _one(flow: Any, groups: list[Any], new: int) -> list[list[list[int]]]:
    """Return the texts of one group after another."""
    with flow.applied() as model:
        return [model.generate(ids, **_options(new)).tolist() for ids in groups]


def _several(flow: Any, groups: list[Any], new: int) -> list[list[list[int]]]:
    """Return the texts of all groups, as many in flight."""
    return [
        ids.tolist() for ids in flow.generate_many(groups, in_flight=len(groups), **_options(new))
    ]
