"""What the tests of placer.distributed run in every process of a pool; functions here travel by
name."""

from __future__ import annotations

import gc
import os
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transplanted import captured_once

import placer
from placer import BatchOptions, devices, distributed
from placer.capture.pytrees import flatten
from placer.errors import InputError
from placer.profiler.remote.gather import gather_profile
from placer.schema import PlacementRequest

Make = Callable[[], tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]]
"""Makes a model, a batch, its target and the loss; the same in every process."""


def micro_batches(inputs: Any, chunks: int) -> list[Any]:
    """The batch in equal parts along the first dimension of every tensor that has as many samples
    as the first."""
    leaves, structure = flatten(inputs)
    size = leaves[0].shape[0]
    parts = [leaf.chunk(chunks) if leaf.shape[0] == size else [leaf] * chunks for leaf in leaves]
    return [structure.unflatten(part) for part in zip(*parts, strict=True)]


def unsplit_pass(
    model: nn.Module, inputs: Any, target: Any, loss_fn: Callable[[Any, Any], Tensor], chunks: int
) -> float:
    """The loss of a batch through the unsplit model, micro-batch by micro-batch; gradients are
    added up."""
    total = 0.0
    for part, goal in zip(
        micro_batches(inputs, chunks), micro_batches(target, chunks), strict=True
    ):
        loss = loss_fn(call(model, part), goal) / chunks
        loss.backward()
        total += loss.item()
    return total


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def unsplit_step(
    make: Make, chunks: int, batches: int = 1
) -> tuple[list[float], dict[str, Any], dict[str, Tensor]]:
    """Losses, gradients and buffers of the unsplit model over the same micro-batches."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    losses = []
    for _ in range(batches):
        losses.append(unsplit_pass(model, inputs, target, loss_fn, chunks))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def split_step(
    make: Make,
    places: Mapping[str, str],
    chunks: int,
    schedule: str,
    batches: int = 1,
    ranks: list[int] | None = None,
    recompute: tuple[str, ...] = (),
    verify: bool = True,
) -> dict[str, Any] | None:
    """This process's part of the same: its losses, gradients and buffers; None where it is none of
    ``ranks``."""
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
    if not verify:
        options["batch_options"] = BatchOptions(verify=False)
    pipeline, inputs, target, _ = built(make, places, chunks, group, **options)
    losses = []
    for _ in range(batches):
        loss = pipeline.step(
            inputs if pipeline.is_first else None, target if pipeline.is_last else None
        )
        if loss is not None:
            losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": gradients(pipeline),
        "buffers": {name: buffer.cpu().clone() for name, buffer in pipeline.module.named_buffers()},
        "stages": [stage.stage_index for stage in pipeline.stages],
        "schedule": type(pipeline.schedule).__name__,
    }


def split_step_held_to_its_layout(*args: Any) -> dict[str, Any] | None:
    """Do the same while the library checks strides of all transfers, as some versions always do."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return split_step(*args)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def gradients(pipeline: Any) -> dict[str, Tensor | None]:
    """This process's gradients by name, on the CPU."""
    return {
        name: None if parameter.grad is None else parameter.grad.cpu()
        for name, parameter in pipeline.named_parameters()
    }


def joined(parts: list[dict[str, Any] | None], what: str) -> dict[str, Any]:
    """One of the parts' tables over all processes, which must not overlap."""
    result: dict[str, Any] = {}
    for part in parts:
        if part is not None:
            assert not result.keys() & part[what].keys()
            result |= part[what]
    return result


def built(
    make: Make, places: Mapping[str, str], chunks: int, group: Any = None, **options: Any
) -> tuple[Any, ...]:
    """A pipeline, the batch, its target and the loss."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = micro_batches(inputs, chunks)[0]
    with captured_once((make, chunks)):
        pipeline = distributed.build(
            model, places, example, loss_fn, chunks=chunks, group=group, **options
        )
    return pipeline, inputs, target, loss_fn


def train(
    make: Make, places: Mapping[str, str], chunks: int, steps: int, path: str = ""
) -> dict[str, Any]:
    """Some steps of SGD with momentum, and a checkpoint after them; losses, and the whole state in
    process 0."""
    pipeline, inputs, target, _ = built(make, places, chunks, schedule="zero-bubble")
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    if path:
        pipeline.save(path, optimizer)
    return {"losses": losses, "state": pipeline.full_state_dict()}


def train_on(
    make: Make, places: Mapping[str, str], chunks: int, steps: int, path: str
) -> list[float] | None:
    """The same, on as many processes as devices, from a checkpoint, into a model with other
    weights."""
    ranks = list(range(len(set(places.values()))))
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    pipeline, inputs, target, _ = built(make, places, chunks, group)
    for parameter in pipeline.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    pipeline.load(path, optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return losses


def unsplit_training(make: Make, chunks: int, steps: int) -> tuple[list[float], nn.Module]:
    """The unsplit model, trained like that."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(unsplit_pass(model, inputs, target, loss_fn, chunks))
        optimizer.step()
    return losses, model


