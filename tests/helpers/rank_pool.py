"""Processes with ranks, started once, that run functions together: starting them anew for every test takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODULES = ["torch.distributed.pipelining", "torch.distributed.checkpoint", "placer.distributed", "placer.zoo"]


class RankPool:
    """``size`` processes joined by gloo.

    Args:
        size: how many.
        meeting_point: a file that does not exist yet, by which they find one another.
    """

    def __init__(self, size: int, meeting_point: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        self.processes, self.pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, str(meeting_point)), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Call ``function(*args)`` in every process at once, and return what each returned; raise what one raised."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"process {rank} did not answer")
            answers.append(pipe.recv())
        failures = [f"process {rank}:\n{text}" for rank, (failed, text) in enumerate(answers) if failed]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(pipe: Connection, rank: int, size: int, meeting_point: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((False, function(*args)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
    dist.destroy_process_group()
