"""Models that no device could hold: what is held while they are profiled, tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer.capture import LayerGraph
from placer.capture.capture import capture_graph
from placer.optimizers import OptimizerState
from placer.profiler.measure import measure_layers
from placer.profiler.profile import profile

CPU = torch.device("cpu", 0)
BLOCKS = 1
"""The depth of modules at which a row's blocks are."""


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors on the CPU that lived at one time, of those made inside."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.held = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._before:
            return

        def end(_: Any) -> None:
            self.held -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, end)
        self.held += size
        self.most = max(self.most, self.held)


def _row(blocks: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 160), nn.SiLU(), nn.Linear(160, 64, bias=False)
        )

    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(70, 64), *(block() for _ in range(blocks)), nn.Linear(64, 70)
        )


TOKENS = torch.zeros(2, 16, dtype=torch.long)


@cache
def _captured(layers: int) -> LayerGraph:
    return capture_graph(_row(layers), TOKENS, granularity=BLOCKS)


def _most_held(layers: int, training: bool) -> int:
    optimizer = OptimizerState("adam") if training else None
    with _Held() as held:
        measure_layers(_captured(layers), [TOKENS], CPU, training, 1, lambda _: None, optimizer)
    return held.most


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("training", [True, False])
def test_what_is_held_does_not_grow_with_the_depth_of_the_model(training: bool) -> None:
    assert _most_held(4, training) == _most_held(2, training)


def test_no_more_is_held_than_the_largest_layer_with_its_training_state_and_activations() -> None:
    found = profile(
        _row(2),
        TOKENS,
        [CPU],
        progress=False,
        repeats=1,
        granularity=BLOCKS,
    )
    bounds = []
    for layer in found.layers:
        state = layer.param_bytes + layer.grad_bytes + layer.optimizer_bytes + layer.buffer_bytes
        crossing = sum(
            edge.bytes for edge in found.edges if layer.name in (edge.source, *edge.targets)
        )
        passes = max(layer.forward_workspace_bytes, layer.backward_workspace_bytes)
        bounds.append(
            state + layer.saved_bytes + passes + 3 * crossing
        )  # the model's, the layer's copies, and gradients
    assert _most_held(2, training=True) <= max(bounds)


def test_blocks_that_are_alike_are_measured_once() -> None:
    told: list[str] = []
    graph = _captured(4)
    measure_layers(graph, [TOKENS], CPU, True, 1, told.append)
    assert len(graph.layers) > 4
    assert len(told) == len({layer.signature for layer in graph.layers}) < len(graph.layers)


def test_weights_on_the_host_are_brought_layer_by_layer() -> None:
    """As those on meta: a model that a device could not hold is on the host."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    inputs = torch.randn(2, 64)
    graph = capture_graph(model, inputs, granularity="fine")
    with _Held(model.parameters()) as held:
        measure_layers(graph, [inputs], CPU, True, 1, lambda _: None, OptimizerState("adam"))
    assert held.most < sum(parameter.nbytes for parameter in model.parameters()) / 2