def placed_step(make: Make, placement: Any) -> dict[str, Any]:
    """A step as a solved placement says: its schedule, its micro-batches."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    with captured_once((make, placement.chunks)):
        pipeline = distributed.build(
            model, placement, micro_batches(inputs, placement.chunks)[0], loss_fn
        )
    loss = pipeline.step(inputs, target)
    return {
        "losses": [] if loss is None else [loss.item()],
        "gradients": gradients(pipeline),
        "stages": [stage.stage_index for stage in pipeline.stages],
        "schedule": type(pipeline.schedule).__name__,
    }


def results(make: Make, places: Mapping[str, str], chunks: int, times: int = 1) -> list[Any]:
    """What the model returns in eval mode, forwards alone."""
    torch.manual_seed(0)
    model, inputs, _, _ = make()
    with captured_once((make, chunks, "eval")):
        pipeline = distributed.build(
            model.eval(), places, micro_batches(inputs, chunks)[0], chunks=chunks
        )
    found = [pipeline(inputs if pipeline.is_first else None) for _ in range(times)]
    return [None if outputs is None else outputs.cpu() for outputs in found]


def from_meta(
    make: Make, places: Mapping[str, str], chunks: int, state: dict[str, Tensor]
) -> tuple[str, float | None]:
    """The error of a model on meta before it is loaded, and its loss afterwards."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    pipeline = distributed.build(
        model.to("meta"), places, micro_batches(inputs, chunks)[0], loss_fn, chunks=chunks
    )
    try:
        pipeline.step(inputs, target)
    except InputError as error:
        message = str(error)
    pipeline.load_state_dict(state)
    loss = pipeline.step(inputs, target)
    return message, None if loss is None else loss.item()


def clipped(
    make: Make, places: Mapping[str, str], chunks: int, max_norm: float
) -> tuple[float, dict[str, Tensor]]:
    """The norm, and the gradients after they were clipped."""
    pipeline, inputs, target, _ = built(make, places, chunks)
    pipeline.step(inputs, target)
    norm = pipeline.clip_grad_norm_(max_norm).item()
    return norm, gradients(pipeline)


def left_over(make: Make, places: Mapping[str, str]) -> dict[str, list[str]]:
    """Which parameters live on once the user lets go of the model, and which of them belong to this
    process."""
    model, inputs, _, loss_fn = make()
    alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    pipeline = distributed.build(model, places, inputs, loss_fn)
    del model
    gc.collect()
    own = [name for name, parameter in pipeline.named_parameters() if alive[name]() is parameter]
    return {
        "alive": [name for name, parameter in alive.items() if parameter() is not None],
        "own": own,
    }


@contextmanager
def on_node(nodes: list[int], hosts: list[str]) -> Iterator[None]:
    """Tell this process that it is on that node, of that name."""
    rank = dist.get_rank()
    name, devices.host_name = devices.host_name, lambda: hosts[rank]
    os.environ |= {
        "GROUP_RANK": str(nodes[rank]),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
    }
    try:
        yield
    finally:
        devices.host_name = name
        os.environ["LOCAL_RANK"] = str(rank)
        del os.environ["GROUP_RANK"]


def on_hosts(
    make: Make, places: Mapping[str, str], nodes: list[int], hosts: list[str]
) -> tuple[str, float | None]:
    """A step, where each process is told to be on that node of that name; its parameters, and the
    loss."""
    with on_node(nodes, hosts):
        pipeline, inputs, target, _ = built(make, places, 4)
        loss = pipeline.step(inputs, target)
    return ",".join(
        name for name, _ in pipeline.named_parameters()
    ), None if loss is None else loss.item()


