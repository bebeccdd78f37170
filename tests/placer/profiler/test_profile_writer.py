"""What a profile says where several types of device measured a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from placer import profile
from placer.capture.capture import capture_graph
from placer.optimizers import OptimizerState
from placer.profiler.measure import measure_layers
from placer.profiler.memory import LayerMemory
from placer.profiler.profile_writer import write

MIB = 2**20


@pytest.mark.covering
@pytest.mark.parametrize("field", ["recorded_workspace_bytes", "input_grad_workspace_bytes"])
@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ((50, 60), (70, 80), 70),
        ((50, 60), (0, 100), 0),
        ((90, 60), (0, 80), 90),
        ((0, 60), (0, 80), 0),
    ],
)
def test_a_workspace_that_one_type_of_device_has_not_told_apart_is_that_of_its_eager_pass(
    field: str, here: tuple[int, int], there: tuple[int, int], said: int
) -> None:
    """Each has its own, 0 where it is not told apart, and that of an eager pass; in MiB."""
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    cluster = profile(model, inputs, ["cpu"], training=True, repeats=1, progress=False).cluster
    graph, state = capture_graph(model, inputs), OptimizerState("sgd")
    rows = measure_layers(graph, [inputs], torch.device("cpu"), True, 1, lambda _: None, state)
    measured = {}
    for kind, (own, eager) in (("here", here), ("there", there)):
        sizes: dict[str, Any] = {field: own * MIB, "backward_workspace_bytes": eager * MIB}
        measured[kind] = [replace(row, memory=LayerMemory(**sizes)) for row in rows]
    written = write(graph, measured, True, state, cluster)
    assert [getattr(layer, field) for layer in written.layers] == [said * MIB] * 2
