"""What placer.distributed refuses, as the processes of a pool tell it; functions here travel by
name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from ranked import Make, built
from torch import Tensor, nn

from placer import distributed
from placer.errors import PlacerError


def told(run: Callable[[], Any]) -> str:
    """The error that Placer tells the user, if any."""
    try:
        run()
    except PlacerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def untrained(make: Make, places: Mapping[str, str], what: str) -> str:
    """The error of a build whose model or loss cannot be trained."""
    model, inputs, _, loss_fn = make()
    given: dict[str, tuple[Any, Any]] = {
        "class of a model": (type(model), loss_fn),
        "class of a loss": (model, nn.MSELoss),
        "loss with a parameter": (model, nn.Linear(6, 1)),
        "frozen model": (copy.deepcopy(model).requires_grad_(False), loss_fn),
    }
    wrong, loss = given[what]
    return told(lambda: distributed.build(wrong, places, inputs[:4], loss, chunks=2))


def loss(make: Make, what: str) -> str | None:
    """The error of a loss that gives no number, or fails: in a pipeline of one process, as no other
    may wait for it."""
    group = dist.new_group([0])
    if dist.get_rank():
        return None
    losses: dict[str, Callable[[Any, Any], Tensor]] = {
        "vector": lambda output, target: output - target,
        "failure": lambda output, target: {}["late"],
        "nothing to learn": lambda output, target: output.detach().mean(),
    }
    model, inputs, target, _ = make()
    places = dict.fromkeys([name for name, _ in model.named_children()], "cpu:0")
    pipeline = distributed.build(model, places, inputs[:4], losses[what], chunks=2, group=group)
    return told(lambda: pipeline.step(inputs, target))


def inference_mode(make: Make, places: Mapping[str, str]) -> tuple[str, float | None] | None:
    """The error of a step in inference mode, and the loss of one outside, of a pipeline that was
    built inside."""
    group = dist.new_group(list(range(len(places))))
    if dist.get_rank() >= len(places):
        return None
    torch.manual_seed(0)
    model, inputs, target, loss_fn = make()
    with torch.inference_mode():
        pipeline = distributed.build(model, places, inputs[:2], loss_fn, chunks=4, group=group)
        message = told(lambda: pipeline.step(inputs, target))
    loss = pipeline.step(inputs, target)
    return message, None if loss is None else loss.item()


def layer(phase: str) -> str | None:
    """The error of a layer that fails in the second micro-batch, in a pipeline of one process."""
    group = dist.new_group([0])
    if dist.get_rank():
        return None
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6))
    tokens = torch.tensor([0, 1, 2, 9 if phase == "forward" else 3])
    fails = False

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails and output.requires_grad:
            output.register_hook(lambda gradient: {}["late"])
        return nn.functional.mse_loss(output, target)

    pipeline = distributed.build(model, {"0": "cpu:0"}, tokens[:2], loss, chunks=2, group=group)
    fails = phase == "backward"
    return told(lambda: pipeline.step(tokens, torch.zeros(4, 6)))


def checkpoint(make: Make, places: Mapping[str, str], path: str) -> str:
    """The error of a checkpoint that is not there."""
    pipeline, *_ = built(make, places, 2)
    return told(lambda: pipeline.load(path))


def no_path(make: Make, places: Mapping[str, str]) -> list[str]:
    """The errors of a checkpoint that is to be nowhere."""
    pipeline, *_ = built(make, places, 2)
    nowhere: Any = None
    return [told(lambda: pipeline.save(nowhere)), told(lambda: pipeline.load(nowhere))]


def state(make: Make, places: Mapping[str, str], rank: int) -> str:
    """The error of a whole state for a process that is none."""
    pipeline, *_ = built(make, places, 2)
    return told(lambda: pipeline.full_state_dict(rank))
