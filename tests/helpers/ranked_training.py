"""Training, checkpoints and failures of placer.distributed, as the processes of a pool run them;
sent by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from ranked import Make, built, gradients, micro_batches, unsplit_pass
from refused import told
from torch import Tensor, nn
from transplanted import captured_once
from weight_kinds import Scaled

from placer import DataFlow, distributed
from placer.distributed import Pipeline

OPTIMIZERS: Mapping[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.05, weight_decay=0.1, fused=True
    ),
    "foreach": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.05, weight_decay=0.1, foreach=True
    ),
}


def optimizer_of(pipeline: Pipeline, kind: str) -> torch.optim.Optimizer:
    """One over this process's parameters, of which there may be none."""
    return OPTIMIZERS[kind]([{"params": list(pipeline.parameters())}])


def optimizers_of(pipeline: Pipeline, kinds: str) -> list[torch.optim.Optimizer]:
    """The optimizer of a kind; of two kinds (``"adamw+sgd"``) one for matrices, and one for the
    other parameters."""
    first, _, second = kinds.partition("+")
    if not second:
        return [optimizer_of(pipeline, first)]
    halves = [
        [one for one in pipeline.parameters() if (one.dim() > 1) is matrices]
        for matrices in (True, False)
    ]
    return [
        OPTIMIZERS[kind]([{"params": half}])
        for kind, half in zip((first, second), halves, strict=True)
    ]


def members(places: Mapping[str, str]) -> dist.ProcessGroup | None:
    """The group of as many processes as there are devices; None in the others."""
    ranks = list(range(len(set(places.values()))))
    group = dist.new_group(ranks)
    return group if dist.get_rank() in ranks else None  # type: ignore[return-value]


def targets_of(target: Tensor, steps: int) -> list[Tensor]:
    """A target for each step; the second is large."""
    return [target + 1000 if step == 1 else target for step in range(steps)]


def unsplit_steps(make: Make, chunks: int, kind: str, steps: int) -> dict[str, Any]:
    """Return the unsplit model's losses, first gradients and parameters after all steps."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    for goal in targets_of(target, steps):
        optimizer.zero_grad()
        losses.append(unsplit_pass(model, inputs, goal, loss_fn, chunks))
        first = first or {name: copy.deepcopy(item.grad) for name, item in model.named_parameters()}
        optimizer.step()
    return {"losses": losses, "gradients": first, "parameters": _values(model)}


def split_steps(
    make: Make,
    places: Mapping[str, str],
    chunks: int,
    kind: str,
    steps: int,
    schedule: str,
    recompute: tuple[str, ...],
) -> dict[str, Any] | None:
    """This process's part of the same."""
    group = members(places)
    if group is None:
        return None
    pipeline, inputs, target, _ = built(
        make, places, chunks, group, schedule=schedule, recompute=recompute
    )
    optimizer = optimizer_of(pipeline, kind)
    losses: list[float] = []
    first: dict[str, Tensor | None] | None = None
    for goal in targets_of(target, steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, goal)
        losses += [] if loss is None else [loss.item()]
        first = copy.deepcopy(gradients(pipeline)) if first is None else first
        optimizer.step()
    return {"losses": losses, "gradients": first, "parameters": _values(pipeline.module)}


def resumed(
    make: Make, places: Mapping[str, str], others: Mapping[str, str], kind: str, path: str
) -> Any:
    """Losses of two more steps after two: of the pipeline that took them, and of one elsewhere,
    from a checkpoint."""
    group, second = members(places), members(others)
    found: list[list[float]] = [[], []]
    if group is not None:
        pipeline, inputs, target, _ = built(make, places, 2, group)
        optimizers = optimizers_of(pipeline, kind)
        _steps(pipeline, optimizers, inputs, target)
        pipeline.save(path, optimizers)
        found[0] = _steps(pipeline, optimizers, inputs, target)
    dist.barrier()
    if second is not None:
        pipeline, inputs, target, _ = built(make, others, 2, second)
        for parameter in pipeline.parameters():
            nn.init.constant_(parameter, 0.5)
        optimizers = optimizers_of(pipeline, kind)
        pipeline.load(path, optimizers)
        found[1] = _steps(pipeline, optimizers, inputs, target)
    return found


