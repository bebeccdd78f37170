"""What the tests of replicas over several processes run in every process of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranked import Make, gradients, micro_batches, on_node
from replicated import replicated
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from transplanted import captured_once

from placer import distributed
from placer.errors import PlacerError
from placer.schema import Placement


def built(
    make: Make,
    placement: Placement,
    training: bool = True,
    first: Sequence[int] = (),
    **options: Any,
) -> Any:
    """A pipeline with the batch and its target; only pipeline 0 has the weights of seed 0.

    Args:
        make: makes the model.
        placement: its placement.
        training: whether the pipeline trains.
        first: the processes of pipeline 0; those with the lowest ranks if empty.
        options: of ``build``.
    """
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    if dist.get_rank() not in (first or range(len(placement.replicas))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    example = micro_batches(inputs, placement.chunks)[0]
    members = next(iter(placement.replicas.values()))
    share = members[dist.get_rank() // len(placement.replicas) % len(members)].samples
    samples = len(example) * share // placement.batch_size
    with captured_once((make, samples, training)):
        pipeline = distributed.build(
            model.train(training), placement, example, loss_fn if training else None, **options
        )
    return pipeline, inputs, target


@contextmanager
def small_buckets() -> Iterator[Counter[bool]]:
    """Let buckets of gradients be small, and count sums in a backward pass and outside of one."""
    calls: Counter[bool] = Counter()
    is_inside = False
    backward, all_reduce = PipelineStage.backward_one_chunk, dist.all_reduce

    def noted(*args: Any, **options: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return backward(*args, **options)
        finally:
            is_inside = False

    def counted(*args: Any, **options: Any) -> Any:
        calls[is_inside] += 1
        return all_reduce(*args, **options)

    with (
        mock.patch("placer.distributed.state.gradient_sums.BUCKET_BYTES", 600),
        mock.patch.object(PipelineStage, "backward_one_chunk", noted),
        mock.patch.object(dist, "all_reduce", counted),
    ):
        yield calls


def step(make: Make, placement: Placement, batches: int = 1, **options: Any) -> dict[str, Any]:
    """Losses of some batches, whose gradients add up, and then gradients and buffers.

    Also the number of sums that began within backward passes.
    """
    with small_buckets() as calls:
        pipeline, inputs, target = built(make, placement, **options)
        losses = [pipeline.step(inputs, target) for _ in range(batches)]
    return {
        "early": calls[True],
        "losses": [loss.item() for loss in losses if loss is not None],
        "gradients": gradients(pipeline),
        "buffers": {name: buffer.cpu().clone() for name, buffer in pipeline.module.named_buffers()},
        "stages": [stage.stage_index for stage in pipeline.stages],
    }


def on_hosts(make: Make, placement: Placement, hosts: list[str]) -> dict[str, Any]:
    """A step, where each process takes itself to be on the host of that name."""
    with on_node([sorted(set(hosts)).index(host) for host in hosts], hosts):
        return step(make, placement, first=[hosts.index(host) for host in sorted(set(hosts))])


def train(
    make: Make, placement: Placement, steps: int, max_norm: float, path: str, rank: int
) -> dict[str, Any]:
    """Steps of SGD with momentum and clipping, a checkpoint, and the whole state in one process."""
    pipeline, inputs, target = built(make, placement)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target)
        pipeline.clip_grad_norm_(max_norm)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    pipeline.save(path, optimizer)
    own = {name: item.detach().cpu() for name, item in pipeline.named_parameters()}
    return {"losses": losses, "own": own, "state": pipeline.full_state_dict(rank)}


def train_on(
    make: Make, placement: Placement, steps: int, max_norm: float, path: str
) -> list[float]:
    """Further steps from a checkpoint, with other replicas."""
    pipeline, inputs, target = built(make, placement)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5, momentum=0.9)
    pipeline.load(path, optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target)
        pipeline.clip_grad_norm_(max_norm)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return losses


def results(make: Make, placement: Placement) -> Tensor | None:
    """What the model returns in eval mode, forwards alone."""
    pipeline, inputs, _ = built(make, placement, training=False)
    found: Tensor | None = pipeline(inputs)
    return found


def seeds(make: Make, count: int) -> int:
    """The seed of this process's GPU after two steps, where all were seeded alike."""
    placement = replicated(make()[0], count, kind="cuda")
    pipeline, inputs, target = built(make, placement)
    torch.manual_seed(7)
    for _ in range(2):
        pipeline.step(inputs, target)
    return torch.cuda.initial_seed()


def refusal(make: Make, placement: Placement, what: str = "") -> str:
    """The error of a build or a step that every process refuses.

    Args:
        make: makes the model.
        placement: its placement.
        what: ``hook`` for a hook on a weight, ``group`` for a group of some processes.
    """
    options: dict[str, Any] = {}
    if what == "group":
        group = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            return ""
        options["group"] = group
    try:
        pipeline, inputs, target = built(make, placement, **options)
        if what == "hook":
            for parameter in pipeline.parameters():
                parameter.register_hook(torch.neg)
        pipeline.step(inputs, target)
    except PlacerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
