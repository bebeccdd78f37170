"""Engines that take turns, so that changes of the machine's speed affect all of them alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from . import timing
from .sample import NOT_RUN, Sample, reason, release

Ready = Callable[[], AbstractContextManager[Callable[[], Any]]]
"""Makes a step ready, and gives back the memory that it needs beside the model."""


@dataclass
class Contender:
    """An engine that takes part.

    Attributes:
        engine: its name.
        devices: the number of devices that it uses.
        chunks: the number of micro-batches, or another swept number.
        turn: times a series of steps and returns the time of one step in ms. Afterwards the memory
            that steps need is free.
        values: its other measurements.
    """

    engine: str
    devices: int
    chunks: int
    turn: Callable[[], float]
    values: dict[str, list[float]] = field(default_factory=dict)

    def sample(self, case: str, times: Sequence[float], failed: str = "") -> Sample:
        """Return its times as a sample."""
        values = {} if failed else {**self.values, "step_ms": list(times)}
        return Sample(case, self.engine, self.devices, self.chunks, values, failed)


def here(engine: str, places: Sequence[torch.device], chunks: int, ready: Ready) -> Contender:
    """Return an engine that runs in this process.

    Args:
        engine: its name.
        places: the devices that its steps use.
        chunks: the number of micro-batches.
        ready: prepares a step at every turn.
    """
    known: list[int] = []

    def turn() -> float:
        with ready() as step:
            for _ in range(timing.repetitions().warm_ups):
                step()
            if not known:
                known.append(timing.row_of(timing.steps(step, places, alone())["step_ms"]))
            return timing.row(step, partial(timing.wait, places), known[0])

    return Contender(engine, len(places), chunks, turn)


def alone() -> int:
    """Return the number of steps by whose time the length of an engine's rows is chosen."""
    return min(3, timing.repetitions().repeats)


PACKAGES = {"torchgpipe": "torchgpipe", "accelerate": "accelerate"}
"""What an engine needs to be installed."""


def installed(case: str, count: int, engines: Sequence[str]) -> tuple[list[str], list[Sample]]:
    """Return the engines whose packages are installed, and a sample for each other engine."""
    missing = [
        engine for engine in engines if engine in PACKAGES and find_spec(PACKAGES[engine]) is None
    ]
    told = [
        Sample(case, engine, count, 0, failed=f"{NOT_RUN}it is not installed") for engine in missing
    ]
    return [engine for engine in engines if engine not in missing], told


_ends = math.inf


def until(seconds: float) -> None:
    """Start no round of a contest that would not end within ``seconds`` from now."""
    global _ends
    _ends = perf_counter() + seconds


def kept(make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]) -> Ready:
    """Return a step that is made at the first turn and stays.

    Args:
        make: makes the step and a function that frees its gradients between turns.
    """
    made: list[tuple[Callable[[], Any], Callable[[], Any]]] = []

    @contextmanager
    def ready() -> Iterator[Callable[[], Any]]:
        if not made:
            made.append(make())
        step, free = made[0]
        yield step
        free()

    return ready


def staying(ready: Ready) -> Ready:
    """Return steps that are prepared at the first turn and keep their memory until the end."""
    held: list[tuple[AbstractContextManager[Any], Callable[[], Any]]] = []

    @contextmanager
    def again() -> Iterator[Callable[[], Any]]:
        if not held:
            context = ready()
            held.append((context, context.__enter__()))
        yield held[0][1]

    return again


def alternate(
    case: str, contenders: Sequence[Contender], rounds: int | None = None
) -> Iterator[Sample]:
    """Yield the sample of each engine after ``rounds`` turns; every other round runs backwards.

    Args:
        case: the case that they run.
        contenders: the engines; an engine that fails has no further turns and no times.
        rounds: the number of turns of each engine, whose median is the value; None for the usual
            one.
    """
    rounds = timing.repetitions().repeats if rounds is None else rounds
    times: list[list[float]] = [[] for _ in contenders]
    failed: dict[int, str] = {}
    longest = 0.0
    for number in range(rounds):
        began = perf_counter()
        if began + longest > _ends:
            break
        order = range(len(contenders))
        for index in order if number % 2 == 0 else reversed(order):
            if index not in failed:
                try:
                    times[index].append(contenders[index].turn())
                except Exception as error:
                    failed[index] = reason(error)
                release()
        longest = max(longest, perf_counter() - began)
    for index, contender in enumerate(contenders):
        yield contender.sample(case, times[index], failed.get(index, ""))


def one_by_one(
    case: str, contenders: list[Contender], rounds: int | None = None
) -> Iterator[Sample]:
    """Yield the sample of each engine, which has all its turns and all memory to itself.

    This is for engines that do not fit in memory together.

    Args:
        case: what they run.
        contenders: the engines; each leaves the list after its turns and so frees its memory.
        rounds: the number of turns of each engine; None for the usual one.
    """
    while contenders:
        yield from alternate(case, [contenders.pop(0)], rounds)
        release()


def fastest(case: str, variants: Sequence[Contender]) -> tuple[Contender | None, list[Sample]]:
    """Return an engine's variant with the shortest step in one turn, and a sample per failure."""
    best: tuple[float, Contender] | None = None
    failed = []
    for variant in variants:
        try:
            ms = variant.turn()
        except Exception as error:
            failed.append(variant.sample(case, [], reason(error)))
        else:
            best = (ms, variant) if best is None or ms < best[0] else best
        release()
    return (None if best is None else best[1]), failed
