"""What DataFlow costs on one device, where it has nothing to gain, beside the model alone: ResNet-50, a small batch.

The model alone runs eagerly, and as CUDA graphs: its forward pass, its training step, and that step without
the optimizer. Calls and steps follow one another as in a loop, with no wait between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, zoo

from . import cases, timing
from .sample import Sample, attempt

CASE = "overhead"
IN_A_ROW = 2 if cases.is_small() else 20


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
        ("eager", lambda: _eager(copy.deepcopy(model).train(), (inputs, target))),
        ("ours", lambda: _train(copy.deepcopy(model).train(), (inputs, target))),
    ]
    if inputs.is_cuda:
        runs.insert(1, ("graph forward", lambda: _forward(_recorded(model.eval(), inputs), inputs)))
        for engine, whole in (("graph", True), ("graph passes", False)):
            recorded = partial(_recorded_step, copy.deepcopy(model).train(), (inputs, target), whole)
            runs.append((engine, recorded))
    for engine, run in runs:
        yield attempt(CASE, engine, 1, 1, run)


def _on_one(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, [str(cases.places()[0])])
    flow.update_flow()
    return flow


def _times(step: Callable[[], Any]) -> dict[str, list[float]]:
    """Times of one of several in a row."""
    return timing.in_a_row(step, cases.places(1), IN_A_ROW)


def _each(times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {measure: [value / IN_A_ROW for value in values] for measure, values in times.items()}


def _forward(run: Callable[[Any], Any], inputs: Tensor) -> dict[str, list[float]]:
    with torch.no_grad():
        return _times(lambda: run(inputs))


def _streamed(flow: DataFlow, inputs: Tensor) -> dict[str, list[float]]:
    """Times of a batch in a stream of several."""

    def run() -> None:
        for _ in flow.stream([inputs] * IN_A_ROW):
            pass

    return _each(timing.steps(run, cases.places(1)))


def _eager(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return _times(step)


def _recorded(model: nn.Module, inputs: Tensor) -> Callable[[Any], Any]:
    """The model alone, as one CUDA graph that copies its input in."""
    static = inputs.clone()
    with torch.no_grad():
        replay, output = _graph(lambda: model(static))

    def run(given: Tensor) -> Tensor:
        static.copy_(given)
        replay()
        made: Tensor = output
        return made

    return run


def _recorded_step(model: nn.Module, batch: tuple[Tensor, Tensor], whole: bool) -> dict[str, list[float]]:
    """Times of a training step as one CUDA graph that the batch is copied into.

    Args:
        model: the model.
        batch: inputs and target.
        whole: whether the optimizer's step is recorded too; else it follows, as it can be any, with any schedule.
    """
    statics = [tensor.clone() for tensor in batch]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(statics[0]), statics[1])
        loss.backward()  # type: ignore[no-untyped-call]
        if whole:
            optimizer.step()
        return loss.detach()

    replay, _ = _graph(step, optimizer.zero_grad)

    def run() -> None:
        for static, given in zip(statics, batch, strict=True):
            static.copy_(given)
        replay()
        if not whole:
            optimizer.step()

    return _times(run)


def _graph(work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> tuple[Callable[[], None], Any]:
    """What replays the work, and the static result; ``before`` is called once more ahead of the recording."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(1 + timing.WARM_UPS):
            work()
    torch.cuda.synchronize()
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph.replay, output


def _train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = _on_one(model).train_step(functional.cross_entropy, optimizer)
    return _times(lambda: step(*batch))
