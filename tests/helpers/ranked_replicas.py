"""What the tests of replicas over several processes run in every process of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import lcm
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranked import Make, gradients, micro_batches, on_node, split_step
from replicated import replicated
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from transplanted import captured_once

from placer import distributed
from placer.distributed.replicas import Pipelines, Replicas
from placer.distributed.state.gradient_sums import GradientSums
from placer.errors import PlacerError
from placer.schema import Placement


def built(
    make: Make,
    placement: Placement,
    training: bool = True,
    first: Sequence[int] = (),
    is_meta: bool = False,
    **options: Any,
) -> Any:
    """A pipeline with the batch and its target; only first replicas have the weights of seed 0.

    Args:
        make: makes the model.
        placement: its placement.
        training: whether the pipeline trains.
        first: the processes of first replicas; if empty, they have the numbers of the devices.
        is_meta: whether the model is on meta.
        options: of ``build``.
    """
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    stages = [int(name.rpartition(":")[2]) for name in placement.stages]
    if dist.get_rank() not in (first or stages):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    example = micro_batches(inputs, placement.chunks)[0]
    samples, counts = len(example), placement.replicas_by_stage
    if len(set(counts)) > 1:
        samples //= lcm(*counts)
    for members in [*placement.replicas.values()][: len(set(counts)) == 1]:
        share = members[dist.get_rank() // len(placement.replicas) % len(members)].samples
        samples = samples * share // placement.batch_size
    if is_meta:
        with mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
            model = model.to("meta")  # tied weights stay tied
    with captured_once((make, samples, training, is_meta)):
        pipeline = distributed.build(
            model.train(training), placement, example, loss_fn if training else None, **options
        )
    return pipeline, inputs, target


@contextmanager
def small_buckets() -> Iterator[Counter[bool]]:
    """Let buckets of gradients be small, and count sums in a backward pass and outside of one."""
    calls: Counter[bool] = Counter()
    is_inside = False
    backward, reduce = PipelineStage.backward_one_chunk, dist.reduce

    def noted(*args: Any, **options: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        try:
            return backward(*args, **options)
        finally:
            is_inside = False

    def counted(*args: Any, **options: Any) -> Any:
        calls[is_inside] += 1
        return reduce(*args, **options)

    with (
        mock.patch("placer.distributed.state.gradient_sums.BUCKET_BYTES", 600),
        mock.patch.object(PipelineStage, "backward_one_chunk", noted),
        mock.patch.object(dist, "reduce", counted),
    ):
        yield calls


def step(
    make: Make, placement: Placement, batches: int = 1, frozen: str = "", **options: Any
) -> dict[str, Any]:
    """Losses of some batches, whose gradients add up, and then gradients and buffers.

    Also the number of sums that began within backward passes. The owner of the parameter
    ``frozen`` freezes it first.
    """
    with small_buckets() as calls:
        pipeline, inputs, target = built(make, placement, **options)
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name != frozen)
        losses = [pipeline.step(inputs, target) for _ in range(batches)]
    return {
        "early": calls[True],
        "losses": [loss.item() for loss in losses if loss is not None],
        "gradients": gradients(pipeline),
        "buffers": {name: buffer.cpu().clone() for name, buffer in pipeline.module.named_buffers()},
        "stages": [stage.stage_index for stage in pipeline.stages],
    }


def sums_of_one_gradient() -> list[float] | None:
    """The sum, in process 3, of a gradient that only process 0 has."""
    parameter = nn.Parameter(torch.ones(2))
    sums = GradientSums([parameter], [3], [], dist.group.WORLD)
    sums.begin()
    with sums.watched():
        if dist.get_rank() == 0:
            (3 * parameter).sum().backward()
    sums.finish()
    return None if parameter.grad is None else parameter.grad.tolist()


def exchanged(bucket_bytes: int) -> list[list[float]]:
    """Tensors of several types and layouts, filled by rank, after an exchange with their owners."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    tensors = [
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.full((2, 3), rank, dtype=torch.float64).T,
        torch.empty(0),
        torch.full((5,), rank, dtype=torch.float32)[::2],
        torch.full((), rank, dtype=torch.float64).expand(1),
        torch.full((4,), rank, dtype=torch.complex64),
    ]
    replicas = Replicas(group, range(4), torch.device("cpu"))
    with mock.patch("placer.distributed.replicas.BUCKET_BYTES", bucket_bytes):
        replicas.exchange(tensors, [1, 3, 2, 1, 3, None])
    return [tensor.real.flatten().tolist() for tensor in tensors]


