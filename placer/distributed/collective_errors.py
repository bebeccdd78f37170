"""Collective success or failure: a process that failed silently would block the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from placer.distributed.ranks import Process
from placer.errors import InputError


@contextmanager
def together(group: dist.ProcessGroup | None, work: str) -> Iterator[None]:
    """Report a failure of one process to all others.

    Args:
        group: the processes, all of which must enter this block.
        work: a description for messages, such as "build its part".

    Raises:
        InputError: if another process failed; the failed process raises its own error.
    """
    try:
        yield
    except Exception as error:  # a user's model, files and memory may raise anything
        gathered(f"{type(error).__name__}: {error}", group)
        raise
    # success also takes part in the exchange: every process waits here for all others
    for rank, message in enumerate(gathered(None, group)):
        if message is not None:
            raise InputError(f"process {rank} could not {work}: {message}")


def gathered(here: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the object of every process, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _on_its_own_gpu(Process.here(dist.get_rank(group))):
        dist.all_gather_object(everyone, here, group=group)
    return everyone


def gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _on_its_own_gpu(process: Process) -> Any:
    """Make one GPU per process current, which NCCL requires before placements are known."""
    return torch.cuda.device(process.local_rank if process.local_rank < gpus() else -1)
