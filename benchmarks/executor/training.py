"""A training case: all engines take turns on the same devices with the same batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from . import cases, contest, distributed, gpipe, ours, replicas, tutorial
from .cases import Training
from .contest import Contender
from .in_ranks import EAGER, Peers, Turn
from .sample import Sample, reason, release

ENGINES = (
    ours.ENGINE,
    *distributed.ENGINES,
    *replicas.ENGINES,
    distributed.PLACED,
    tutorial.ENGINE,
    gpipe.ENGINE,
)
"""Eager PyTorch on one device, by which speed-ups are, always takes part beside them."""


def measure(case: Training, count: int, engines: Sequence[str]) -> Iterator[Sample]:
    """Yield the samples of a contest.

    Args:
        case: the training case.
        count: the number of devices.
        engines: the engines that take part, from ``ENGINES``.
    """
    cases.prepare()
    engines, missing = contest.installed(case.name, count, engines)
    yield from missing
    peers, alone = Peers(case.name, count), Peers(case.name, 1)
    contenders: list[Contender] = []
    try:
        for candidates in _candidates(case, count, engines, peers):
            found, failed = candidates()
            yield from failed
            contenders += [] if found is None else [found]
            release()
        one, _ = alone.contender([Turn(EAGER)])
        for sample in contest.alternate(case.name, [*contenders, *([] if one is None else [one])]):
            if sample.engine == EAGER and sample.failed:
                one = None
            else:
                yield sample
        if one is None:  # it may not fit in memory together with the others
            peers.close()
            contenders.clear()
            release()
            yield from _alone(case, alone)
    finally:
        peers.close()
        alone.close()


def _alone(case: Training, alone: Peers) -> Iterator[Sample]:
    """Yield eager PyTorch's sample after the other engines, with all memory to itself."""
    one, failed = alone.contender([Turn(EAGER)])
    yield from failed
    if one is not None:
        one.values["alternating"] = [0.0]
        yield from contest.alternate(case.name, [one])


Candidates = Callable[[], tuple[Contender | None, list[Sample]]]


def _candidates(
    case: Training, count: int, engines: Sequence[str], peers: Peers
) -> Iterator[Candidates]:
    """Yield, by engine, a function that returns its fastest variant and the failed ones."""
    swept = case.tried(count)
    for engine in ENGINES:
        if engine not in engines:
            continue
        if engine == ours.ENGINE:
            yield partial(_made, case.name, engine, count, lambda: [ours.contender(case, count)])
        elif engine in replicas.ENGINES:
            yield partial(peers.contender, [Turn(engine)])
        elif engine in distributed.ENGINES:
            yield partial(peers.contender, [Turn(engine, chunks) for chunks in swept])
        elif engine == distributed.PLACED:
            yield partial(_placed, case, count, peers)
        else:
            make = tutorial.contender if engine == tutorial.ENGINE else gpipe.contender
            yield partial(
                _made,
                case.name,
                engine,
                count,
                lambda make=make: [make(case, count, chunks) for chunks in swept],
            )


def _made(
    name: str, engine: str, count: int, make: Callable[[], list[Contender]]
) -> tuple[Contender | None, list[Sample]]:
    """Return the fastest of the contenders made here, or why they cannot be made."""
    try:
        return contest.fastest(name, make())
    except Exception as error:
        return None, [Sample(name, engine, count, 0, failed=reason(error))]


def _placed(case: Training, count: int, peers: Peers) -> tuple[Contender | None, list[Sample]]:
    """Return ``placer.distributed`` with placements that are solved here."""
    try:
        model, (inputs, _) = case.model(cases.home()).cpu(), case.batch(cases.home())
        turns = []
        for chunks in case.tried(count):
            placement = ours.placed(ours.measured(model, inputs, chunks, count), count, chunks)
            turns.append(Turn(distributed.PLACED, chunks, placement.to_json()))
    except Exception as error:
        return None, [Sample(case.name, distributed.PLACED, count, 0, failed=reason(error))]
    return peers.contender(turns)
