"""Processes with ranks, started once, that run functions together: starting them anew for every
test takes seconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forks import COLLECTIONS, TORCH


class RankPool:
    """Joined processes; after a failure, which leaves some of them waiting, they are started anew.

    Args:
        size: how many.
        folder: for the files by which they find one another.
        backend: ``gloo``, or ``nccl``, with a GPU for each.
    """

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        self._size, self._folder, self._backend, self._starts = size, folder, backend, 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Call ``function(*args)`` in every process at once, and return what each returned; raise
        what one raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [
            pipe.recv() if pipe.poll(timeout_s) else (True, "no answer") for pipe in self._pipes
        ]
        failures = [
            f"process {rank}:\n{text}" for rank, (failed, text) in enumerate(answers) if failed
        ]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(TORCH)
        self._starts += 1
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            meeting_point = str(self._folder / f"meeting_point_{self._starts}")
            process = context.Process(
                target=_serve, args=(theirs, rank, self._size, meeting_point, self._backend)
            )
            process.daemon = True
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(pipe: Connection, rank: int, size: int, meeting_point: str, backend: str) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # a search for cycles would go through all that torch consists of
    gc.set_threshold(*COLLECTIONS)
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NCCL_NVLS_ENABLE": "0"}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # A test that fails in one process leaves the others waiting for it so long.
    limit = timedelta(seconds=20)
    dist.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=size, timeout=limit
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