def on_hosts(make: Make, placement: Placement, hosts: list[str]) -> dict[str, Any]:
    """A step, where each process takes itself to be on the host of that name."""
    with on_node([sorted(set(hosts)).index(host) for host in hosts], hosts):
        return step(make, placement, first=[hosts.index(host) for host in sorted(set(hosts))])


def train(
    make: Make,
    placement: Placement,
    steps: int,
    load: str = "",
    save: str = "",
    is_meta: bool = False,
) -> dict[str, Any] | None:
    """Steps of Adam with clipping, and the whole state in the last process.

    A placement without replicas runs in process 0 alone.

    Args:
        make: makes the model.
        placement: its placement.
        steps: their number.
        load: a checkpoint to begin with; empty for none.
        save: where to write another one; empty for nowhere.
        is_meta: whether the model is on meta.
    """
    group = None if placement.replicas else dist.new_group([0])
    if group is not None and dist.get_rank():
        return None
    pipeline, inputs, target = built(make, placement, is_meta=is_meta, group=group)
    # a checkpoint has its own rate
    settings = {"lr": 0.5 if load else 0.01, "betas": (0.8, 0.9)}
    optimizer = torch.optim.Adam([{"params": list(pipeline.parameters())}], **settings)
    if load:
        pipeline.load(load, optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target)
        pipeline.clip_grad_norm_(0.1)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    if save:
        pipeline.save(save, optimizer)
    own = dict(pipeline.named_parameters())
    return {
        "losses": losses,
        "own": {name: item.detach().cpu() for name, item in own.items()},
        "with_state": [name for name, item in own.items() if item in optimizer.state],
        "states": len(optimizer.state),
        "with_gradient": {
            name
            for stage in pipeline.stages
            for name, item in stage.submod.named_parameters()
            if item.grad is not None
        },
        "state": pipeline.full_state_dict(dist.get_world_size(group) - 1),
    }


def evaluated(make: Make, placement: Placement, steps: int, is_first: bool) -> list[Any]:
    """Results of a second pipeline of the model before training and after each of some steps.

    Args:
        make: makes the model.
        placement: of both pipelines.
        steps: their number.
        is_first: whether the pipeline that evaluates is built before the other one.
    """
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = micro_batches(inputs, placement.chunks)[0]

    def built_for(training: bool) -> Any:
        return distributed.build(
            model.train(training), placement, example, loss_fn if training else None
        )

    pipelines = {
        training: built_for(training) for training in sorted((True, False), reverse=not is_first)
    }
    optimizer = torch.optim.Adam(pipelines[True].parameters(), lr=0.01)
    found = [pipelines[False](inputs)]
    for _ in range(steps):
        optimizer.zero_grad()
        pipelines[True].step(inputs, target)
        optimizer.step()
        found.append(pipelines[False](inputs))
    # without a call in between
    optimizer.zero_grad()
    pipelines[True].step(inputs, target)
    optimizer.step()
    return [*found, pipelines[False].full_state_dict(3)]


def results(make: Make, placement: Placement) -> Tensor | None:
    """What the model returns in eval mode, forwards alone."""
    pipeline, inputs, _ = built(make, placement, training=False)
    found: Tensor | None = pipeline(inputs)
    return found


def failing_unit(make: Make, placement: Placement, part: int) -> str:
    """The error of a process of the first stage whose part of that number has unknown tokens."""
    pipeline, inputs, _ = built(make, placement)
    if pipeline.is_first:
        try:
            pipeline.stage.forward_one_chunk(part, (torch.full_like(inputs[:1], 99),))
        except PlacerError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def split_into_units(*args: Any) -> dict[str, Any] | None:
    """What ``split_step`` returns, if passes are issued as for stages of unlike replicas."""
    with mock.patch.object(Pipelines, "are_shared", True):
        return split_step(*args)


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
        what: ``hook`` for a hook on a weight, ``group`` for a group of some processes, ``second``
            for a second pipeline of the model, of as many replicas as processes.
    """
    options: dict[str, Any] = {}
    if what == "group":
        group = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            return ""
        options["group"] = group
    model, *rest = make()
    try:
        pipeline, inputs, target = built(lambda: (model, *rest), placement, **options)
        if what == "second":
            built(lambda: (model, *rest), replicated(model, dist.get_world_size()))
        if what == "hook":
            for parameter in pipeline.parameters():
                parameter.register_hook(torch.neg)
        pipeline.step(inputs, target)
    except PlacerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