def _steps(
    pipeline: Pipeline, optimizers: list[torch.optim.Optimizer], inputs: Any, target: Any
) -> list[float]:
    losses = []
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pipeline.step(inputs, target)
        for optimizer in optimizers:
            optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return losses


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def refusal(make: Make, places: Mapping[str, str]) -> str:
    """The error of a build that as many processes as there are devices refuse."""
    group = members(places)
    return "" if group is None else told(lambda: built(make, places, 2, group))


def other_optimizer(make: Make, places: Mapping[str, str], path: str) -> list[str]:
    """The errors of checkpoints that have no optimizer, or another one."""
    pipeline, inputs, target, _ = built(make, places, 2)
    sgd, adamw = optimizer_of(pipeline, "sgd"), optimizer_of(pipeline, "adamw")
    pipeline.save(path + "/bare")
    found = [told(lambda: pipeline.load(path + "/bare", sgd))]
    pipeline.step(inputs, target)
    sgd.step()
    pipeline.save(path + "/sgd", sgd)
    return [*found, told(lambda: pipeline.load(path + "/sgd", adamw))]


def foreign_parameter(make: Make, places: Mapping[str, str], path: str) -> tuple[str, str, bool]:
    """What is told of a checkpoint where one process alone has another's optimizer; and whether
    training goes on."""
    pipeline, inputs, target, _ = built(make, places, 2)
    own = optimizer_of(pipeline, "sgd")
    pipeline.step(inputs, target)
    own.step()
    pipeline.save(path, own)
    if dist.get_rank() == 1:
        own.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    saved, loaded = told(lambda: pipeline.save(path, own)), told(lambda: pipeline.load(path, own))
    pipeline.step(inputs, target)
    return saved, loaded, all(gradient is not None for gradient in gradients(pipeline).values())


def without_an_optimizer(make: Make, places: Mapping[str, str], path: str) -> bool | None:
    """Whether a process has no parameters, and so no optimizer, where a checkpoint is written and
    read with those."""
    group = members(places)
    if group is None:
        return None
    pipeline, inputs, target, _ = built(make, places, 2, group)
    some = list(pipeline.parameters())
    optimizer = torch.optim.SGD(some, lr=0.1, momentum=0.9) if some else None
    pipeline.step(inputs, target)
    if optimizer is not None:
        optimizer.step()
    pipeline.save(path, optimizer)
    pipeline.load(path, optimizer)
    return optimizer is None


