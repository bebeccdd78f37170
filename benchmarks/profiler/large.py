"""A model that no device could hold, profiled for training on one device.

It is a Llama of 70 billion parameters on ``meta``. Profiling must never hold more than the largest
layer with its gradients, optimizer state and activations. Without GPUs a tiny model runs; its time
and memory mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch
from torch import nn

from placer import Profile, profile, zoo

from ..executor.sample import Sample, attempt
from . import cases

CASE = "llama-70b"
ENGINE = "ours"


def label() -> str:
    """Return the case's name for tables."""
    name = "tiny: Llama-like, 3 layers, fp32" if cases.is_small() else "Llama 2 70B, bf16"
    return f"{name}, on meta, training, micro-batch 1, one device"


def measure() -> Iterator[Sample]:
    """Yield the profiling time with an empty cache, and the peak memory."""
    cases.prepare()
    yield attempt(label(), ENGINE, 1, 1, _profiled)


def _profiled() -> dict[str, list[float]]:
    model, length = _model()
    place = cases.home()
    tokens = torch.zeros(1, length, dtype=torch.long)
    if place.type == "cuda":
        torch.cuda.init()  # resetting the peak does not initialise CUDA
        torch.cuda.reset_peak_memory_stats(place)
    before, began = _held(place), perf_counter()
    found = profile(model, tokens, [str(place)], optimizer="adam", progress=False, cache=False)
    seconds = perf_counter() - began
    held = torch.cuda.max_memory_allocated(place) - before if place.type == "cuda" else 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "seconds": [seconds],
        "held_bytes": [float(held)],
        "largest_bytes": [float(largest_bytes(found))],
        "parameters": [float(parameters)],
    }


def _model() -> tuple[nn.Module, int]:
    """Return the model on ``meta``, and the number of tokens in its samples."""
    with torch.device("meta"):
        if cases.is_small():
            return zoo.llama(3, 32, 2, 1, 48, 64), 16
        return zoo.llama_70b().to(torch.bfloat16), 1024


def largest_bytes(found: Profile) -> int:
    """Return the most bytes that a layer takes in training.

    They are its state, the tensors that it saves, its workspace, and its inputs and outputs.
    """
    crossing = dict.fromkeys((layer.name for layer in found.layers), 0)
    for edge in found.edges:
        for name in (edge.source, *edge.targets):
            crossing[name] += edge.bytes
    return max(
        layer.param_bytes
        + layer.grad_bytes
        + layer.optimizer_bytes
        + layer.buffer_bytes
        + layer.saved_bytes
        + max(layer.forward_workspace_bytes, layer.backward_workspace_bytes)
        + crossing[layer.name]
        for layer in found.layers
    )


def _held(place: torch.device) -> int:
    return int(torch.cuda.memory_allocated(place)) if place.type == "cuda" else 0


__all__ = ["CASE", "ENGINE", "label", "largest_bytes", "measure"]
