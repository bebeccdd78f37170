from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from placer.capture.layers import Layer, LayerGraph, Value
from placer.profiler.trial import Trial
from placer.schema import Profile

MakeTrial = Callable[..., Trial]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers of a few microseconds gain nothing from threads, and on a busy machine wait long for
    each other's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_trial() -> MakeTrial:
    """A layer around a function of tensors, run once forwards and, in training, once backwards."""

    def make(
        function: Callable[..., Any],
        reads: Sequence[Any],
        state: Sequence[Tensor] = (),
        training: bool = True,
        mutated_reads: Sequence[int] = (),
        device: str = "cpu:0",
    ) -> Trial:
        def run(
            device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]
        ) -> tuple[Any, ...]:
            result = function(*reads, *state)
            return result if isinstance(result, tuple) else (result,)

        names = tuple(f"read{index}" for index in range(len(reads)))
        layer = Layer("layer", ("layer",), "Test", (), (), names, ("write",), run, "signature")
        values = {
            name: Value(
                name, tuple(read.shape), read.dtype, read.nbytes, 0, read.requires_grad, "before"
            )
            for name, read in zip(names, reads, strict=True)
        }
        reads = [read.detach() for read in reads]
        trial = Trial(layer, torch.device(device), state, reads, values, training, mutated_reads)
        trial.forward()
        if training:
            trial.backward()
        return trial

    return make


@pytest.fixture
def predict_inference() -> Callable[[Profile], int]:
    """The peak of an inference on one device, without the model's state, by what a profile says, in
    bytes."""

    def predict(found: Profile) -> int:
        place = {layer.name: index for index, layer in enumerate(found.layers)}
        spans = [
            (place[edge.source], max(place[name] for name in edge.targets), edge.bytes)
            for edge in found.edges
        ]
        return max(
            sum(size for first, last, size in spans if first <= index <= last)
            + layer.forward_workspace_bytes
            for index, layer in enumerate(found.layers)
        )

    return predict


@pytest.fixture
def run_in_order() -> Callable[[LayerGraph, Tensor, torch.device], None]:
    """Runs the layers of a graph in order without gradients; a value ends after the last layer that
    reads it."""

    def run(graph: LayerGraph, x: Tensor, device: torch.device) -> None:
        values: dict[str, Any] = {graph.inputs[0]: x}
        last = {name: layer.name for layer in graph.layers for name in layer.reads}
        for layer in graph.layers:
            state = [graph.state[name] for name in layer.state]
            with torch.no_grad():
                writes = layer.function(device, state, [values[name] for name in layer.reads])
            values.update(zip(layer.writes, writes, strict=True))
            del writes
            for name in [name for name in values if last.get(name) == layer.name]:
                del values[name]

    return run
