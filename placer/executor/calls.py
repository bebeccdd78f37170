"""One call of a flow: micro-batches through the segments or hooks, and their joined results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from placer.capture.export.export import Exported
from placer.capture.layers import LayerGraph
from placer.executor.engine.fill_drain import run
from placer.executor.output_joining import Joining, join
from placer.executor.segments import MicroBatch, Segment
from placer.executor.state.batch_statistics import BatchStatistics


def call_captured(
    plans: Sequence[tuple[LayerGraph, list[Segment]]],
    parts: Sequence[Sequence[Any]],
    target: torch.device,
    deferred_batch_norm: bool,
    returned: int | None = None,
) -> list[list[Any]]:
    """Run every micro-batch through its segments.

    Args:
        plans: the graph and the segments of each micro-batch (a last, smaller one may have been
            captured apart).
        parts: the flattened inputs of each.
        target: the device of the results.
        deferred_batch_norm: whether running statistics follow the whole batch.
        returned: how many of the outputs the model returns. The outputs behind them, which it
            leaves in its inputs, stay where they were made. None to bring all of them to
            ``target``.

    Returns:
        The flattened results of each.
    """
    batches = [
        MicroBatch(graph.inputs, part) for (graph, _), part in zip(plans, parts, strict=True)
    ]
    pipeline = [segments for _, segments in plans]
    if deferred_batch_norm and len(parts) > 1:
        statistics = BatchStatistics(plans[0][0].state)
        run(pipeline, batches, statistics.gather)
        statistics.commit()
    else:
        run(pipeline, batches)
    results = []
    for (graph, _), batch in zip(plans, batches, strict=True):
        stay = set() if returned is None else {*graph.outputs[returned:]}
        results.append(
            [
                batch.made(name) if name in stay else batch.read(name, target)
                for name in graph.outputs
            ]
        )
    return results


@contextmanager
def calls_instead(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Replace the calls of a module for a while; its ``forward`` stays what it was.

    Args:
        module: any.
        call: takes the arguments of a call; it may run the module by its ``_call_impl``.
    """
    # ``module.compile()`` puts its own replacement of calls there, too
    own, name = module.__dict__, "_compiled_call_impl"
    was = {name: own[name]} if name in own else {}
    own[name] = call
    try:
        yield
    finally:
        del own[name]
        own.update(was)


def joined(
    results: Sequence[list[Any]],
    captures: Sequence[Exported],
    sizes: Sequence[int],
    joining: Joining,
    weights: Sequence[float] | None = None,
) -> tuple[Any, list[Any]]:
    """Join the results of micro-batches that went through captured graphs.

    Args:
        results: the flattened results of each.
        captures: the graph of each.
        sizes: samples in each.
        joining: how results are joined.
        weights: of each in a mean; ``sizes`` if None.

    Returns:
        The model's result, and the tensors that it left in its inputs.
    """
    nests, left = [], []
    for leaves, exported in zip(results, captures, strict=True):
        count = len(exported.outputs.paths)
        nests.append(exported.outputs.unflatten(leaves[:count]))
        left.append(leaves[count:])
    return join(nests, sizes, joining, weights), join(
        left, sizes, Joining(dim=joining.dim), weights
    )
