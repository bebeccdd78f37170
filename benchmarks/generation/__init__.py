"""Tokens by ``model.generate`` of a language model whose layers lie on two devices, beside the same model on one.

``flow.applied()`` and accelerate's ``dispatch_model`` have the same map, half of the layers each; all of them run the
same model of transformers on the same prompts, and a row says whether they make the same tokens. Without GPUs a tiny
model on CPU stand-ins: that shows that it runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

from .. import record

ROUNDS = 3
PEER = "accelerate's dispatch_model"
ONE = "eager on one device"


def run() -> list[dict[str, Any]]:
    """Time of a token in the loop, and of the prompt with the first."""
    import torch

    from ..executor import cases

    cases.prepare()
    model = _model(cases.is_small())
    label = (
        "tiny Llama"
        if cases.is_small()
        else f"Llama of {sum(p.numel() for p in model.parameters()) / 1e9:.2g} billion parameters, bf16"
    )
    batch, length, new = (2, 8, 6) if cases.is_small() else (1, 512, 64)
    ids = torch.randint(2, 100, (batch, length), generator=torch.Generator().manual_seed(0)).to(cases.home())
    with torch.no_grad():
        found = {name: _measured(way, ids, new) for name, way in _ways(model).items()}
    return list(_rows(f"{label}, {batch} x {length} tokens and {new} more, 2 devices", found))


def _model(is_small: bool) -> Any:
    """On the device where models are made, its values at random."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..executor import cases

    sizes = (64, 128, 4, 4) if is_small else (4096, 11008, 32, 32)
    width, inner, layers, heads = sizes
    config = LlamaConfig(
        vocab_size=100 if is_small else 32000,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        torch_dtype=torch.float32 if is_small else torch.bfloat16,
    )
    torch.manual_seed(0)
    with cases.home():
        return LlamaForCausalLM(config).to(torch.float32 if is_small else torch.bfloat16).eval()


def _map(model: Any) -> dict[str, int]:
    """Half of the layers each."""
    layers = len(model.model.layers)
    return {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        **{f"model.layers.{number}": int(2 * number >= layers) for number in range(layers)},
        "model.norm": 1,
        "lm_head": 1,
    }


def _ways(model: Any) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Each makes the model ready, and puts it back on one device."""
    return {
        ONE: lambda: nullcontext(model),
        "ours": lambda: _ours(model),
        PEER: lambda: _dispatched(model),
    }


@contextmanager
def _ours(model: Any) -> Iterator[Any]:
    from placer import DataFlow, Placement

    from ..executor import cases

    places = cases.places(2)
    flow = DataFlow(model, places)
    names = {name: str(places[index]) for name, index in _map(model).items() if name != "model.rotary_emb"}
    flow.update_flow(Placement(status="feasible", objective="throughput", layer_devices=names))
    with flow.applied() as applied:
        yield applied
    flow.undo()


@contextmanager
def _dispatched(model: Any) -> Iterator[Any]:
    from ..executor import cases

    if not cases.on_gpus() or find_spec("accelerate") is None:  # it knows no stand-ins
        yield None
        return
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    yield dispatch_model(model, _map(model), main_device=0, force_hooks=True)
    remove_hook_from_submodules(model)
    for name in ("hf_device_map", "to", "cuda"):
        vars(model).pop(name, None)
    model.to(cases.home())


def _measured(way: Callable[[], AbstractContextManager[Any]], ids: Any, new: int) -> dict[str, Any] | None:
    """Milliseconds of a token in the loop, of the prompt with the first, of the first call of all; and the tokens."""
    with way() as model:
        if model is None:
            return None

        def once(count: int) -> tuple[float, Any]:
            began = perf_counter()
            made = model.generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0)
            tokens = made.tolist()
            return 1e3 * (perf_counter() - began), tokens

        first_ms, _ = once(4)
        prompts = [once(1)[0] for _ in range(ROUNDS)]
        wholes = [once(new) for _ in range(ROUNDS)]
        loops = [(whole - median(prompts)) / (new - 1) for whole, _ in wholes]
    gc.collect()
    return {"token": loops, "prompt": prompts, "first": [first_ms], "tokens": wholes[-1][1]}


def _rows(case: str, found: dict[str, dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    ours, others = found["ours"], {name: values for name, values in found.items() if name != "ours"}
    assert ours is not None
    for measure, key in (
        ("a token of each text, in the loop", "token"),
        ("the prompt and the first token", "prompt"),
        ("a first call, four tokens", "first"),
    ):
        peers = {name: _shown(median(values[key])) for name, values in others.items() if values is not None}
        times = ours[key]
        yield record.row(
            case, measure, "ms", _shown(median(times)), spread=(_shown(min(times)), _shown(max(times))), peers=peers
        )
    for name, values in others.items():
        if values is not None:
            pairs = [
                one == other
                for a, b in zip(ours["tokens"], values["tokens"], strict=True)
                for one, other in zip(a, b, strict=True)
            ]
            yield record.row(case, f"tokens that are those of: {name}", "%", 100.0 * sum(pairs) / len(pairs))


def _shown(value: float) -> float:
    return float(f"{value:.4g}")
