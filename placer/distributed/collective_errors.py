"""What all processes of a group do or fail at together: one that failed alone would let the others
wait for ever.
"""

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
    """Where something fails in one process alone, the others are told so.

    Args:
        group: the processes; each of them must come here.
        work: what is done, for messages: "build its part".

    Raises:
        InputError: another process failed; in that one, what it failed with.
    """
    try:
        yield
    except Exception as error:  # whatever comes of a user's model, files and memory
        gathered(f"{type(error).__name__}: {error}", group)
        raise
    for rank, message in enumerate(gathered(None, group)):
        if message is not None:
            raise InputError(f"process {rank} could not {work}: {message}")


def gathered(here: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every process has to say."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _on_its_own_gpu(Process.here(dist.get_rank(group))):
        dist.all_gather_object(everyone, here, group=group)
    return everyone


def gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _on_its_own_gpu(process: Process) -> Any:
    """NCCL needs a GPU for every process, before it is known which one the placement gives it."""
    return torch.cuda.device(process.local_rank if process.local_rank < gpus() else -1)
