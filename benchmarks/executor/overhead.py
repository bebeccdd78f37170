"""The overhead of DataFlow on one device, where it gains nothing: ResNet-50 at a small batch.

The model alone runs eagerly and as CUDA graphs of its forward pass, its training step, and the step
without the optimizer. Calls and steps follow one another as in a loop, without waits; all of them
take turns.
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

from . import cases, contest, ours, timing
from .contest import Contender
from .sample import Sample

CASE = "overhead"


def measure() -> Iterator[Sample]:
    """Yield samples of the forward pass and the training step, with DataFlow and without."""
    cases.prepare()
    torch.manual_seed(0)
    with cases.home():
        model = zoo.resnet18() if cases.is_small() else zoo.resnet50()
        size = 32 if cases.is_small() else 224
        inputs = torch.randn(4 if cases.is_small() else 32, 3, size, size)
        target = torch.randint(1000, (len(inputs),))
    batch = inputs, target
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "eager forward": lambda: _forward(_of(model).eval(), inputs),
        "ours forward": lambda: _forward(_on_one(_of(model).eval()), inputs),
        "ours stream": lambda: _streamed(_on_one(_of(model).eval()), inputs),
        "eager": lambda: ours.eager(_of(model).train(), batch, functional.cross_entropy)[0],
        "ours": lambda: _train(_of(model).train(), batch),
    }
    if inputs.is_cuda:
        makers["graph forward"] = lambda: _forward(_recorded(_of(model).eval(), inputs), inputs)
        makers["graph"] = lambda: _recorded_step(_of(model).train(), batch, whole=True)
        makers["graph passes"] = lambda: _recorded_step(_of(model).train(), batch, whole=False)
    yield from contest.alternate(
        CASE, [_contender(engine, make) for engine, make in makers.items()]
    )


_of = copy.deepcopy


def _batches() -> int:
    """Return the number of batches in a stream."""
    return cases.sized(2, 20)


def _contender(engine: str, make: Callable[[], Callable[[], Any]]) -> Contender:
    made = contest.here(engine, cases.places(1), 1, contest.kept(lambda: (make(), lambda: None)))
    if engine.endswith("stream"):
        turn = made.turn
        made.turn = lambda: turn() / _batches()
    return made


def _on_one(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, [str(cases.places()[0])])
    flow.update_flow()
    return flow


def _forward(run: Callable[[Any], Any], inputs: Tensor) -> Callable[[], Any]:
    def forward() -> None:
        with torch.no_grad():
            run(inputs)

    return forward


def _streamed(flow: DataFlow, inputs: Tensor) -> Callable[[], Any]:
    """Return a function that streams ``count`` batches."""

    def run() -> None:
        with torch.no_grad():
            for _ in flow.stream([inputs] * _batches()):
                pass

    return run


def _recorded(model: nn.Module, inputs: Tensor) -> Callable[[Any], Any]:
    """Return the model as one CUDA graph, with a copy of its input into the graph's buffer."""
    static = inputs.clone()
    with torch.no_grad():
        replay, output = _graph(lambda: model(static))

    def run(given: Tensor) -> Tensor:
        static.copy_(given)
        replay()
        made: Tensor = output
        return made

    return run


def _recorded_step(
    model: nn.Module, batch: tuple[Tensor, Tensor], whole: bool
) -> Callable[[], Any]:
    """Return a training step as one CUDA graph, with a copy of the batch into its buffers.

    Args:
        model: the model.
        batch: inputs and target.
        whole: whether the graph contains the optimizer's step. Otherwise the step follows the
            graph, so that any optimizer and any learning-rate schedule work.
    """
    statics = [tensor.clone() for tensor in batch]
    optimizer = cases.sgd(model.parameters())

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

    return run


def _graph(
    work: Callable[[], Any], before: Callable[[], Any] = lambda: None
) -> tuple[Callable[[], None], Any]:
    """Return a function that replays the work, and its static result.

    The function keeps the work, because the graph reads the parameters that the work refers to.
    ``before`` is called once more before the recording.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(1 + timing.repetitions().warm_ups):
            work()
    torch.cuda.synchronize()
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()

    def replay(_kept: Callable[[], Any] = work) -> None:
        graph.replay()

    return replay, output


def _train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    optimizer = cases.sgd(model.parameters())
    return partial(_on_one(model).train_step(functional.cross_entropy, optimizer), *batch)
