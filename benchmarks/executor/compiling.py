"""What ``train_step(compile=True)`` gains over the same step without it: a GPT, half of it on each of two devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, zoo

from . import cases, timing
from .sample import Sample, attempt

CASE = "compile"
DEVICES = 2
CHUNKS = 4


def measure() -> Iterator[Sample]:
    """The step on two devices without and with the compiler."""
    cases.prepare()
    if len(cases.places()) < DEVICES:
        yield Sample(CASE, "ours", DEVICES, 0, failed=f"there are fewer than {DEVICES} devices")
        return
    for engine in ("ours", "compiled"):
        yield attempt(CASE, engine, DEVICES, CHUNKS, partial(_steps, engine == "compiled"))


def _steps(compiles: bool) -> dict[str, list[float]]:
    model, (tokens, target) = _model(), _batch()
    flow = DataFlow(model, [str(place) for place in cases.places(DEVICES)], fine_grained=True)
    flow.layer_gpus.update(_halves(flow.layer_gpus))
    flow.update_flow()
    backend: Any = (True if cases.on_gpus() else "aot_eager") if compiles else False
    step = flow.train_step(cases.token_loss, torch.optim.SGD(flow.parameters(), lr=1e-3), compile=backend)
    losses = [step(tokens, target, chunks=CHUNKS).item()]
    for place, why in step.not_compiled_because.items():
        print(f"{place} is not compiled: {why}", flush=True)
    for place, gain in step.compiled.items():
        print(f"{place} is compiled: {gain}", flush=True)
    values = timing.steps(lambda: step(tokens, target, chunks=CHUNKS), cases.places(DEVICES))
    counts = {"segments": [float(DEVICES)], "compiled_segments": [float(len(step.compiled))]}
    return values | counts | {"loss": losses}


def _model() -> nn.Module:
    torch.manual_seed(0)
    with cases.home():
        model = zoo.gpt(2, 32, 2, 16, 64) if cases.is_small() else zoo.gpt(8, 2048, 16, 1024, 50304)
    return model if cases.is_small() else model.to(torch.bfloat16)


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with cases.home():
        tokens = torch.randint(64, (8, 16)) if cases.is_small() else torch.randint(50304, (16, 1024))
    return tokens, tokens.roll(-1, dims=1)


def _halves(layers: Mapping[str, Any]) -> dict[str, int]:
    """The embeddings and half of the blocks on the first device, the rest on the second."""
    blocks = 1 + max(int(name.split(".")[1]) for name in layers if name.startswith("blocks."))

    def half(name: str) -> int:
        if name.startswith("blocks."):
            return int(2 * int(name.split(".")[1]) >= blocks)
        return int(name.startswith(("norm", "head")))

    return {name: half(name) for name in layers}
