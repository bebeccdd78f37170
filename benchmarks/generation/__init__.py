"""Tokens from ``model.generate`` of a language model split over two devices, and of one device.

``flow.applied()`` and accelerate's ``dispatch_model`` use the same map, half of the layers each.
``flow.applied(record=False)`` keeps Placer's own recordings out. On one GPU, transformers' static
cache with torch.compile is a peer, too. All of them run equal models of transformers on the same
prompts and take turns. A row says whether they make the same tokens. Without GPUs, a tiny model on
CPU stand-ins only shows that the benchmark runs.

With two devices or more, ``in_flight`` generates for several groups of sequences at once. ``host``
has a part of the weights in the host's memory, on one device.

``PLACER_GENERATION_ENGINES`` names some of the engines, such as ``ours,eager``, and
``PLACER_GENERATION_ROUNDS`` the number of turns, for a short trial. ``in_flight`` or ``host`` alone
keep the other rows of earlier runs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

from .. import record
from . import host, in_flight

ROUNDS = int(os.environ.get("PLACER_GENERATION_ROUNDS", "7"))
PEER = "accelerate's dispatch_model"
ONE = "eager on one device"
HOOKS = "ours, not recorded"
COMPILED = "static cache and compile on one device"
ENGINES = {"ours": "ours", "hooks": HOOKS, "accelerate": PEER, "eager": ONE, "compiled": COMPILED}
"""The names of engines in ``PLACER_GENERATION_ENGINES``, and in the rows."""

IN_FLIGHT = "in_flight"
"""The name of the case with several groups in flight."""

HOST = "host"
"""The name of the case with weights on the host."""

CASES = {IN_FLIGHT, HOST}
"""The names of cases with engines of their own."""


def run() -> list[dict[str, Any]]:
    """Return the times of tokens, and the tokens per second of several groups in flight."""
    from ..executor import cases

    cases.prepare()
    rows = []
    asked = _asked()
    alone = CASES.issuperset(asked)
    if not alone:
        rows += _single()
    if IN_FLIGHT in asked and (not cases.on_gpus() or len(cases.places()) > 1):
        rows += in_flight.rows(ROUNDS)
    if HOST in asked:
        rows += host.rows(ROUNDS)
    if alone:
        made = {(row["case"], row["measure"]) for row in rows}
        kept = record.known("generation")
        rows = [row for row in kept if (row["case"], row["measure"]) not in made] + rows
    return rows


def _asked() -> list[str]:
    return os.environ.get("PLACER_GENERATION_ENGINES", ",".join([*ENGINES, IN_FLIGHT, HOST])).split(
        ","
    )


def _single() -> list[dict[str, Any]]:
    """Return the time of a token in the loop, of the prompt, and of the first call."""
    import torch

    from ..executor import cases

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
        engines = {name: _Engine(way, ids) for name, way in _ways(model, stack)}
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


@dataclass(frozen=True)
class _Way:
    """A model that is ready to generate.

    Attributes:
        model: the model.
        options: further options of ``generate``.
        recorded: returns the numbers of tokens through recorded passes, and of all others.
    """

    model: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    recorded: Callable[[], tuple[int, int]] | None = None


def _ways(model: Any, stack: ExitStack) -> Iterator[tuple[str, _Way]]:
    """Yield the ways to run the model; each keeps a model of its own between turns.

    A copy is split before the next one is made: six whole ones would not fit on a GPU.
    """
    from ..executor import cases

    names = {"ours", *(ENGINES[key] for key in _asked() if key not in CASES)}
    if ONE in names:
        yield ONE, _Way(model)
    # transformers compiles on GPUs only
    if COMPILED in names and cases.on_gpus():
        yield COMPILED, _Way(model, {"cache_implementation": "static"})
    for name, is_recorded in (("ours", True), (HOOKS, False)):
        if name in names:
            yield name, stack.enter_context(_ours(copy.deepcopy(model), is_recorded))
    # accelerate does not support CPU stand-ins
    if PEER in names and cases.on_gpus() and find_spec("accelerate") is not None:
        yield PEER, stack.enter_context(_dispatched(copy.deepcopy(model)))


@contextmanager
def _ours(model: Any, is_recorded: bool) -> Iterator[_Way]:
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
    with flow.applied(record=is_recorded) as applied:
        yield _Way(
            applied,
            recorded=lambda: (flow.generation_report.recorded, flow.generation_report.hooked),
        )
        if is_recorded and flow.generation_report.not_recorded_because:
            print(f"not recorded: {flow.generation_report.not_recorded_because}")
    flow.undo()


@contextmanager
def _dispatched(model: Any) -> Iterator[_Way]:
    from accelerate import dispatch_model

    yield _Way(dispatch_model(model, _map(model), main_device=0, force_hooks=True))


class _Engine:
    """The times of a model that generates, in ms.

    Args:
        way: the model, ready to generate.
        ids: the prompts.

    Attributes:
        way: the model.
        first_ms: the time of the very first call, which makes four tokens.
        prompt_ms: the time of the prompt with the first token, by turn.
        whole_ms: the time of the whole text, by turn.
        tokens: the latest text.
    """

    def __init__(self, way: _Way, ids: Any) -> None:
        self.way, self._ids = way, ids
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
            **self.way.options,
        }
        began = perf_counter()
        # copying to the host waits for the devices
        tokens = self.way.model.generate(self._ids, **options).tolist()
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
    if ours.way.recorded is not None:
        recorded, rest = ours.way.recorded()
        share = 100.0 * recorded / max(1, recorded + rest)
        yield record.row(case, "tokens after the prompt that replayed a recording", "%", share)
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