def default_types(make: Make, places: Mapping[str, str]) -> bool:
    """Whether a step goes through under another default type of numbers than that of the build."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        pipeline, inputs, target, _ = built(make, places, 2)
    finally:
        torch.set_default_dtype(before)
    pipeline.step(inputs, target)
    return all(gradient is not None for gradient in gradients(pipeline).values())


def meta_buffer(make: Make, places: Mapping[str, str]) -> tuple[str, float | None] | None:
    """The error of a buffer on meta that no state has, where it is, and the loss once it has
    values."""
    group = members(places)
    if group is None:
        return None
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    state, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    pipeline = distributed.build(
        model.to("meta"), places, micro_batches(inputs, 2)[0], loss_fn, chunks=2, group=group
    )
    pipeline.load_state_dict(state)
    here = dict(pipeline.module.named_buffers())
    message = told(lambda: pipeline.step(inputs, target)) if here else ""
    for name, buffer in here.items():
        buffer.copy_(buffers[name])
    loss = pipeline.step(inputs, target)
    return message, None if loss is None else loss.item()


def frozen_later(make: Make, places: Mapping[str, str], name: str) -> dict[str, Any]:
    """Gradients of three steps; in the second a parameter is frozen."""
    pipeline, inputs, target, _ = built(make, places, 2)
    steps = []
    for step in range(3):
        for own, parameter in pipeline.named_parameters():
            parameter.grad = None
            if own == name:
                parameter.requires_grad_(step != 1)
        pipeline.step(inputs, target)
        steps.append(copy.deepcopy(gradients(pipeline)))
    return {f"{step}": found for step, found in enumerate(steps)}


def thawed(make: Make, places: Mapping[str, str]) -> list[str]:
    """The errors where something trains that did not, or an input is to have a gradient; nobody
    waits for others."""
    pipeline, inputs, target, _ = built(make, places, 2)
    found = []
    if pipeline.is_first:
        found.append(told(lambda: pipeline.step(inputs.clone().requires_grad_(), target)))
    for parameter in pipeline.parameters():
        if not parameter.requires_grad:
            parameter.requires_grad_()
            found.append(told(lambda: pipeline.step(inputs, target)))
            parameter.requires_grad_(False)
    return found


def failed_alone(make: Make, places: Mapping[str, str], at: str) -> str:
    """What each process is told where one alone fails while the pipeline is built."""
    torch.manual_seed(0)
    model, inputs, _, loss_fn = make()
    alone = dist.get_rank() == 2
    given: Any = nn.MSELoss if at == "arguments" and alone else loss_fn
    full = mock.Mock(side_effect=torch.OutOfMemoryError("no room left"))
    fails = {"memory": "Weights", "device": "_local"}.get(at)
    try:
        with (
            mock.patch(f"placer.distributed.build.{fails}", full)
            if fails and alone
            else nullcontext()
        ):
            with captured_once((make, 2)):
                distributed.build(model, places, micro_batches(inputs, 2)[0], given, chunks=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def after_a_failure(make: Make, places: Mapping[str, str]) -> tuple[bool, str]:
    """Whether a step that fails leaves the gradients of those before, and what is told of a step
    after that."""
    pipeline, inputs, target, _ = built(make, places, 2)
    pipeline.step(inputs, target)
    before = copy.deepcopy(gradients(pipeline))
    with mock.patch.object(pipeline.schedule, "step", side_effect=ValueError("spoilt sample")):
        try:
            pipeline.step(inputs, target)
        except ValueError:
            after = gradients(pipeline)
    same = all(
        torch.equal(cast(Tensor, after[name]), cast(Tensor, gradient))
        for name, gradient in before.items()
    )
    return same, told(lambda: pipeline.step(inputs, target))


def lost(make: Make, places: Mapping[str, str]) -> tuple[list[str], str]:
    """What is told of a step whose first message does not arrive, and of the next one."""
    pipeline, inputs, target, _ = built(make, places, 2)
    with mock.patch(
        "placer.distributed.state.rank_weights._run",
        side_effect=RuntimeError("Connection closed by peer"),
    ):
        try:
            pipeline.step(inputs, target)
        except RuntimeError as error:
            notes = error.__notes__
    return notes, told(lambda: pipeline.step(inputs, target))


def hooked(make: Make, places: Mapping[str, str], schedule: str) -> Any:
    """Gradients under hooks that cut them off; or what a build with such hooks is told, and a step
    with new ones."""
    group = members(places)
    if group is None:
        return None
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = micro_batches(inputs, 2)[0]
    bare = distributed.build(
        model, places, example, loss_fn, chunks=2, schedule=schedule, group=group
    )
    for parameter in model.parameters():
        parameter.register_hook(cut_off)
    options: dict[str, Any] = {"chunks": 2, "schedule": schedule, "group": group}
    message = told(lambda: distributed.build(model, places, example, loss_fn, **options))
    shared = message != "nothing was refused"
    if shared:
        owns = any(name == "embedding.weight" for name, _ in bare.named_parameters())
        return message, told(lambda: bare.step(inputs, target)) if owns else ""
    bare.step(inputs, target)
    return gradients(bare)


def cut_off(gradient: Tensor) -> Tensor:
    """Clamp a gradient: not linear, so parts give another result than the whole."""
    return gradient.clamp(-0.001, 0.001)


def results(make: Make, places: Mapping[str, str]) -> Any:
    """The results of two micro-batches, or the error of those that cannot be joined, where they
    are."""
    group = members(places)
    if group is None:
        return None
    torch.manual_seed(0)
    model, inputs, _, _ = make()
    example = (inputs[0][:4], *inputs[1:]) if isinstance(inputs, tuple) else inputs[:4]
    pipeline = distributed.build(model.eval(), places, example, chunks=2, group=group)
    found: list[Any] = []
    message = told(lambda: found.append(pipeline(inputs)))
    return found[0] if found else message


def evaluated_elsewhere(
    make: Make, places: Mapping[str, str], others: Mapping[str, str]
) -> tuple[list[Tensor], dict[str, Tensor]] | None:
    """Results of a pipeline for evaluation, with another map, after each of two rounds of training;
    and the weights."""
    group = members(places)
    if group is None:
        return None
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    example = micro_batches(inputs, 2)[0]
    with captured_once((make, 2)):
        trainer = distributed.build(model.train(), places, example, loss_fn, chunks=2, group=group)
    optimizers = optimizers_of(trainer, "sgd")
    made: list[Tensor] = []
    for _ in range(2):
        model.train()
        _steps(trainer, optimizers, inputs, target)
        with captured_once((make, 2, "eval")):
            judge = distributed.build(model.eval(), others, example, chunks=2, group=group)
        result = judge(inputs)
        made += [] if result is None else [result]
    weights = judge.full_state_dict()
    return made, {} if weights is None else weights


def trained_elsewhere(
    make: Make, places: Mapping[str, str], others: Mapping[str, str]
) -> str | None:
    """The error of a second pipeline for training, with another map."""
    group = members(places)
    if group is None:
        return None
    model, inputs, _, loss_fn = make()
    example = micro_batches(inputs, 2)[0]
    build = partial(
        distributed.build, model, example_inputs=example, loss_fn=loss_fn, chunks=2, group=group
    )
    build(placement=places)
    return told(lambda: build(placement=others))


def clipped_norm(make: Make, places: Mapping[str, str], max_norm: float) -> dict[str, Any] | None:
    """The norm before gradients were clipped, and the gradients."""
    group = members(places)
    if group is None:
        return None
    pipeline, inputs, target, _ = built(make, places, 2, group)
    pipeline.step(inputs, target)
    norm = pipeline.clip_grad_norm_(max_norm).item()
    return {"norm": norm, "gradients": gradients(pipeline)}


def of_wrapped_flow(make: Make) -> tuple[str, dict[str, Tensor]]:
    """What a training step of a flow inside DistributedDataParallel says, and the gradients by a
    call of that.

    Each process has its share of the batch.
    """
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    mine = [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in (inputs, target)]
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = 2 * index // len(flow.layer_gpus)
    flow.update_flow()
    wrapped = nn.parallel.DistributedDataParallel(flow)
    refusal = told(lambda: flow.train_step(loss_fn))
    loss_fn(wrapped(mine[0]), mine[1]).backward()
    return refusal, {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gathered_and_loaded(make: Make, places: Mapping[str, str], path: str) -> Any:
    """The whole model's state as gathered in the first process, and after a checkpoint was written
    and read."""
    pipeline, *_ = built(make, places, 2, None)
    found = [pipeline.full_state_dict()]
    pipeline.save(path)
    with torch.no_grad():
        for parameter in pipeline.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    # torch asks for it, as with any class in a file
    with torch.serialization.safe_globals([Scaled]):
        pipeline.load(path)
    found.append(pipeline.full_state_dict())
    return found
