"""State that layers hold permanently: parameters, gradients, optimizer state and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer.capture.layers import LayerGraph, tensor_bytes
from placer.optimizers import OptimizerState
from placer.schema import TiedParameters

__all__ = ["owned_shares", "state_bytes", "ties"]


def state_bytes(
    graph: LayerGraph, training: bool, optimizer: OptimizerState
) -> dict[str, dict[str, int]]:
    """Return the bytes of each layer's state by kind.

    State shared by several layers counts in the first of them.

    Args:
        graph: the layers.
        training: whether gradients and optimizer state count.
        optimizer: the optimizer whose state counts.
    """
    # ``counted`` holds tensors, ``memory`` storages: several tensors may share one storage
    counted: set[int] = set()
    memory: set[Any] = set()
    held = {}
    for layer in graph.layers:
        own = [graph.state[name] for name in layer.state if id(graph.state[name]) not in counted]
        counted.update(id(tensor) for tensor in own)
        parameters = [tensor for tensor in own if isinstance(tensor, nn.Parameter)]
        trained = [tensor for tensor in parameters if training and tensor.requires_grad]
        held[layer.name] = {
            "param_bytes": sum(tensor_bytes(tensor, memory) for tensor in parameters),
            "grad_bytes": sum(map(_gradient_bytes, trained)),
            "optimizer_bytes": sum(optimizer.bytes(tensor) for tensor in trained),
            "buffer_bytes": sum(
                tensor_bytes(tensor, memory)
                for tensor in own
                if not isinstance(tensor, nn.Parameter)
            ),
        }
    return held


def owned_shares(graph: LayerGraph) -> dict[str, float]:
    """Return for each layer the share of its trained bytes that no earlier layer has.

    The optimizer steps a shared parameter only once.
    """
    counted: set[int] = set()
    shares = {}
    for layer in graph.layers:
        trained = [graph.state[name] for name in layer.state if graph.state[name].requires_grad]
        own = [tensor for tensor in trained if id(tensor) not in counted]
        counted.update(id(tensor) for tensor in own)
        shares[layer.name] = _total(own) / max(1, _total(trained))
    return shares


def ties(graph: LayerGraph, training: bool) -> list[TiedParameters]:
    """Return the parameters that several layers share, grouped by these layers.

    Layers that also share buffers must stay on one device, and are left out.
    """
    users: dict[Tensor, list[str]] = {}
    for layer in graph.layers:
        for tensor in dict.fromkeys(graph.state[name] for name in layer.state):
            users.setdefault(tensor, []).append(layer.name)
    together = {
        frozenset(names) for tensor, names in users.items() if not isinstance(tensor, nn.Parameter)
    }
    params: Counter[tuple[str, ...]] = Counter()
    gradients: Counter[tuple[str, ...]] = Counter()
    for tensor, names in users.items():
        if len(names) > 1 and frozenset(names) not in together:
            params[tuple(names)] += tensor_bytes(tensor)
            gradients[tuple(names)] += (
                tensor_bytes(tensor) if training and tensor.requires_grad else 0
            )
    return [
        TiedParameters(layers=names, gradient_bytes=gradients[names], param_bytes=size)
        for names, size in params.items()
    ]


def _gradient_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter's gradient.

    A wrapper's gradient is a dense tensor, whatever it wraps.
    """
    is_sparse = parameter.layout != torch.strided
    return tensor_bytes(parameter) if is_sparse else parameter.numel() * parameter.element_size()


def _total(tensors: Sequence[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)
