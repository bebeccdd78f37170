"""A Llama that fits on no single GPU: one text, and several groups of sequences in flight.

It has the shapes of 70 billion parameters, with as many of its 80 layers as fit on the GPUs. Its
weights are made on their devices. One text of a single sequence shows the time of a token. Then the
same groups go one after another through ``model.generate`` in ``flow.applied()``, and through
``flow.generate_many`` with as many in flight as there are devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

from .. import record
from . import models
from .engine import Engine, Way, equal_share, shown

LARGE, IN_FLIGHT = "large", "in_flight"
"""The names of the two cases."""

_TURNS = 3
"""Most turns: a turn of the large model takes 20 s."""

_LEAST_RATIO = 3.2
"""The requested ratio for four devices: a pipeline of four stages that is idle for a fifth."""

_MOST_READS = 1.3
"""The requested time of a token, in times of reading all weights once."""

_WARM_TOKENS = 8
"""Tokens after which every group's passes are recorded, with the capacity of the whole texts."""


def rows(turns: int, asked: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the cases that are asked for.

    Args:
        turns: how often each way runs.
        asked: names of cases.
    """
    from ..executor import cases

    places = cases.places() if cases.on_gpus() else cases.places(2)
    model = models.large_llama(places)
    flow = models.placed(model, places)
    if LARGE in asked:
        yield from _one_text(flow, model, places, min(turns, _TURNS))
    if IN_FLIGHT in asked:
        yield from _groups(flow, model, places, min(turns, _TURNS))
    flow.undo()


def _one_text(flow: Any, model: Any, places: list[Any], turns: int) -> Iterator[dict[str, Any]]:
    """Yield the times of a token and of the prompt of one text, with the least time of a token."""
    from ..executor import cases

    length, new = (8, 12) if cases.is_small() else (512, 64)
    (ids,) = models.prompts(1, 1, length, places[0])
    least_ms = models.least_token_ms(model)
    with flow.applied() as applied:
        engine = Engine(Way(applied), ids)
        for _ in range(turns):
            engine.turn(new)
    case = f"{models.large_name(model)}, 1 x {length} tokens and {new} more, {len(places)} devices"
    for measure, times in (
        ("a token, in the loop", engine.token_ms(new)),
        ("the prompt and the first token", engine.prompt_ms),
    ):
        spread = shown(min(times)), shown(max(times))
        yield record.row(case, measure, "ms", shown(median(times)), spread=spread)
    is_whole = cases.on_gpus() and len(model.model.layers) == models.LARGE_LAYERS
    yield record.row(
        case,
        "a token, in times of reading all weights once",
        "x",
        shown(median(engine.token_ms(new)) / least_ms),
        target=_MOST_READS if is_whole else None,
        figures={"ms to read all weights once": shown(least_ms)},
    )


def _groups(flow: Any, model: Any, places: list[Any], turns: int) -> Iterator[dict[str, Any]]:
    """Yield the tokens per second of both ways, their ratio, and whether the tokens are equal."""
    from ..executor import cases

    count = len(places)
    batch, length, new = (2, 8, 12) if cases.is_small() else (8, 128, 64)
    groups = models.prompts(count, batch, length, places[0])
    ways: dict[str, Callable[[int], list[list[list[int]]]]] = {
        "several": lambda tokens: _several(flow, groups, tokens),
        "one": lambda tokens: _one(flow, groups, tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts = {}
    for way in ways.values():
        way(_WARM_TOKENS)
    for turn in range(turns):
        for name in list(ways) if turn % 2 == 0 else reversed(ways):
            began = perf_counter()
            texts[name] = ways[name](new)
            rates[name].append(count * batch * new / (perf_counter() - began))
    case = (
        f"{models.large_name(model)}, {count} groups of {batch} x {length} tokens and {new} more,"
        f" {count} devices"
    )
    value = {name: median(found) for name, found in rates.items()}
    several = rates["several"]
    yield record.row(
        case,
        "tokens per second, several groups in flight",
        "tokens/s",
        round(value["several"], 1),
        spread=(round(min(several), 1), round(max(several), 1)),
        peers={"one group at a time": round(value["one"], 1)},
    )
    yield record.row(
        case,
        "several groups in flight, in tokens per second of one group at a time",
        "x",
        round(value["several"] / value["one"], 3),
        target=_LEAST_RATIO if cases.on_gpus() and count == 4 else None,
        smaller_is_better=False,
    )
    yield record.row(
        case,
        "tokens in flight that equal the tokens of one group at a time",
        "%",
        equal_share(*(chain.from_iterable(texts[name]) for name in ("several", "one"))),
    )


def _one(flow: Any, groups: list[Any], new: int) -> list[list[list[int]]]:
    """Return the texts of one group after another."""
    with flow.applied() as model:
        return [model.generate(ids, **models.options(new)).tolist() for ids in groups]


def _several(flow: Any, groups: list[Any], new: int) -> list[list[list[int]]]:
    """Return the texts of all groups, as many in flight."""
    found = flow.generate_many(groups, in_flight=len(groups), **models.options(new))
    return [ids.tolist() for ids in found]
