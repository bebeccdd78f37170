"""Tokens from ``model.generate`` of a language model split over two devices, and of one device.

``flow.applied()`` and accelerate's ``dispatch_model`` use the same map, half of the layers each.
All of them run equal models of transformers on the same prompts and take turns. A row says whether
they make the same tokens. Without GPUs, a tiny model on CPU stand-ins only shows that the benchmark
runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

from .. import record

ROUNDS = 7
PEER = "accelerate's dispatch_model"
ONE = "eager on one device"


def run() -> list[dict[str, Any]]:
    """Return the time of a token in the loop, of the prompt, and of the first call."""
    import torch

    from ..executor import cases

    cases.prepare()
    model = _model(cases.is_small())
    parameters = sum(p.numel() for p in model.parameters())
    label = (
        "tiny Llama"
        if cases.is_small()
        else f"Llama of {parameters / 1e9:.2g} billion parameters, bf16"
    )
    batch, length, new = (2, 8, 6) if cases.is_small() else (1, 512, 64)
    ids = torch.randint(2, 100, (batch, length), generator=torch.Generator().manual_seed(0)).to(
        cases.home()
    )
    with torch.no_grad(), ExitStack() as stack:
        ready = {name: stack.enter_context(way) for name, way in _ways(model).items()}
        engines = {name: _Engine(made, ids) for name, made in ready.items() if made is not None}
        for turn in range(ROUNDS):
            for name in list(engines) if turn % 2 == 0 else reversed(engines):
                engines[name].turn(new)
        return list(
            _rows(f"{label}, {batch} x {length} tokens and {new} more, 2 devices", engines, new)
        )


def _model(is_small: bool) -> Any:
    """Return a model with random values on the device where models are made."""
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
    """Return a map that puts half of the layers on each device."""
    layers = len(model.model.layers)
    return {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        **{f"model.layers.{number}": int(2 * number >= layers) for number in range(layers)},
        "model.norm": 1,
        "lm_head": 1,
    }


def _ways(model: Any) -> dict[str, AbstractContextManager[Any]]:
    """Return the ways to run the model; each keeps a model of its own between turns."""
    return {
        ONE: nullcontext(copy.deepcopy(model)),
        "ours": _ours(copy.deepcopy(model)),
        PEER: _dispatched(model),
    }


@contextmanager
def _ours(model: Any) -> Iterator[Any]:
    from placer import DataFlow, Placement

    from ..executor import cases

    places = cases.places(2)
    flow = DataFlow(model, places)
    names = {
        name: str(places[index])
        for name, index in _map(model).items()
        if name != "model.rotary_emb"
    }
    flow.update_flow(Placement(status="feasible", objective="throughput", layer_devices=names))
    with flow.applied() as applied:
        yield applied
    flow.undo()


@contextmanager
def _dispatched(model: Any) -> Iterator[Any]:
    from ..executor import cases

    # accelerate does not support CPU stand-ins
    if not cases.on_gpus() or find_spec("accelerate") is None:
        yield None
        return
    from accelerate import dispatch_model

    yield dispatch_model(model, _map(model), main_device=0, force_hooks=True)


class _Engine:
    """The times of a model that generates, in ms.

    Args:
        model: the model, ready to generate.
        ids: the prompts.

    Attributes:
        first_ms: the time of the very first call, which makes four tokens.
        prompt_ms: the time of the prompt with the first token, by turn.
        whole_ms: the time of the whole text, by turn.
        tokens: the latest text.
    """

    def __init__(self, model: Any, ids: Any) -> None:
        self._model, self._ids = model, ids
        self.first_ms, self.tokens = self._once(4)
        self._once(4)  # a second call may record passes that the first has met
        self.prompt_ms: list[float] = []
        self.whole_ms: list[float] = []

    def turn(self, new: int) -> None:
        """Generate the prompt's first token, then a whole text."""
        self.prompt_ms.append(self._once(1)[0])
        ms, self.tokens = self._once(new)
        self.whole_ms.append(ms)

    def token_ms(self, new: int) -> list[float]:
        """Return the time of a token in the loop, by turn."""
        pairs = zip(self.whole_ms, self.prompt_ms, strict=True)
        return [(whole - prompt) / (new - 1) for whole, prompt in pairs]

    def _once(self, count: int) -> tuple[float, Any]:
        options = {
            "min_new_tokens": count,
            "max_new_tokens": count,
            "do_sample": False,
            "pad_token_id": 0,
        }
        began = perf_counter()
        # copying to the host waits for the devices
        tokens = self._model.generate(self._ids, **options).tolist()
        return 1e3 * (perf_counter() - began), tokens


def _rows(case: str, engines: Mapping[str, _Engine], new: int) -> Iterator[dict[str, Any]]:
    ours, others = (
        engines["ours"],
        {name: engine for name, engine in engines.items() if name != "ours"},
    )
    measures: tuple[tuple[str, Callable[[_Engine], list[float]]], ...] = (
        ("a token of each text, in the loop", lambda engine: engine.token_ms(new)),
        ("the prompt and the first token", lambda engine: engine.prompt_ms),
        ("a first call, four tokens", lambda engine: [engine.first_ms]),
    )
    for measure, times_of in measures:
        peers = {name: _shown(median(times_of(engine))) for name, engine in others.items()}
        for name, engine in engines.items():
            times = times_of(engine)
            spread = (_shown(min(times)), _shown(max(times))) if len(times) > 1 else None
            given = {"peers": peers} if name == "ours" else {}
            what = measure if name == "ours" else f"{measure}, {name}"
            yield record.row(case, what, "ms", _shown(median(times)), spread=spread, **given)
    for name, engine in others.items():
        pairs = [
            one == other
            for a, b in zip(ours.tokens, engine.tokens, strict=True)
            for one, other in zip(a, b, strict=True)
        ]
        yield record.row(
            case, f"tokens that are those of: {name}", "%", 100.0 * sum(pairs) / len(pairs)
        )


def _shown(value: float) -> float:
    return float(f"{value:.4g}")
