"""Checkpoints under the model's keys: gathered in one process, or in torch's own format.

``torch.distributed.checkpoint`` stores each tensor under its key, whichever process owns it. So two
processes, or the unsplit model, can read what four processes wrote::

    import torch.distributed.checkpoint as dcp
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from placer import devices
from placer.capture.argument_checks import optimizer_list
from placer.distributed.collective_errors import together
from placer.distributed.state import optimizer_state
from placer.distributed.tensor_codec import as_bytes
from placer.errors import InputError, kind_of
from placer.utils.units import listed

_OPTIMIZER = "optimizer."


def gather(
    own: Mapping[str, Tensor],
    keys: Sequence[str],
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor] | None:
    """Gather the tensors of all processes in one process.

    Args:
        own: this process's tensors.
        keys: of the result, in order.
        rank: of the receiving process, in the group.
        device: of this process; tensors are sent from it.
        group: the processes.

    Returns:
        In that process the tensors on the CPU, elsewhere None.
    """
    # first exchange shapes on meta, then send the data tensor by tensor
    forms: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    taken = {name: _taken_apart(tensor) for name, tensor in own.items()}
    dist.all_gather_object(forms, {name: form for name, (form, _) in taken.items()}, group=group)
    here = dist.get_rank(group)
    if here != rank:
        for _, parts in taken.values():
            for part in parts:
                if part.numel():
                    dist.send(as_bytes(part.to(device)), _global(rank, group), group=group)
        return None
    found = {name: devices.rebuilt(tensor, _on_host) for name, tensor in own.items()}

    def received(part: Tensor) -> Tensor:
        arrived = torch.empty(part.shape, dtype=part.dtype, device=device)
        if arrived.numel():
            raw = as_bytes(arrived)
            dist.recv(raw, _global(source, group), group=group)
            arrived = raw.view(part.dtype).view(part.shape)
        return arrived.cpu()

    for source, there in enumerate(forms):
        if source != rank:
            found |= {name: devices.rebuilt(form, received) for name, form in there.items()}
    return {key: found[key] for key in keys if key in found}


def _taken_apart(tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the tensor rebuilt on meta, and its plain tensors in the order of ``rebuilt``."""
    parts: list[Tensor] = []

    def bare(part: Tensor) -> Tensor:
        parts.append(part.detach())
        return torch.empty(part.shape, dtype=part.dtype, device="meta")

    return devices.rebuilt(tensor, bare), parts


def _on_host(part: Tensor) -> Tensor:
    return part.detach().cpu().clone()


def take(module: nn.Module, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Load this process's part of a whole model's state.

    Args:
        module: holds this process's tensors under the model's names.
        state: the whole model's ``state_dict``.
        keys: the keys that it must have.

    Raises:
        InputError: if keys are missing or unknown, or a tensor has another shape. Nothing is loaded
            then.
    """
    missing, unknown = (
        [key for key in keys if key not in state],
        [key for key in state if key not in set(keys)],
    )
    if missing or unknown:
        raise InputError(
            "the state dict does not fit the model; missing keys: "
            f"{listed(missing, 5) or 'none'}; unknown keys: "
            f"{listed(unknown, 5) or 'none'}; give the state dict of this model"
        )
    own = module.state_dict()
    for key, tensor in own.items():
        if state[key].shape != tensor.shape:
            raise InputError(
                f"{key!r} has shape {tuple(state[key].shape)}; the model's has "
                f"{tuple(tensor.shape)}; give the state dict of this model"
            )
    module.load_state_dict({key: state[key] for key in own})


def save(
    module: nn.Module,
    own: Mapping[str, Any],
    path: str | PathLike[str],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Write the state of all processes.

    Args:
        module: holds this process's tensors under the model's names.
        own: the part of its ``state_dict`` to write.
        path: a folder that all processes can access.
        optimizer: one or several optimizers of these parameters; None for the model only.
        group: the processes.

    Raises:
        InputError: if the path is invalid or not writable.
    """
    state: dict[str, Any] = {"model": dict(own)}
    with together(group, "write its part of the checkpoint"):
        # a process without parameters may have no optimizer
        for each in optimizer_list(optimizer):
            state.setdefault("optimizer", {}).update(optimizer_state.flat(module, each))
    with _explained("written", path):
        state_dict_saver.save(_filled(state), checkpoint_id=path, process_group=group)


def load(
    module: nn.Module,
    path: str | PathLike[str],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Read this process's state.

    Args:
        module: receives this process's tensors.
        path: the folder.
        optimizer: one or several optimizers of these parameters; None for the model only.
        group: the processes.

    Raises:
        InputError: if there is no checkpoint, the path is invalid, or it is of another model or
            optimizer.
    """
    state: dict[str, Any] = {"model": module.state_dict()}
    with _explained("read", path):
        with together(group, "read its part of the checkpoint"):
            optimizers = optimizer_list(optimizer)
            there = FileSystemReader(path).read_metadata().state_dict_metadata if optimizers else {}
            kept = {
                key.removeprefix(_OPTIMIZER): item
                for key, item in there.items()
                if key.startswith(_OPTIMIZER)
            }
            for each in optimizers:
                state.setdefault("optimizer", {}).update(optimizer_state.places(module, each, kept))
        state_dict_loader.load(_filled(state), checkpoint_id=path, process_group=group)
    module.load_state_dict(state["model"])
    for each in optimizers:
        optimizer_state.put(module, each, state["optimizer"])


def _filled(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without empty parts, which torch would search for.

    A process without parameters has empty parts.
    """
    return {key: part for key, part in state.items() if part}


@contextmanager
def _explained(done: str, path: str | PathLike[str]) -> Iterator[None]:
    """Convert a failure, which every process receives, to a one-line InputError.

    A path of another type is refused.
    """
    if not isinstance(path, str | PathLike):
        raise InputError(f"path is {kind_of(path)}; give a folder that all processes see")
    try:
        yield
    except (CheckpointException, OSError) as error:
        reason = (
            next(iter(error.failures.values()))[0]
            if isinstance(error, CheckpointException)
            else error
        )
        line = (str(reason).splitlines() or [""])[0]
        raise InputError(
            f"the checkpoint {str(path)!r} cannot be {done}: {type(reason).__name__}: {line}; give "
            "a folder that all processes see, and the model that it is of"
        ) from error


def _global(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
