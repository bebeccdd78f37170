"""Engines that run in processes of their own, and how they take part in a contest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed

from . import cases, contest, replicas, timing
from . import distributed as pipelines
from .contest import Contender
from .ranks import Here, RankError, Ranks
from .sample import Sample, release

EAGER = "eager"
"""Plain PyTorch on one device, the whole batch at once."""


@dataclass(frozen=True)
class Turn:
    """A turn that all processes run together.

    Attributes:
        engine: the engine's name.
        chunks: the number of micro-batches; 1 for engines without micro-batches.
        placement: the placement of ``placer.distributed``, as JSON.
    """

    engine: str
    chunks: int = 1
    placement: str = ""


@dataclass
class Runner:
    """An engine in one process.

    Attributes:
        step: one training step.
        free: frees memory between turns.
        wake: allocates that memory again.
        count: the number of consecutive steps; None until the first turn has chosen it.
    """

    step: Callable[[], Any]
    free: Callable[[], Any]
    wake: Callable[[], Any] = lambda: None
    count: int | None = None


def build(here: Here, name: str, turn: Turn) -> None:
    """Prepare an engine in a process; it has run no step yet."""
    case = cases.training(name)
    if turn.engine in replicas.ENGINES:
        step, optimizer = replicas.make(here, name, turn.engine)
    elif turn.engine == EAGER:
        model = case.model(here.home)
        optimizer = cases.sgd(model.parameters())
        step = replicas.step_of(model, optimizer, case.batch(here.home), case.loss)
    else:
        step, optimizer = pipelines.make(here, case, turn.engine, turn.chunks, turn.placement)
    here.kept[str(turn)] = Runner(step, optimizer.zero_grad)


def drop(here: Here, turn: Turn) -> None:
    """Forget an engine."""
    here.kept.pop(str(turn), None)
    release()


def row(here: Here, key: str) -> float:
    """Time a series of steps in all processes, and return the time of one in ms.

    The memory that steps need is free afterwards.
    """
    runner: Runner = here.kept[key]
    runner.wake()
    for _ in range(timing.repetitions().warm_ups):
        runner.step()
    if runner.count is None:
        alone = [timing.row(runner.step, here.meet, 1) for _ in range(contest.alone())]
        agreed = torch.tensor(timing.row_of(alone), device=here.home)
        distributed.broadcast(agreed, src=0)  # all processes run the same number of steps
        runner.count = int(agreed)
    ms = timing.row(runner.step, here.meet, runner.count)
    runner.free()
    release()
    return ms


class Peers:
    """Engines of a training case in processes that stay, at one number of devices.

    Where one fails, the processes end: they are started again, with the engines that are left, when
    one is needed.

    Args:
        name: the name of the case.
        count: the number of processes.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._pool: Ranks | None = None
        self._kept: list[Turn] = []

    def contender(self, turns: Sequence[Turn]) -> tuple[Contender | None, list[Sample]]:
        """Return the fastest of an engine's variants, and a sample for each failed variant."""
        variants = {
            turn: Contender(turn.engine, self._count, turn.chunks, partial(self._row, turn))
            for turn in turns
        }
        best, failed = contest.fastest(self._name, list(variants.values()))
        for turn, variant in variants.items():
            if variant is not best and turn in self._kept:
                self._kept.remove(turn)
                self._run(drop, turn)
        return best, failed

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _row(self, turn: Turn) -> float:
        try:
            if turn not in self._kept:
                self._run(build, self._name, turn)
                self._kept.append(turn)
            ms: float = self._run(row, str(turn))
            return ms
        except RankError:
            self._kept = [other for other in self._kept if other != turn]
            raise

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._pool is None:
            self._pool = Ranks(self._count)
            for turn in self._kept:
                self._pool.run(build, self._name, turn)
        try:
            return self._pool.run(function, *args)
        except RankError:
            self._pool = None
            raise
