"""Peers: data parallelism with one process per device and an equal part of the batch each.

The engines are DDP, DDP with a compiled model, and FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from placer.zoo import GPT, ResNet

from . import cases
from .cases import Loss
from .ranks import Here

DDP, DDP_COMPILED, FSDP2 = "DDP", "DDP-compiled", "FSDP2"
ENGINES = (DDP, FSDP2, DDP_COMPILED)
"""The one that takes longest to make comes last: where an earlier one fails, processes are started
again."""


def part_of(here: Here, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return this process's share of the batch.

    Raises:
        ValueError: the batch is not divisible by the number of processes.
    """
    inputs, target = batch
    if len(inputs) % here.count:
        raise ValueError(f"a batch of {len(inputs)} does not divide over {here.count} processes")
    return inputs.chunk(here.count)[here.rank].clone(), target.chunk(here.count)[here.rank].clone()


def replicated(engine: str, model: nn.Module, here: Here) -> nn.Module:
    """Return a model on the process's device, ready for data parallelism.

    Args:
        engine: one of ``ENGINES``.
        model: the model, already on the device; it is the same in every process.
        here: the process.
    """
    if engine == FSDP2:
        return sharded(model, here)
    on_gpu = here.place.type == "cuda"
    options: dict[str, Any] = {"device_ids": [here.place]} if on_gpu else {}
    made = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    if engine == DDP:
        return made
    compiled: nn.Module = torch.compile(made, backend="inductor" if on_gpu else "aot_eager")
    return compiled


def sharded(model: nn.Module, here: Here) -> nn.Module:
    """Shard a model with FSDP2 as its documentation shows: every block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.place.type, (here.count,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    if isinstance(model, GPT):
        return model.blocks
    if isinstance(model, ResNet):
        return [
            block
            for layer in (model.layer1, model.layer2, model.layer3, model.layer4)
            for block in layer
        ]
    return [module for module in model.children() if any(True for _ in module.parameters())]


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], loss: Loss
) -> Callable[[], Tensor]:
    """Return a step of plain PyTorch, which returns its loss."""
    inputs, target = batch

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value.detach()

    return step


def make(here: Here, name: str, engine: str) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """Return this process's step on its part of the batch, and its optimizer."""
    case = cases.training(name)
    model = replicated(engine, case.model(here.home), here)
    optimizer = cases.sgd(model.parameters())
    return step_of(model, optimizer, part_of(here, case.batch(here.home)), case.loss), optimizer
