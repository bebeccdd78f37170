"""What DataFlow costs on one device, where it has nothing to gain: ResNet-50, a small batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from placer import DataFlow, zoo

from . import cases, ours, timing
from .sample import Sample, attempt

CASE = "overhead"
STREAMED = 4 if not torch.cuda.is_available() else 50


def measure() -> Iterator[Sample]:
    """Forward and training step, with DataFlow and without."""
    cases.prepare()
    torch.manual_seed(0)
    with cases.home():
        model = zoo.resnet18() if cases.is_small() else zoo.resnet50()
        size = 32 if cases.is_small() else 224
        inputs = torch.randn(4 if cases.is_small() else 32, 3, size, size)
        target = torch.randint(1000, (len(inputs),))
    runs: list[tuple[str, Callable[[], dict[str, list[float]]]]] = [
        ("eager forward", lambda: _forward(model.eval(), inputs)),
        ("ours forward", lambda: _forward(_on_one(model.eval()), inputs)),
        ("ours stream", lambda: _streamed(_on_one(model.eval()), inputs)),
        ("eager", lambda: ours.eager(copy.deepcopy(model).train(), (inputs, target), functional.cross_entropy)),
        ("ours", lambda: _train(copy.deepcopy(model).train(), (inputs, target))),
    ]
    if inputs.is_cuda:
        runs.append(("graph forward", lambda: _forward(_recorded(model.eval(), inputs), inputs)))
    for engine, run in runs:
        yield attempt(CASE, engine, 1, 1, run)


def _on_one(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, [str(cases.places()[0])])
    flow.update_flow()
    return flow


def _forward(run: Callable[[Any], Any], inputs: torch.Tensor) -> dict[str, list[float]]:
    with torch.no_grad():
        return timing.steps(lambda: run(inputs), cases.places(1), 3 * timing.REPEATS)


def _streamed(flow: DataFlow, inputs: torch.Tensor) -> dict[str, list[float]]:
    """Times of a batch in a stream of several."""

    def run() -> None:
        for _ in flow.stream([inputs] * STREAMED):
            pass

    times = timing.steps(run, cases.places(1), timing.REPEATS)
    return {measure: [value / STREAMED for value in values] for measure, values in times.items()}


def _recorded(model: nn.Module, inputs: torch.Tensor) -> Callable[[Any], Any]:
    """The model alone, as one CUDA graph that copies its input in."""
    static = inputs.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(timing.WARM_UPS):
            model(static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(static)

    def run(given: torch.Tensor) -> torch.Tensor:
        static.copy_(given)
        graph.replay()
        made: torch.Tensor = output
        return made

    return run


def _train(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = _on_one(model).train_step(functional.cross_entropy, optimizer)
    return timing.steps(lambda: step(*batch), cases.places(1))