def from_profile_to_step(
    make: Make, nodes: list[int], hosts: list[str], pinned: dict[str, str]
) -> dict[str, Any]:
    """Profiles of every host gathered, one placement solved for all of them, and a step on it."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = micro_batches(inputs, 4)[0]
    with on_node(nodes, hosts):
        profile = gather_profile(
            lambda: placer.profile(
                model,
                example,
                ["cpu:0", "cpu:1"],
                granularity="submodule",
                training=True,
                cache=False,
                progress=False,
            )
        )
        request = PlacementRequest(
            profile=profile, chunks=4, constraints=placer.Constraints(pinned=pinned)
        )
        solved = [placer.solve(request) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(solved)
        pipeline = distributed.build(model, solved[0], example, loss_fn)
        loss = pipeline.step(inputs, target)
    return {
        "losses": [] if loss is None else [loss.item()],
        "gradients": gradients(pipeline),
        "owner": {name: hosts[dist.get_rank()] for name, _ in pipeline.named_parameters()},
        "links": len(profile.cluster.links),
    }


def refusal(make: Make, places: Any, options: dict[str, Any]) -> str:
    """The error of a build that every process refuses."""
    if options.get("group") == "mesh":
        options = {
            "group": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        }
    try:
        built(make, places, 2, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def different_models() -> str:
    """The error of processes that do not have the same model."""
    width = 6 + dist.get_rank() // 3
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 6))
    try:
        distributed.build(
            model, {str(index): f"cpu:{index}" for index in range(4)}, torch.randn(2, 6)
        )
    except InputError as error:
        return str(error)
    return "nothing was refused"


def epoch(make: Make, places: Mapping[str, str], sizes: list[int]) -> dict[str, Any]:
    """Batches of those sizes in two micro-batches, each size on a pipeline of its own, of one
    model; its state."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    pipelines = {
        size: distributed.build(
            model, places, UserDict(tokens=inputs[: size // 2]), loss_fn, chunks=2
        )
        for size in dict.fromkeys(sizes)
    }
    optimizer = torch.optim.SGD(next(iter(pipelines.values())).parameters(), lr=0.1, momentum=0.9)
    for size in sizes:
        optimizer.zero_grad()
        pipelines[size].step(UserDict(tokens=inputs[:size]), target[:size])
        optimizer.step()
    return {
        "state": {
            name: item.detach().cpu() for name, item in pipelines[sizes[0]].named_parameters()
        }
    }


def keywords_in_another_order(make: Make, places: Mapping[str, str]) -> bool | None:
    """Whether results are the same where the keyword arguments come in another order than the
    example's."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    torch.manual_seed(0)
    model, (x, weights), *_ = make()
    pipeline = distributed.build(model.eval(), places, {"x": x, "weights": weights}, group=group)
    found = [
        pipeline(batch) for batch in ({"x": x, "weights": weights}, {"weights": weights, "x": x})
    ]
    return not pipeline.is_last or torch.equal(*found)


def evaluated(make: Make, places: Mapping[str, str], steps: int) -> list[Any]:
    """What the model returns in eval mode before, and after each of some steps, by a second
    pipeline of the model."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = inputs[: len(inputs) // 2]
    with captured_once((make, 2)):
        training = distributed.build(model.train(), places, example, loss_fn, chunks=2)
    with captured_once((make, 2, "eval")):
        evaluation = distributed.build(model.eval(), places, example, chunks=2)
    optimizer = torch.optim.SGD(training.parameters(), lr=0.1)
    found = [evaluation(inputs)]
    for _ in range(steps):
        optimizer.zero_grad()
        training.step(inputs, target)
        optimizer.step()
        found.append(evaluation(inputs))
    return found


def outside_of_the_group(make: Make, places: Mapping[str, str]) -> str:
    """The error of a process that is none of the pipeline's."""
    group = dist.new_group([0, 1])
    try:
        built(make, places, 2, group)
    except InputError as error:
        return str(error)
    return ""


def different_chunks(make: Make, places: Mapping[str, str]) -> str:
    """Return the error of processes that cut a batch differently, which would wait forever."""
    try:
        built(make, places, 2 if dist.get_rank() else 4)
    except InputError as error:
        return str(error)
    return "nothing was refused"


def step_refusals(make: Make, places: Mapping[str, str]) -> dict[str, str]:
    """The errors of batches that do not fit, in the processes that are given them; no other process
    waits for them."""
    pipeline, inputs, target, _ = built(make, places, 2)
    wrong = {
        "nothing": (None, None),
        "too small": (inputs[:4], target[:4]),
        "nested": ({"x": inputs}, (target[:2],)),
        "other type": (inputs.float(), None),
    }
    found = {}
    for name, (batch, goal) in wrong.items():
        if pipeline.is_first or (pipeline.is_last and goal is not None):
            try:
                pipeline.step(batch, goal)
            except InputError as error:
                found[name] = str(error)
    return found


def autocast_step(make: Make, places: Mapping[str, str], chunks: int) -> dict[str, Any]:
    """A step in float32 under autocast to bfloat16."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    inputs = inputs.float()
    pipeline = distributed.build(
        model.float(), places, micro_batches(inputs, chunks)[0], loss_fn, chunks=chunks
    )
    with torch.autocast("cpu", torch.bfloat16):
        pipeline.step(inputs, target)
    return {"gradients": gradients(pipeline)}
