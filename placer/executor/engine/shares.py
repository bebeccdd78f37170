"""The parts of a batch, one for each micro-batch and each pipeline, and what parts do not allow."""

from __future__ import annotations

from torch import nn

from placer.capture.layers import LayerGraph
from placer.errors import InputError
from placer.executor.engine.fill_drain import even_sizes, micro_batch_sizes
from placer.executor.state.replication import Replication


def part_sizes(replication: Replication, chunks: int, batch: int) -> list[int]:
    """Return the samples in each part of a batch.

    The parts of a micro-batch follow one another, one for each pipeline. If the batch has fewer
    samples than there are pipelines, the last pipelines get no part.

    Args:
        replication: the pipelines and their shares of a micro-batch.
        chunks: the largest number of micro-batches.
        batch: samples in the batch.
    """
    if replication.count == 1:
        return micro_batch_sizes(batch, chunks)
    for limit in range(min(chunks, batch // replication.count), 1, -1):
        sizes = micro_batch_sizes(batch, limit)
        if sizes[-1] >= replication.count:
            return [part for size in sizes for part in divided(size, replication.samples)]
    return [part for part in divided(batch, replication.samples) if part]


def call_sizes(replication: Replication, chunks: int, batch: int) -> list[int]:
    """Return the samples in each part of a batch that runs without gradients.

    Without replicas, the sizes of micro-batches differ by one at most.

    Args:
        replication: the pipelines and their shares of a micro-batch.
        chunks: wanted number of micro-batches.
        batch: samples in the batch.
    """
    if replication.count == 1:
        return even_sizes(batch, chunks)
    return part_sizes(replication, chunks, batch)


def divided(size: int, ratios: tuple[int, ...]) -> list[int]:
    """Divide the samples of a micro-batch among pipelines.

    Every pipeline gets at least one sample, as long as there are enough; the first ones come first.

    Args:
        size: the samples.
        ratios: of the pipelines' parts.
    """
    count, total = len(ratios), sum(ratios)
    if size <= count:
        return [1] * size + [0] * (count - size)
    exact = [size * ratio / total for ratio in ratios]
    parts = [max(1, int(part)) for part in exact]
    while (rest := size - sum(parts)) != 0:
        # the pipeline that is furthest from its exact part gains or gives a sample
        sign = 1 if rest > 0 else -1
        able = [one for one in range(count) if sign > 0 or parts[one] > 1]
        chosen = max(able, key=lambda one: (sign * (exact[one] - parts[one]), -one))
        parts[chosen] += sign
    return parts


def refuse_unreplicable(
    replication: Replication, graph: LayerGraph, module: nn.Module, deferred_batch_norm: bool
) -> None:
    """Raise an InputError if a model cannot be trained by several pipelines.

    Args:
        replication: the pipelines.
        graph: the layers of the model.
        module: the model.
        deferred_batch_norm: whether running statistics follow whole batches.

    Raises:
        InputError: a layer needs all samples of a micro-batch, or writes to its weights.
    """
    if replication.count == 1:
        return
    advice = "give a placement without replicas, such as suggest(..., replicas='never') returns"
    if deferred_batch_norm:
        raise InputError(
            "deferred_batch_norm does not work with replicated stages, where each replica has the "
            f"statistics of its own samples: make the flow without it, or {advice}"
        )
    for path, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise InputError(
                f"{path!r} is an nn.SyncBatchNorm, which does not see the samples of other "
                f"replicas: use nn.BatchNorm2d or another of its kind, or {advice}"
            )
    for layer in graph.layers:
        for name in layer.mutated:
            if isinstance(graph.state[name], nn.Parameter):
                raise InputError(
                    f"layer {layer.name!r} writes to its parameter {name!r} (such as an embedding "
                    "with max_norm), and the replicas of a parameter must not differ: "
                    f"{advice}"
                )
