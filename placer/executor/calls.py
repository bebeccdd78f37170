"""One call of a flow: micro-batches through the segments, or through hooks, and their results joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import InputError
from placer.executor.joining import OTHERS_OF_ONE, Kind, Output, join, output_of, refuse_sizes
from placer.executor.pipeline import run
from placer.executor.segments import MicroBatch, Segment
from placer.executor.state.statistics import BatchStatistics
from placer.graph.export import Exported
from placer.graph.layers import LayerGraph
from placer.graph.structure import Structure
from placer.warned import warn

_FEW_DIMS = 3
"""So many dimensions are looked at for the samples: no further one is where results have those."""


def call_captured(
    plans: Sequence[tuple[LayerGraph, list[Segment]]],
    parts: Sequence[Sequence[Any]],
    target: torch.device,
    deferred_batch_norm: bool,
    returned: int | None = None,
) -> list[list[Any]]:
    """Run every micro-batch through its segments.

    Args:
        plans: the graph and the segments of each (a last, smaller one may have been captured apart).
        parts: the flattened inputs of each.
        target: where results go.
        deferred_batch_norm: whether running statistics follow the whole batch.
        returned: how many of the outputs the model returns; those behind them, which it leaves in its inputs, stay
            where they were made. If None all are brought to where results go.

    Returns:
        The flattened results of each.
    """
    batches = [MicroBatch(graph.inputs, part) for (graph, _), part in zip(plans, parts, strict=True)]
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
        results.append([batch.made(name) if name in stay else batch.read(name, target) for name in graph.outputs])
    return results


@contextmanager
def calls_instead(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """A call of the module is one of something else, for a while; its ``forward`` is what it was.

    Args:
        module: any.
        call: what takes its arguments; it may run the module by its ``_call_impl``.
    """
    own, name = module.__dict__, "_compiled_call_impl"  # where ``module.compile()`` puts its own
    was = {name: own[name]} if name in own else {}
    own[name] = call
    try:
        yield
    finally:
        del own[name]
        own.update(was)


def joined_by_size(results: Sequence[list[Any]], weights: Sequence[int], structures: Sequence[Structure]) -> Any:
    """The results of micro-batches that ran through hooks, where sizes alone tell which outputs have a batch."""
    refuse_sizes(structures, weights)
    structure, outputs = structures[-1], []
    for path, parts in zip(structure.paths, zip(*results, strict=False), strict=False):  # ``join`` refuses others
        dims = [dim for dim in range(_FEW_DIMS) if all(map(partial(_is_long, dim=dim), parts, weights))]
        if 0 in dims and len(dims) > 1 and len(weights) > 1:
            warn(
                f"output {path or '(the result)'} of a micro-batch has shape {tuple(parts[0].shape)}, in which two "
                "dimensions are as long as the micro-batch; the first is taken for the samples, as the model runs "
                "through hooks and no graph tells: if it is not, call the flow with chunks=1"
            )
        outputs.append(Output(Kind.SAMPLES if 0 in dims else Kind.WHOLE))
    return structure.unflatten(join(results, outputs, weights, structure.paths))


def _is_long(leaf: Any, size: int, dim: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size


def joined(
    results: Sequence[list[Any]],
    graph: LayerGraph,
    weights: Sequence[int],
    captures: Sequence[Exported],
    whole: Exported | None = None,
) -> tuple[Any, list[Any]]:
    """The results of micro-batches that went through captured graphs, which tell what of them has a batch.

    Args:
        results: the flattened results of each.
        graph: of the first.
        weights: samples in each.
        captures: the graph of each.
        whole: that of the whole batch, where those are of one sample, in which nothing tells it from any other size.

    Returns:
        What the model returns, and the tensors that it left in its inputs.
    """
    exported = captures[0]
    if whole is not None and whole.batch_symbols:
        outputs = [output_of(name, None, whole) for name in whole.results]
        if len(outputs) != len(graph.outputs):
            raise InputError(OTHERS_OF_ONE)
    else:
        if not exported.batch_symbols:
            refuse_sizes([capture.outputs for capture in captures], weights)
        outputs = [output_of(name, graph.values.get(name), exported) for name in graph.outputs]
    structure, left = exported.outputs, exported.left
    paths = (*structure.paths, *(() if left is None else left.paths))
    leaves = join(results, outputs, weights, paths)
    return structure.unflatten(leaves), leaves[len(structure.paths) :]
