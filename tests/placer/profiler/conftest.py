from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from placer.graph.layers import Layer, Value
from placer.profiler.trial import Trial

MakeTrial = Callable[..., Trial]


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
        def run(device: torch.device, state: Sequence[Tensor], reads: Sequence[Any]) -> tuple[Any, ...]:
            result = function(*reads, *state)
            return result if isinstance(result, tuple) else (result,)

        names = tuple(f"read{index}" for index in range(len(reads)))
        layer = Layer("layer", ("layer",), "Test", (), (), names, ("write",), run, "signature")
        values = {
            name: Value(name, tuple(read.shape), read.dtype, read.nbytes, 0, read.requires_grad, "before")
            for name, read in zip(names, reads, strict=True)
        }
        reads = [read.detach() for read in reads]
        trial = Trial(layer, torch.device(device), state, reads, values, training, mutated_reads)
        trial.forward()
        if training:
            trial.backward()
        return trial

    return make
