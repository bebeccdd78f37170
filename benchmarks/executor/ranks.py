"""Processes with one device each, joined by torch.distributed, that run functions together.

A pool stays while engines take turns: starting processes and compiling in them takes longer than a
measurement.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import distributed

from placer import devices

from . import cases
from .sample import Told, reason

START = "spawn"
"""How processes are started: a fork would inherit a CUDA context that it cannot use."""

LIMIT_S = 300.0
"""For one call, compiling included."""


class RankError(Told):
    """A process raised an error or gave no answer; the pool has ended."""


@dataclass
class Here:
    """The context of the process in which a function runs.

    Attributes:
        rank: the rank of the process.
        count: the number of processes.
        place: the process's own device.
        kept: objects that functions keep for later functions.
    """

    rank: int
    count: int
    place: torch.device
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> torch.device:
        """Return the device on which its models are made; a stand-in stands for the host."""
        return torch.device("cpu") if self.place.type == "cpu" else self.place

    def meet(self) -> None:
        """Wait until the devices of all processes are idle."""
        devices.synchronise(self.place)
        distributed.barrier()
        devices.synchronise(self.place)


class Ranks:
    """Processes, one for each of the first devices.

    Args:
        count: the number of processes.
    """

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context: Any = multiprocessing.get_context(START)
        meeting = str(Path(self._folder.name) / "meeting")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, meeting))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> Any:
        """Call ``function(here, *args)`` in every process, and return the first process's result.

        Raises:
            RankError: a process raised an error, ended, or did not return in time. The others might
                wait for it forever, so all are ended.
        """
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            return self._answer(limit_s)
        except (RankError, OSError) as error:
            self.close()
            raise (
                error if isinstance(error, RankError) else RankError("a process has ended")
            ) from error

    def _answer(self, limit_s: float) -> Any:
        waiting, first, until = list(self._pipes), None, perf_counter() + limit_s
        while waiting:
            ready = wait(waiting, timeout=max(0.0, until - perf_counter()))
            if not ready:
                raise RankError(f"no end within {limit_s:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    failed, answer = pipe.recv()
                except EOFError:
                    raise RankError("a process has ended") from None
                if failed:
                    raise RankError(answer)
                first = answer if pipe is self._pipes[0] else first
                waiting.remove(pipe)
        return first

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, count: int, meeting: str) -> None:
    """Join the other processes, then run the functions that arrive."""
    cases.prepare()
    # Expandable segments reduce fragmentation; the variable must be set before CUDA's first use.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ["LOCAL_RANK"] = str(rank)
    place = cases.places(count)[rank]
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=count
    )
    here = Here(rank, count, place)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(here, *args)))
        except Exception as error:
            pipe.send((True, reason(error)))
